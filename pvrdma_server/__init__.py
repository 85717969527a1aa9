"""pvrdma-server: a PVRDMA device for stock QEMU over vfio-user, one process per virtual machine.

Read docs/architecture.md first. The layers, and who may import whom, are enforced by tests/unit/test_layers.py.
"""

__version__ = "0.1.0.dev0"
