"""What the device advertises: the backend's limits and the configuration's, clamped to what drivers survive."""

from typing import NamedTuple

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_verbs import DeviceCapFlags
from pvrdma_server.backend import RdmaBackend
from pvrdma_server.guest_memory import PAGE_SIZE


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


def make_caps(backend: RdmaBackend, config: DeviceConfig) -> api.DeviceCaps:
    """The capabilities: the backend's limits and the configuration's, clamped to what drivers survive."""
    limits = backend.limits
    atomics = api.AtomicOps.COMP_SWAP | api.AtomicOps.FETCH_ADD if limits.atomics else 0
    bmme = api.BmmeFlags.LOCAL_INV | api.BmmeFlags.REMOTE_INV | api.BmmeFlags.FAST_REG_WR
    empty = api.DEVICE_CAPS.unpack_from(bytes(api.DEVICE_CAPS.size))
    max_sge = _power_of_two(min(limits.max_sge, config.max_sge, 128))
    return empty._replace(
        fw_ver=1 << 32,
        node_guid=limits.node_guid,
        sys_image_guid=limits.node_guid,
        max_mr_size=min(limits.max_mr_size, 1 << 30),
        page_size_cap=PAGE_SIZE,
        vendor_id=api.PCI_VENDOR_ID_VMWARE,
        vendor_part_id=api.PCI_DEVICE_ID_VMWARE_PVRDMA,
        hw_ver=api.PVRDMA_VERSION,
        max_qp=min(limits.max_qp, config.max_qp, 65535),
        max_qp_wr=_power_of_two(min(limits.max_qp_wr, config.max_qp_wr)),
        device_cap_flags=DeviceCapFlags.SYS_IMAGE_GUID
        | DeviceCapFlags.RC_RNR_NAK_GEN
        | DeviceCapFlags.CURR_QP_STATE_MOD,
        max_sge=max_sge,
        max_sge_rd=max_sge,
        max_cq=min(limits.max_cq, config.max_cq, 65535),
        max_cqe=_power_of_two(min(limits.max_cqe, config.max_cqe)),
        max_mr=min(limits.max_mr, config.max_mr),
        max_pd=min(limits.max_pd, config.max_pd),
        max_qp_rd_atom=limits.max_qp_rd_atom,
        max_res_rd_atom=limits.max_qp_rd_atom * min(limits.max_qp, config.max_qp),
        max_qp_init_rd_atom=limits.max_qp_init_rd_atom,
        max_ah=limits.max_ah,
        max_srq=min(limits.max_srq, config.max_srq, 65535),
        max_srq_wr=_power_of_two(min(limits.max_srq_wr, config.max_qp_wr)),
        max_srq_sge=_power_of_two(min(limits.max_srq_sge, config.max_sge)),
        max_uar=config.max_uar,
        gid_tbl_len=min(limits.gid_table_len, config.gid_table_len, 256),
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
