"""What stands on verbs in a guest: librdmacm's programs, rsockets, UCX, libfabric; as test_programs.py.

What does not work, and why, stands in docs/conformance.md.
"""

import re

import pytest
from pvrdma_lab import Guest, Lab
from vm.pairs import CM_LISTENS, Ends, cm_pair, labs, libfabric_pair, perftest_pair, ucx_pair
from vm.server_state import assert_no_errors

pytestmark = [labs("mapped", "trapped", "two"), pytest.mark.usefixtures("settled")]

SMP = 2
MEMORY_MIB = 1024
# rc_verbs connects by messages of another transport.
RC = "rc_verbs,ud_verbs:aux,self"
UD = "ud_verbs,self"


@pytest.mark.parametrize("words", ["ucmatose", "ucmatose -c 10 -C 20 -S 4096", "udaddy",
                                   "udaddy -c 4 -C 10 -S 1024"])  # fmt: skip
def test_connections(ends: Ends, words: str) -> None:
    assert "return status 0" in cm_pair(ends, words)


def test_the_simple_pair_of_programs(ends: Ends) -> None:
    assert "end 0" in cm_pair(ends, "rdma_server", "rdma_client")


def test_connection_times(ends: Ends) -> None:
    """Its second half invents queue pair numbers; both ends in one kernel must not invent the same."""
    output = cm_pair(ends, "cmtime -c 20 -q 1000", "cmtime -c 20 -q 100000")
    assert len(re.findall(r"^cm connect ", output, re.M)) == 2, output


@pytest.mark.parametrize("words", ["-S 64 -C 20", "-S 65536 -C 10 -T v", "-S 1000000 -C 3 -T b"])
def test_rsockets(ends: Ends, words: str) -> None:
    assert "custom" in cm_pair(ends, f"rstream {words}")


def test_events_of_datagrams(ends: Ends) -> None:
    perftest_pair(ends, "ib_send_lat -c UD -e -n 50 -s 1024")


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
def test_ucx(ends: Ends, transports: str, words: str) -> None:
    assert re.search(r"^Final: +20 ", ucx_pair(ends, transports, f"{words} -n 20 -w 2"), re.M)


# Not UD: its own helper thread takes completions without waking who sleeps; docs/conformance.md.
@pytest.mark.parametrize("words", ["-t tag_lat -s 4096", "-t stream_bw -s 8192"])
def test_ucx_asleep(ends: Ends, words: str) -> None:
    output = ucx_pair(ends, RC, f"{words} -n 20 -w 2 -E sleep")
    assert re.search(r"^Final: +20 ", output, re.M), output


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
def test_libfabric(ends: Ends, words: str, settings: str) -> None:
    assert re.search(r"^4k +50 ", libfabric_pair(ends, f"{words} -I 50 -S 4096", settings), re.M)


def test_no_program_did_wrong(lab: Lab) -> None:
    """The last of the module: together they have not made a server count one error."""
    for guest in lab:
        assert_no_errors(guest)
