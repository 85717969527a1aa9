"""The embedded backend: RDMA between the VMs of a host without any RDMA device.

Read `backend` first (what the core holds), then `wire` (the messages), `qp`, `requester` and
`responder` (the protocol), `carrier` (what moves messages, and how to add a way).
"""

from pvrdma_server.backend_soft.backend import SoftBackend
from pvrdma_server.backend_soft.config import SoftConfig
from pvrdma_server.backend_soft.local_fabric import LocalFabric
from pvrdma_server.backend_soft.shm_fabric import ShmFabric

__all__ = ["LocalFabric", "ShmFabric", "SoftBackend", "SoftConfig"]
