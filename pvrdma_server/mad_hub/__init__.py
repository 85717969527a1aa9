"""The MAD hub: one per port of a host RDMA device, for the connection management of the host's VMs.

Read `switch` first (who may send what to whom, sans-I/O), then `connections` (comm ids), `cm` (the messages), and
then what does I/O: `umad` (the host's network), `lanes` (its slow sends), `daemon` (sockets and tasks). `old_mux` is
the side that QEMU's old pvrdma devices talk to.
"""
