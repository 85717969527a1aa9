"""Every program of perftest over its transports, sizes and options, in one guest: scripts/test matrix.

A part of it is in test_programs.py, which runs with the other guest tests.
"""

import re

import pytest
from pvrdma_lab import Guest
from vm.pairs import Ends, perftest_pair
from vm.server_state import guest_errors

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("settled")]

SMP = 2
MEMORY_MIB = 1024
MIB = 1 << 20
PROGRAMS = [f"ib_{verb}_{what}" for verb in ("send", "write", "read") for what in ("bw", "lat")]
# perftest's own limit; the device's is 16384.
MOST_REQUESTS = 15_000


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("size_bytes", [2, 4096, MIB, 8 * MIB])
def test_sizes(ends: Ends, program: str, size_bytes: int) -> None:
    count = 50 if size_bytes < MIB else 10
    output = perftest_pair(ends, f"{program} -s {size_bytes} -n {count}", 90)
    assert re.search(rf"^\s*{size_bytes}\s+{count}\s", output, re.M), output


@pytest.mark.parametrize("program", ["ib_send_bw", "ib_send_lat"])
@pytest.mark.parametrize("size_bytes", [2, 2048, 4096])
@pytest.mark.parametrize("options", ["", "-e"])
def test_datagrams(ends: Ends, program: str, size_bytes: int, options: str) -> None:
    perftest_pair(ends, f"{program} -c UD -s {size_bytes} -n 50 {options}")


@pytest.mark.parametrize("program", ["ib_atomic_bw", "ib_atomic_lat"])
@pytest.mark.parametrize("kind", ["CMP_AND_SWAP", "FETCH_AND_ADD"])
def test_atomics(ends: Ends, program: str, kind: str) -> None:
    perftest_pair(ends, f"{program} -A {kind} -n 100")


# perftest refuses events for WRITE, and several queue pairs for latencies.
@pytest.mark.parametrize(
    "program", ["ib_send_bw", "ib_read_bw", "ib_atomic_bw", "ib_send_lat", "ib_read_lat"]
)
def test_events(ends: Ends, program: str) -> None:
    perftest_pair(ends, f"{program} -e -n 100")


@pytest.mark.parametrize("program", ["ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"])
@pytest.mark.parametrize(
    "options", ["-b -n 100", "-q 4 -n 100", "-q 16 -n 100", "-q 4 -b -n 100", "-t 1 -n 100",
                "-t 16 -n 100", f"-t {MOST_REQUESTS} -n 20000"])  # fmt: skip
def test_options(ends: Ends, program: str, options: str) -> None:
    size = "" if "atomic" in program else "-s 1024"
    perftest_pair(ends, f"{program} {size} {options}", 90)


@pytest.mark.parametrize("program", ["ib_send_bw", "ib_write_bw", "ib_send_lat", "ib_write_lat"])
@pytest.mark.parametrize("inline_bytes", [0, 64])
def test_inline(ends: Ends, program: str, inline_bytes: int) -> None:
    """There is no inline data; perftest finds that out and sends from memory."""
    perftest_pair(ends, f"{program} -s 32 -I {inline_bytes} -n 50")


@pytest.mark.parametrize("options", ["--use-srq -q 4", f"-r {MOST_REQUESTS}"])
def test_receive_queues(ends: Ends, options: str) -> None:
    perftest_pair(ends, f"ib_send_bw -s 1024 -n 100 {options}")


def test_no_program_did_wrong(guest: Guest) -> None:
    """The last of the module."""
    assert guest_errors(guest) == {}
