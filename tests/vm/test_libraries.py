"""What stands on verbs in a guest: librdmacm's programs, rsockets, UCX, libfabric; both kinds of doorbells.

What does not work, and why, stands in docs/conformance.md.
"""

import re

import pytest
from pvrdma_lab import Guest
from vm.pairs import CM_LISTENS, cm_pair, libfabric_pair, pair, perftest_pair, ucx_pair
from vm.server_state import guest_errors, status

pytestmark = [
    pytest.mark.parametrize("lab", ["mapped", "trapped"], indirect=True, scope="module"),
    pytest.mark.usefixtures("settled"),
]

SMP = 2
MEMORY_MIB = 1024
# rc_verbs connects by messages of another transport.
RC = "rc_verbs,ud_verbs:aux,self"
UD = "ud_verbs,self"


@pytest.mark.parametrize("words", ["ucmatose", "ucmatose -c 10 -C 20 -S 4096", "udaddy",
                                   "udaddy -c 4 -C 10 -S 1024"])  # fmt: skip
def test_connections(guest: Guest, words: str) -> None:
    assert "return status 0" in cm_pair(guest, words)


def test_the_simple_pair_of_programs(guest: Guest) -> None:
    assert "end 0" in cm_pair(guest, "rdma_server", "rdma_client")


def test_connection_times(guest: Guest) -> None:
    """Its second half invents queue pair numbers; both ends in one kernel must not invent the same."""
    output = cm_pair(guest, "cmtime -c 20 -q 1000", "cmtime -c 20 -q 100000")
    assert len(re.findall(r"^cm connect ", output, re.M)) == 2, output


@pytest.mark.parametrize("words", ["-S 64 -C 20", "-S 65536 -C 10 -T v", "-S 1000000 -C 3 -T b"])
def test_rsockets(guest: Guest, words: str) -> None:
    assert "custom" in cm_pair(guest, f"rstream {words}")


def test_perftest_with_events_over_rdma_cm(guest: Guest) -> None:
    words = "ib_send_lat -F -R -e -n 50 -s 1024"
    pair(guest, words, f"{words} {guest.ip}", CM_LISTENS)


def test_events_of_datagrams(guest: Guest) -> None:
    perftest_pair(guest, "ib_send_lat -c UD -e -n 50 -s 1024")


def test_multicast_is_refused(guest: Guest) -> None:
    """The driver has no attach_mcast; the program hears of it and goes on."""
    output = guest.run(f"mckey -m 239.1.2.3 -b {guest.ip} -s", 30)
    assert "RDMA_CM_EVENT_MULTICAST_ERROR" in output.stdout + output.stderr


def test_inline_without_a_key_is_a_local_protection_error(guest: Guest) -> None:
    """rdma_xclient sends inline data and never asks whether there is any: its request names key 0."""
    with guest.popen("timeout 5 rdma_xserver -c r", 20) as server:
        guest.check(f"until {CM_LISTENS}; do sleep 0.1; done", 20)
        guest.run(f"rdma_xclient -c r -s {guest.ip}", 20)
        assert server.wait(20).status == 124  # nothing arrived


@pytest.mark.parametrize("transports", [RC, UD], ids=["rc", "ud"])
@pytest.mark.parametrize("words", ["-t tag_lat -s 8", "-t ucp_put_bw -s 65536", "-t ucp_fadd"])
def test_ucx(guest: Guest, transports: str, words: str) -> None:
    assert re.search(r"^Final: +20 ", ucx_pair(guest, transports, f"{words} -n 20 -w 2"), re.M)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("-p verbs -e msg", ""),
        ("-p verbs -e dgram", ""),
        # Without it, it wants one CQ for 256 peers, larger than the device's largest.
        ("-p 'verbs;ofi_rxm' -e rdm", "FI_UNIVERSE_SIZE=16"),
    ],
    ids=["msg", "dgram", "rdm"],
)
def test_libfabric(guest: Guest, words: str, settings: str) -> None:
    assert re.search(r"^4k +50 ", libfabric_pair(guest, f"{words} -I 50 -S 4096", settings), re.M)


def test_no_program_did_wrong(guest: Guest) -> None:
    """The last of the module: together they have not made the server count one guest error."""
    assert guest_errors(guest) == {}
    assert status(guest)["device"]["events_dropped"] == 0
