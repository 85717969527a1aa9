"""Three guests, each writing to the next around a ring, for minutes: every byte verified, nothing left behind.

`scripts/test soak` runs it; it is no part of `scripts/test`. A kept run is in transcripts/soak.txt.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from pvrdma_lab import Guest, Lab
from vm.server_state import assert_same, complaints, guest_errors, held, status, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

SECONDS = 300
# rping fills its buffer anew each time, has the peer READ it and WRITE it back, and compares (-V).
ROUND = "rping -c -V -C 100 -S 60000"
SERVER = "rping -s -P -V -S 60000"
CM_LISTENS = "rdma resource show cm_id | grep -q LISTEN"


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    failed_before = request.session.testsfailed
    with Lab(f"soak-{os.getpid()}", guests=3) as lab:
        for guest in lab:
            complaints(guest)
        yield lab
    if request.session.testsfailed == failed_before:
        shutil.rmtree(lab.folder)


@pytest.fixture
def guest(lab: Lab) -> Guest:
    return lab["a"]


def rounds(seconds: int, peer: Guest) -> str:
    """A shell command: connect, verify, disconnect, again and again; prints how often."""
    return (
        f"end=$(($(date +%s) + {seconds})); n=0; "
        f"while [ $(date +%s) -lt $end ]; do {ROUND} -a {peer.ip} || exit 1; n=$((n + 1)); done; echo rounds $n"
    )


def run_ring(guests: list[Guest], seconds: int) -> list[int]:
    """Each guest verifies against the next; how many rounds each of them did."""
    with ExitStack() as stack:
        for guest in guests:
            stack.enter_context(guest.popen(SERVER, seconds + 120))
            guest.check(f"for i in $(seq 100); do {CM_LISTENS} && exit 0; sleep 0.1; done; exit 1")
        nexts = [*guests[1:], guests[0]]
        clients = [
            stack.enter_context(guest.popen(rounds(seconds, peer), seconds + 90))
            for guest, peer in zip(guests, nexts, strict=True)
        ]
        results = [client.wait(seconds + 90) for client in clients]
    assert [result.status for result in results] == [0, 0, 0], results
    return [int(result.stdout.split()[-1]) for result in results]


def test_ring(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    guests = list(lab)
    run_ring(guests, 5)  # servers meet, the kernels' pools fill
    for guest in guests:
        wait_until(guest, "no process is left", lambda now: not now["objects"]["contexts"])
    before = [held(guest) for guest in guests]
    counts = run_ring(guests, SECONDS)
    with capsys.disabled():
        print(f"\n{SECONDS} s: rounds of 100 x 60 000 bytes there and back: {counts}")
        for guest in guests:
            print(guest.name, status(guest)["fabric"]["peers"])
    assert min(counts) > 0
    for guest, then in zip(guests, before, strict=True):
        assert_same(guest, then)
        assert complaints(guest) == []
        assert guest_errors(guest) == {}
