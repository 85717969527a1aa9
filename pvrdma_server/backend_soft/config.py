"""What the embedded backend can carry: every limit, and the attack it stops.

Contract: values only. A guest sees the first block through `BackendLimits`; the second block
bounds what the backend itself keeps for a guest or a peer.
"""

from dataclasses import dataclass

from pvrdma_server.abi.pvrdma_verbs import Mtu
from pvrdma_server.backend import BackendLimits
from pvrdma_server.backend_soft.memory import MAX_INDEX, QUARANTINE_FACTOR
from pvrdma_server.backend_soft.wire import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES
from pvrdma_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SoftConfig:
    """Configuration of a `SoftBackend`; sizes in bytes unless a name says otherwise.

    Raises:
        ConfigError: a value that the transport or the guest's driver cannot live with.
    """

    name: str = "soft"
    """Who we are in error messages of others ("gid ... is held by ...")."""
    node_guid: bytes = bytes.fromhex("025056fffe000001")

    # -- what the guest is told -------------------------------------------------------------
    # A QP costs some KiB of ours: stops a guest from filling our memory with queue pairs.
    max_qp: int = 1024
    # Ring entries live in guest memory; stops a flush of endless length.
    max_qp_wr: int = 16384
    # Stops one work request from costing unbounded key look-ups.
    max_sge: int = 16
    # CQs, AHs and SRQs are the core's or small; these stop floods of them.
    max_cq: int = 1024
    max_cqe: int = 65536
    max_ah: int = 65536
    max_srq: int = 256
    max_srq_wr: int = 16384
    # A region keeps its page list (8 bytes a page): stops a guest from registering without end.
    max_mr: int = 65536
    max_mr_size: int = 1 << 30
    max_pd: int = 4096
    # Each READ or atomic in flight is a job at the responder: stops a peer from queueing reads of
    # 1 GiB without end (64 bytes each), and bounds the replay store of atomics. HCAs have 16, rxe 128; with 16 a stream
    # of READs of 64 KiB waited for its peer half of the time.
    max_qp_rd_atom: int = 64
    # Stops FAST_REG_MR from copying long page lists on the way of one work request.
    max_fast_reg_pages: int = 512
    max_msg_size: int = MAX_MESSAGE_BYTES
    gid_table_len: int = 256
    # 4.096 us * 2^15 = 134 ms: a peer's server may be descheduled that long.
    local_ca_ack_delay: int = 15
    mtu: int = int(Mtu.MTU_4096)

    # -- what the transport keeps -----------------------------------------------------------
    # Bytes per message on the carrier: larger amortises, smaller lets others in between. Copying
    # this much takes about as long as two small messages, 15 to 30 us.
    chunk_bytes: int = MAX_CHUNK_BYTES
    # Unacknowledged bytes per QP: what goes wrong is sent again from there. Twice a ring, for what was taken out of one
    # is acknowledged in large steps.
    window_bytes: int = 8 << 20
    # Chunks one QP sends, and messages it answers, before the next QP has its turn.
    turn_chunks: int = 8
    # Requests flushed per turn: stops the flush of a full ring from stalling everyone else.
    turn_flush: int = 128
    # A shorter timeout than our own scheduling jitter would only make storms of retries.
    min_ack_timeout_ns: int = 4_000_000

    def __post_init__(self) -> None:
        if not 2 < self.max_qp <= 0xFFFF:
            raise ConfigError(f"max_qp {self.max_qp} is not in 3..65535")
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ConfigError(f"chunk_bytes {self.chunk_bytes} is not in 1..{MAX_CHUNK_BYTES}")
        if not 0 < self.max_msg_size <= MAX_MESSAGE_BYTES:
            raise ConfigError(f"max_msg_size {self.max_msg_size} is not in 1..1 GiB")
        if self.max_mr * QUARANTINE_FACTOR > MAX_INDEX:
            raise ConfigError(f"max_mr {self.max_mr} leaves no keys to rest")
        if len(self.node_guid) != 8:
            raise ConfigError("node_guid is not 8 bytes")

    def limits(self) -> BackendLimits:
        """What the device may advertise."""
        return BackendLimits(
            max_qp=self.max_qp,
            max_qp_wr=self.max_qp_wr,
            max_sge=self.max_sge,
            max_cq=self.max_cq,
            max_cqe=self.max_cqe,
            max_mr=self.max_mr,
            max_mr_size=self.max_mr_size,
            max_pd=self.max_pd,
            max_ah=self.max_ah,
            max_srq=self.max_srq,
            max_srq_wr=self.max_srq_wr,
            max_srq_sge=self.max_sge,
            max_qp_rd_atom=self.max_qp_rd_atom,
            max_qp_init_rd_atom=self.max_qp_rd_atom,
            max_fast_reg_pages=self.max_fast_reg_pages,
            max_msg_size=self.max_msg_size,
            gid_table_len=self.gid_table_len,
            local_ca_ack_delay=self.local_ca_ack_delay,
            atomics=True,
            memory_management=True,
            node_guid=self.node_guid,
        )
