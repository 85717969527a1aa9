"""What a NAK means to the requester that gets it.

Source: InfiniBand Architecture Specification vol. 1, tables 43 to 46 (AETH), 9.9.2.
"""

from typing import Final

from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.codes import REM_ACCESS_ERR, REM_INV_REQ_ERR, REM_OP_ERR

NAK_STATUS: Final = {
    wire.NAK_INVALID_REQUEST: REM_INV_REQ_ERR,
    wire.NAK_REMOTE_ACCESS: REM_ACCESS_ERR,
    wire.NAK_REMOTE_OPERATIONAL: REM_OP_ERR,
}
"""WcStatus that a fatal NAK gives the request it hits."""

RNR_INFINITE: Final = 7
"""Value of rnr_retry that never gives up."""

# In 0.01 ms. Source: table 46.
_RNR_DELAY = (
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
    256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
)  # fmt: skip
RNR_DELAY_NS: Final = tuple(units * 10_000 for units in _RNR_DELAY)
"""How long to wait for each RNR timer code, in nanoseconds."""
