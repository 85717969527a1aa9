"""The ABI's numbers as plain ints, for code that runs per message.

Contract: constants only. An attribute of an IntEnum costs a descriptor call per use and its result
prints as an enum; here every number is looked up once, at import.
"""

from typing import Final

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, QpState, QpType, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcFlags, WcOpcode, WcStatus, WrOpcode

RESET: Final = int(QpState.RESET)
INIT: Final = int(QpState.INIT)
RTR: Final = int(QpState.RTR)
RTS: Final = int(QpState.RTS)
SQD: Final = int(QpState.SQD)
SQE: Final = int(QpState.SQE)
ERR: Final = int(QpState.ERR)

RC: Final = int(QpType.RC)
UD: Final = int(QpType.UD)
GSI: Final = int(QpType.GSI)

LOCAL_WRITE: Final = int(AccessFlags.LOCAL_WRITE)
REMOTE_WRITE: Final = int(AccessFlags.REMOTE_WRITE)
REMOTE_READ: Final = int(AccessFlags.REMOTE_READ)
REMOTE_ATOMIC: Final = int(AccessFlags.REMOTE_ATOMIC)

FENCE: Final = int(SendFlags.FENCE)
SOLICIT: Final = int(SendFlags.SOLICITED)
SIGNALED: Final = int(SendFlags.SIGNALED)

OP_WRITE: Final = int(WrOpcode.RDMA_WRITE)
OP_WRITE_IMM: Final = int(WrOpcode.RDMA_WRITE_WITH_IMM)
OP_SEND: Final = int(WrOpcode.SEND)
OP_SEND_IMM: Final = int(WrOpcode.SEND_WITH_IMM)
OP_SEND_INV: Final = int(WrOpcode.SEND_WITH_INV)
OP_READ: Final = int(WrOpcode.RDMA_READ)
OP_CMP_SWAP: Final = int(WrOpcode.ATOMIC_CMP_AND_SWP)
OP_FETCH_ADD: Final = int(WrOpcode.ATOMIC_FETCH_AND_ADD)
OP_LOCAL_INV: Final = int(WrOpcode.LOCAL_INV)
OP_FAST_REG: Final = int(WrOpcode.FAST_REG_MR)

SUCCESS: Final = int(WcStatus.SUCCESS)
LOC_LEN_ERR: Final = int(WcStatus.LOC_LEN_ERR)
LOC_QP_OP_ERR: Final = int(WcStatus.LOC_QP_OP_ERR)
LOC_PROT_ERR: Final = int(WcStatus.LOC_PROT_ERR)
WR_FLUSH_ERR: Final = int(WcStatus.WR_FLUSH_ERR)
MW_BIND_ERR: Final = int(WcStatus.MW_BIND_ERR)
BAD_RESP_ERR: Final = int(WcStatus.BAD_RESP_ERR)
REM_INV_REQ_ERR: Final = int(WcStatus.REM_INV_REQ_ERR)
REM_ACCESS_ERR: Final = int(WcStatus.REM_ACCESS_ERR)
REM_OP_ERR: Final = int(WcStatus.REM_OP_ERR)
RETRY_EXC_ERR: Final = int(WcStatus.RETRY_EXC_ERR)
RNR_RETRY_EXC_ERR: Final = int(WcStatus.RNR_RETRY_EXC_ERR)

WC_RECV: Final = int(WcOpcode.RECV)
WC_RECV_IMM: Final = int(WcOpcode.RECV_RDMA_WITH_IMM)
WC_GRH: Final = int(WcFlags.GRH)
WC_WITH_IMM: Final = int(WcFlags.WITH_IMM)
WC_WITH_INV: Final = int(WcFlags.WITH_INVALIDATE)

EVENT_REQ_ERR: Final = int(EqeType.QP_REQ_ERR)
EVENT_ACCESS_ERR: Final = int(EqeType.QP_ACCESS_ERR)
EVENT_COMM_EST: Final = int(EqeType.COMM_EST)
EVENT_SQ_DRAINED: Final = int(EqeType.SQ_DRAINED)
EVENT_LAST_WQE: Final = int(EqeType.QP_LAST_WQE_REACHED)

_WC_OF_WR = {
    OP_WRITE: WcOpcode.RDMA_WRITE,
    OP_WRITE_IMM: WcOpcode.RDMA_WRITE,
    OP_SEND: WcOpcode.SEND,
    OP_SEND_IMM: WcOpcode.SEND,
    OP_SEND_INV: WcOpcode.SEND,
    OP_READ: WcOpcode.RDMA_READ,
    OP_CMP_SWAP: WcOpcode.COMP_SWAP,
    OP_FETCH_ADD: WcOpcode.FETCH_ADD,
    OP_LOCAL_INV: WcOpcode.LOCAL_INV,
    OP_FAST_REG: WcOpcode.FAST_REG_MR,
}
WC_OF_WR: Final = {wr: int(wc) for wr, wc in _WC_OF_WR.items()}
"""WcOpcode of a send work request's WrOpcode; a request of any other opcode only ever fails."""
