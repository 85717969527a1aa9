"""What the device advertises: the backend's limits and the configuration's, clamped to what drivers survive."""

from typing import Final, NamedTuple

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_verbs import DeviceCapFlags
from pvrdma_server.backend import RdmaBackend
from pvrdma_server.guest_memory import MAX_PDIR_PAGES, PAGE_SIZE
from pvrdma_server.qp_ops import rq_entry_size, sq_entry_size


class DeviceConfig(NamedTuple):
    """What an operator decides; sizes beyond these and the backend's are not advertised.

    Attributes:
        roce_version: 1 or 2. The driver refuses a device that offers both.
        mapped_doorbells: doorbell pages of processes are memory, and their rings are watched; needs a watcher.
        max_uar: doorbell pages, a power of two: one for the kernel, one per process that opens the device.
        max_qp: at most 65535, for rdma-core sizes its table by the low 16 bits.
        max_cq: at most 512 without risk of more notifications than the ring holds (two per CQ).
        gid_table_len: at most 256, for address vectors carry the index in a byte.
    """

    roce_version: int = 2
    mapped_doorbells: bool = False
    max_uar: int = 256
    max_qp: int = 4096
    max_qp_wr: int = 16384
    max_sge: int = 16
    max_cq: int = 512
    max_cqe: int = 65536
    max_mr: int = 65536
    max_pd: int = 4096
    max_srq: int = 512
    gid_table_len: int = 128


LIMIT_NAMES: Final = tuple(n for n in DeviceConfig._fields if n.startswith(("max_", "gid_")))
# CREATE_QP counts a queue pair's pages in 16 bits.
_MAX_QP_PAGES: Final = 0xFFFF
_CQE_SIZE: Final = 64
# Doorbell pages are guest address space, twice; 16 MiB of it.
_MAX_UAR: Final = 2048


def survivable(config: DeviceConfig) -> DeviceConfig:
    """`config` with what would corrupt a guest, or could not be created, clamped.

    The driver and rdma-core index tables with handles of 16 bits, round sizes up after they have checked them, and put
    each object's rings into one page directory.
    """
    max_sge = _power_of_two(min(config.max_sge, 128))
    sq, rq = sq_entry_size(max_sge), rq_entry_size(max_sge)
    return config._replace(
        max_uar=_power_of_two(min(max(config.max_uar, 2), _MAX_UAR)),
        max_qp=min(config.max_qp, 65535),
        max_sge=max_sge,
        max_qp_wr=_power_of_two(
            min(config.max_qp_wr, (_MAX_QP_PAGES - 3) * PAGE_SIZE // (sq + rq))
        ),
        max_cq=min(config.max_cq, 65535),
        max_cqe=_power_of_two(min(config.max_cqe, (MAX_PDIR_PAGES - 1) * PAGE_SIZE // _CQE_SIZE)),
        max_srq=min(config.max_srq, 65535),
        max_pd=min(config.max_pd, 0xFF_FFFE),
        max_mr=min(config.max_mr, 0xFF_FFFE),
        gid_table_len=min(config.gid_table_len, 256),
    )


def make_caps(backend: RdmaBackend, config: DeviceConfig) -> api.DeviceCaps:
    """The capabilities: the backend's limits and the configuration's, clamped to what drivers survive."""
    limits = backend.limits
    config = survivable(config)
    atomics = api.AtomicOps.COMP_SWAP | api.AtomicOps.FETCH_ADD if limits.atomics else 0
    bmme = api.BmmeFlags.LOCAL_INV | api.BmmeFlags.REMOTE_INV | api.BmmeFlags.FAST_REG_WR
    empty = api.DEVICE_CAPS.unpack_from(bytes(api.DEVICE_CAPS.size))
    max_sge = _power_of_two(min(limits.max_sge, config.max_sge))
    return empty._replace(
        fw_ver=1 << 32,
        node_guid=limits.node_guid,
        sys_image_guid=limits.node_guid,
        max_mr_size=min(limits.max_mr_size, 1 << 30),
        page_size_cap=PAGE_SIZE,
        vendor_id=api.PCI_VENDOR_ID_VMWARE,
        vendor_part_id=api.PCI_DEVICE_ID_VMWARE_PVRDMA,
        hw_ver=api.PVRDMA_VERSION,
        max_qp=min(limits.max_qp, config.max_qp),
        max_qp_wr=_power_of_two(min(limits.max_qp_wr, config.max_qp_wr)),
        device_cap_flags=DeviceCapFlags.SYS_IMAGE_GUID
        | DeviceCapFlags.RC_RNR_NAK_GEN
        | DeviceCapFlags.CURR_QP_STATE_MOD,
        max_sge=max_sge,
        max_sge_rd=max_sge,
        max_cq=min(limits.max_cq, config.max_cq),
        max_cqe=_power_of_two(min(limits.max_cqe, config.max_cqe)),
        max_mr=min(limits.max_mr, config.max_mr),
        max_pd=min(limits.max_pd, config.max_pd),
        max_qp_rd_atom=limits.max_qp_rd_atom,
        max_res_rd_atom=limits.max_qp_rd_atom * min(limits.max_qp, config.max_qp),
        max_qp_init_rd_atom=limits.max_qp_init_rd_atom,
        max_ah=limits.max_ah,
        max_srq=min(limits.max_srq, config.max_srq),
        max_srq_wr=_power_of_two(min(limits.max_srq_wr, config.max_qp_wr)),
        max_srq_sge=_power_of_two(min(limits.max_srq_sge, config.max_sge)),
        max_uar=config.max_uar,
        gid_tbl_len=min(limits.gid_table_len, config.gid_table_len),
        max_pkeys=1,
        local_ca_ack_delay=limits.local_ca_ack_delay,
        phys_port_cnt=1,
        atomic_ops=atomics,
        bmme_flags=bmme if limits.memory_management else 0,
        gid_types=api.GidType.ROCE_V2 if config.roce_version == 2 else api.GidType.ROCE_V1,
        max_fast_reg_page_list_len=min(limits.max_fast_reg_pages, api.MAX_FAST_REG_PAGES),
    )


def _power_of_two(value: int) -> int:
    """The largest power of two not above `value`: the driver rounds sizes up after it has checked them."""
    return 1 << (value.bit_length() - 1)
