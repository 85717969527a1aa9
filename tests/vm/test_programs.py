"""The programs people measure RDMA with, unmodified, in a guest; both kinds of doorbells."""

import re
import time

import pytest
from pvrdma_lab import Guest
from pvrdma_lab.programs import perftest, pingpong, rdma_check, rping
from vm.server_state import complaints, guest_errors, status

from pvrdma_server.backend_soft import SoftBackend, SoftConfig
from pvrdma_server.caps import DeviceConfig, make_caps
from pvrdma_server.cli import node_guid_of

pytestmark = [
    pytest.mark.parametrize("lab", ["mapped", "trapped"], indirect=True, scope="module"),
    pytest.mark.usefixtures("settled"),
]

MIB = 1 << 20
# Two polling programs share one emulated CPU: each message may cost two of the guest's time slices.
FEW = 30


def test_devinfo_says_what_is_advertised(guest: Guest) -> None:
    fields = dict(re.findall(r"^\s*([a-z_]+):\s+(\S+)", guest.check("ibv_devinfo -v"), re.M))
    name = f"{guest.folder.parent.name}-a"
    guid = node_guid_of(name)
    config = SoftConfig(name=name, node_guid=guid)
    backend = SoftBackend(clock_ns=time.monotonic_ns, on_work=lambda: None, config=config)
    caps = make_caps(backend, DeviceConfig())
    for field in ("max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr", "max_pd", "max_ah",
                  "max_srq", "max_srq_wr", "max_srq_sge", "max_qp_rd_atom", "max_pkeys"):  # fmt: skip
        assert int(fields[field]) == getattr(caps, field), field
    assert int(fields["max_mr_size"], 0) == caps.max_mr_size
    assert fields["node_guid"].replace(":", "") == guid.hex()
    assert (fields["vendor_id"], fields["vendor_part_id"], fields["hw_ver"]) == (
        "0x15ad",
        "2080",
        "0x14",
    )
    assert (fields["state"], fields["link_layer"]) == ("PORT_ACTIVE", "Ethernet")
    assert int(fields["gid_tbl_len"]) == caps.gid_tbl_len


def test_gids_follow_from_addresses(guest: Guest) -> None:
    guest.check("ip address add 10.99.0.1/24 dev eth0")
    gids = {gid["gid"] for gid in status(guest)["gids"].values()}
    guest.check("ip address del 10.99.0.1/24 dev eth0")
    assert "00000000000000000000ffff0a630001" in gids
    assert "00000000000000000000ffff0a4d0001" in gids


def test_every_byte_of_every_operation(guest: Guest) -> None:
    checks, _ = rdma_check(guest)
    assert checks == 34
    assert guest_errors(guest) == {}


@pytest.mark.parametrize("size_bytes", [1, 4096, 100_001, MIB])
def test_pingpong(guest: Guest, size_bytes: int) -> None:
    pingpong(guest, guest, size_bytes, FEW)


@pytest.mark.parametrize("size_bytes", [1, 4097, MIB])
def test_pingpong_with_events(guest: Guest, size_bytes: int) -> None:
    pingpong(guest, guest, size_bytes, 200, "-e")


def test_pingpong_with_a_small_mtu_and_a_short_ring(guest: Guest) -> None:
    pingpong(guest, guest, 65_537, 100, "-e -m 256 -r 2")


def test_pingpong_with_unreliable_datagrams(guest: Guest) -> None:
    pingpong(guest, guest, 2048, FEW, "-e", program="ibv_ud_pingpong")


def test_pingpong_with_a_shared_receive_queue(guest: Guest) -> None:
    pingpong(guest, guest, 4096, 100, "-e", program="ibv_srq_pingpong")


def test_unreliable_connections_are_refused_by_the_driver(guest: Guest) -> None:
    refused = guest.run("ibv_uc_pingpong -g 1")
    assert refused.status == 1
    assert "Couldn't create QP" in refused.stdout + refused.stderr
    (complaint,) = complaints(guest)
    assert "queuepair type 3 not supported" in complaint


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_send_bw"])
@pytest.mark.parametrize("size_bytes", [2, 4096, MIB])
def test_bandwidth(guest: Guest, program: str, size_bytes: int) -> None:
    # What few tiny messages a second make is 0.00 MiB/s to perftest: only a large one's rate says something.
    rate = perftest(guest, guest, program, size_bytes, 200).mib_per_s
    assert rate is not None
    assert size_bytes < MIB or rate > 1


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_send_bw"])
def test_bandwidth_of_several_queue_pairs(guest: Guest, program: str) -> None:
    # perftest's line says the iterations of all queue pairs together.
    words = f"{program} -F -x 1 -q 4 -s 4096 -n 100"
    with guest.popen(words, 90) as server:
        server.wait_for("Waiting for client")
        output = guest.check(f"{words} {guest.ip}", 90)
        assert server.wait(90).ok
    assert re.search(r"^\s*4096\s+400\s", output, re.M), output


def test_bandwidth_in_both_directions(guest: Guest) -> None:
    perftest(guest, guest, "ib_send_bw", 65_536, 100, "-b")


def test_bandwidth_with_inline_data(guest: Guest) -> None:
    """The driver has no inline data; perftest asks for some and must live with none."""
    perftest(guest, guest, "ib_send_bw", 64, 100, "-I 0")


def test_atomic_bandwidth(guest: Guest) -> None:
    perftest(guest, guest, "ib_atomic_bw", 8, 200)
    perftest(guest, guest, "ib_atomic_bw", 8, 200, "-A CMP_AND_SWAP")


@pytest.mark.parametrize("program", ["ib_write_lat", "ib_read_lat", "ib_send_lat", "ib_atomic_lat"])
def test_latency(guest: Guest, program: str) -> None:
    size_bytes = 8 if "atomic" in program else 64
    assert (perftest(guest, guest, program, size_bytes, FEW).usec or 0) > 0


def test_perftest_over_rdma_cm(guest: Guest) -> None:
    with guest.popen("ib_send_bw -F -R -e -n 100 -s 4096", 90) as server:
        server.wait_for("Waiting for client")
        guest.check(f"ib_send_bw -F -R -e -n 100 -s 4096 {guest.ip}", 90)
        assert server.wait(90).ok


@pytest.mark.parametrize("size_bytes", [64, 65_535])
def test_rping(guest: Guest, size_bytes: int) -> None:
    rping(guest, guest, size_bytes, 20)


def test_no_program_did_wrong(guest: Guest) -> None:
    """The last of the module: all these programs together have not made the server count one guest error."""
    assert guest_errors(guest) == {}
    assert status(guest)["device"]["events_dropped"] == 0
