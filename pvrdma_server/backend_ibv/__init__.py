"""The backend over a host RDMA device: an HCA, an SR-IOV function, or soft-RoCE (rxe), through pyverbs.

Contract: as `backend.RdmaBackend`; the only importer of pyverbs, which must be version 60 or newer (registration with a
chosen iova). A guest's region is one contiguous mapping registered at the guest's own virtual address, so its keys and
addresses mean the same to the guest, to the host device and to every peer; the data path translates nothing. What it
cannot carry it does not advertise: FAST_REG_MR and LOCAL_INV work on keys that the host's kernel would have to own.

Read first: backend.py, then qp.py. The parts: host.py (pyverbs' values and errors), mapping.py (scattered pages to one
mapping), memory.py (PDs and MRs), queues.py (completion queues), qp.py, srq.py, addresses.py (GIDs). QP1 is ../gsi.py.
"""

from pvrdma_server.backend_ibv.addresses import AddressKeeper
from pvrdma_server.backend_ibv.backend import IbvBackend, IbvConfig

__all__ = ["AddressKeeper", "IbvBackend", "IbvConfig"]
