"""The lab: sets up and runs real QEMU guests on pvrdma-server. Standard library only, but for cli.py (click).

Tests import Lab, Guest, Result and Running from here; scripts/lab is the same by hand.
"""

from pvrdma_lab.agent_client import AgentError, Result, Running
from pvrdma_lab.guest import Guest, GuestCommandError
from pvrdma_lab.lab import Lab
from pvrdma_lab.state import LabError

__all__ = ["AgentError", "Guest", "GuestCommandError", "Lab", "LabError", "Result", "Running"]
