"""The programs people measure RDMA with, unmodified: within a guest, with both kinds of doorbells, and between two."""

import re
import time

import pytest
from pvrdma_lab import Guest, Lab
from pvrdma_lab.programs import perftest, pingpong, rdma_check, rping
from vm.pairs import Ends, labs, perftest_cm_pair, perftest_pair
from vm.server_state import assert_no_errors, complaints, guest_errors, status

from pvrdma_server.backend_soft import SoftBackend, SoftConfig
from pvrdma_server.caps import DeviceConfig, make_caps
from pvrdma_server.config import node_guid_of

pytestmark = [labs("mapped", "trapped", "two"), pytest.mark.usefixtures("settled")]

MIB = 1 << 20
# In one guest two polling programs share an emulated CPU: each message may cost two of the guest's time slices.
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
def test_pingpong(ends: Ends, size_bytes: int) -> None:
    pingpong(*ends, size_bytes, FEW)


@pytest.mark.parametrize("size_bytes", [1, 4097, MIB])
def test_pingpong_with_events(ends: Ends, size_bytes: int) -> None:
    pingpong(*ends, size_bytes, 200, "-e")


def test_pingpong_of_a_message_larger_than_a_ring(ends: Ends) -> None:
    pingpong(*ends, 8 * MIB, 10, "-e")


def test_pingpong_with_a_small_mtu_and_a_short_ring(ends: Ends) -> None:
    pingpong(*ends, 65_537, 100, "-e -m 256 -r 2")


def test_pingpong_with_unreliable_datagrams(ends: Ends) -> None:
    pingpong(*ends, 2048, FEW, "-e", program="ibv_ud_pingpong")


def test_pingpong_with_a_shared_receive_queue(ends: Ends) -> None:
    pingpong(*ends, 4096, 100, "-e", program="ibv_srq_pingpong")


def test_unreliable_connections_are_refused_by_the_driver(guest: Guest) -> None:
    refused = guest.run("ibv_uc_pingpong -g 1")
    assert refused.status == 1
    assert "Couldn't create QP" in refused.stdout + refused.stderr
    (complaint,) = complaints(guest)
    assert "queuepair type 3 not supported" in complaint


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_send_bw"])
@pytest.mark.parametrize("size_bytes", [2, 4096, MIB])
def test_bandwidth(ends: Ends, program: str, size_bytes: int) -> None:
    # What few tiny messages a second make is 0.00 MiB/s to perftest: only a large one's rate says something.
    rate = perftest(*ends, program, size_bytes, 200).mib_per_s
    assert rate is not None
    assert size_bytes < MIB or rate > 1


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_send_bw"])
def test_bandwidth_of_several_queue_pairs(ends: Ends, program: str) -> None:
    # perftest's line says the iterations of all queue pairs together.
    output = perftest_pair(ends, f"{program} -q 4 -s 4096 -n 100", 90)
    assert re.search(r"^\s*4096\s+400\s", output, re.M), output


def test_bandwidth_of_queue_pairs_with_a_shared_receive_queue(ends: Ends) -> None:
    output = perftest_pair(ends, "ib_send_bw --use-srq -q 4 -s 4096 -n 100", 90)
    assert re.search(r"^\s*4096\s+400\s", output, re.M), output


def test_bandwidth_of_one_request_at_a_time(ends: Ends) -> None:
    perftest(*ends, "ib_write_bw", 65_536, FEW, "-t 1")


# perftest refuses events for WRITE.
@pytest.mark.parametrize(
    "program", ["ib_send_bw", "ib_read_bw", "ib_atomic_bw", "ib_send_lat", "ib_read_lat"]
)
def test_perftest_with_events(ends: Ends, program: str) -> None:
    perftest(*ends, program, 8 if "atomic" in program else 4096, 100, "-e")


@pytest.mark.parametrize("options", ["", "-e"])
def test_bandwidth_of_datagrams(ends: Ends, options: str) -> None:
    perftest(*ends, "ib_send_bw", 1024, 100, f"-c UD {options}")


def test_bandwidth_in_both_directions(ends: Ends) -> None:
    perftest(*ends, "ib_send_bw", 65_536, 100, "-b")


def test_bandwidth_with_inline_data(ends: Ends) -> None:
    """The driver has no inline data; perftest asks for some and must live with none."""
    perftest(*ends, "ib_send_bw", 64, 100, "-I 0")


def test_atomic_bandwidth(ends: Ends) -> None:
    perftest(*ends, "ib_atomic_bw", 8, 200)
    perftest(*ends, "ib_atomic_bw", 8, 200, "-A CMP_AND_SWAP")


@pytest.mark.parametrize("program", ["ib_write_lat", "ib_read_lat", "ib_send_lat", "ib_atomic_lat"])
def test_latency(ends: Ends, program: str) -> None:
    size_bytes = 8 if "atomic" in program else 64
    assert (perftest(*ends, program, size_bytes, FEW).usec or 0) > 0


# Not ib_send_lat -c UD -e: docs/conformance.md says why.
@pytest.mark.parametrize(
    "words",
    ["ib_send_bw -e -n 100 -s 4096", "ib_send_lat -e -n 50 -s 1024", "ib_write_bw -n 100 -s 65536",
     "ib_read_lat -n 20 -s 64", "ib_atomic_bw -n 50", "ib_send_bw -c UD -n 50 -s 1024"],
)  # fmt: skip
def test_perftest_over_rdma_cm(ends: Ends, words: str) -> None:
    perftest_cm_pair(ends, words, 90)


@pytest.mark.parametrize("size_bytes", [64, 65_535])
def test_rping(ends: Ends, size_bytes: int) -> None:
    for server, client in ends.ways:
        rping(server, client, size_bytes, 20)


def test_no_program_did_wrong(lab: Lab) -> None:
    """The last of the module: all these programs together have not made a server count one error."""
    for guest in lab:
        assert_no_errors(guest)
