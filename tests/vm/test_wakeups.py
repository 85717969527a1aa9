"""Programs that sleep on completion events, in both kinds of doorbells, within a guest and between two: none hangs.

`scripts/test stress` repeats them for --stress-seconds each; a kept run is in transcripts/stress.txt.
"""

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pvrdma_lab import Lab
from pvrdma_lab.programs import pingpong
from vm.pairs import Ends, cm_pair, labs, ucx_pair
from vm.server_state import assert_no_errors

pytestmark = [labs("mapped", "trapped", "two"), pytest.mark.usefixtures("settled")]

SMP = 2
MEMORY_MIB = 1024
PROGRAMS = Path(__file__).parent / "programs"

# Each runs once and says what it did, as names and counts; a program that hangs ends by its own time limit and fails.
Did = dict[str, int]


def armed_by_us(ends: Ends, seconds: float = 8.0) -> Did:
    """tests/vm/programs/wakeups.py, in the client's guest."""
    for name in ("events.py", "wakeups.py"):
        ends.client.write_file(f"/root/{name}", (PROGRAMS / name).read_bytes())
    words = f"python3 /root/wakeups.py vmw_pvrdma0 1 {seconds} {random.getrandbits(32)}"
    did: Did = json.loads(ends.client.check(words, seconds + 120))
    assert did["sleeps"] > 0
    return did


def reliable(ends: Ends, messages: int = 1000) -> Did:
    pingpong(*ends, 64, messages, "-e", timeout_s=180)
    return {"messages there and back": messages}


def datagrams(ends: Ends, messages: int = 500) -> Did:
    pingpong(*ends, 64, messages, "-e", program="ibv_ud_pingpong", timeout_s=180)
    return {"messages there and back": messages}


def shared_receives(ends: Ends, messages: int = 1000) -> Did:
    pingpong(*ends, 64, messages, "-e", program="ibv_srq_pingpong", timeout_s=180)
    return {"messages there and back": messages}


def rsockets(ends: Ends, messages: int = 500) -> Did:
    assert "custom" in cm_pair(ends, f"rstream -S 64 -C {messages} -T b", timeout_s=180)
    return {"messages there and back": messages}


def ucx(ends: Ends, words: str, messages: int = 100) -> Did:
    output = ucx_pair(
        ends, "rc_verbs,ud_verbs:aux,self", f"{words} -E sleep -n {messages} -w 2", 180
    )
    assert re.search(rf"^Final: +{messages} ", output, re.M), output
    return {"messages": messages}


def ucx_latency(ends: Ends) -> Did:
    return ucx(ends, "-t tag_lat -s 64")


def ucx_stream(ends: Ends) -> Did:
    return ucx(ends, "-t stream_bw -s 8192")


RUNS: list[Callable[[Ends], Did]] = [
    armed_by_us, reliable, datagrams, shared_receives, rsockets, ucx_latency, ucx_stream,
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_no_wakeup_is_lost(ends: Ends, run: Callable[[Ends], Did]) -> None:
    run(ends)


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("run", RUNS)
def test_no_wakeup_is_lost_in_hours(
    request: pytest.FixtureRequest, lab: Lab, ends: Ends, run: Callable[[Ends], Did],
    stress_seconds: float, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    end, runs, did = time.monotonic() + stress_seconds, 0, Counter[str]()
    while time.monotonic() < end:
        did.update(run(ends))
        runs += 1
    with capsys.disabled():
        counts = ", ".join(f"{count} {name}" for name, count in did.items())
        print(f"\n{request.node.name}: {stress_seconds:.0f} s, {runs} runs, {counts}")
    for guest in lab:
        assert_no_errors(guest)
