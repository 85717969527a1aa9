"""Runs in the guest, beside events.py: a program that sleeps on completion events, with requests due at each arm.

python3 wakeups.py DEVICE GID-INDEX SECONDS SEED. Prints JSON {"races", "sleeps", "spurious"}. A sleep that does not end
though its completion is there ends the program.
"""

import json
import os
import random
import select
import sys
import time
from contextlib import suppress

import pyverbs.enums as e
from events import Bench  # type: ignore[import-not-found]
from pyverbs.cq import CQ, CompChannel
from pyverbs.wr import RecvWR, SendWR

PATIENCE_S = 60
CQES = 64
MOST_DUE = 8
# Around the time after which the device takes a program for asleep, 100 us.
MOST_DELAY_S = 0.0004
# Arm again after an event and sleep without a poll, as UCX does. The device tells such a program after 100 ms.
BLINDLY = 0.01
# Sleep without a look: what was posted after the arm makes an event. A trapped doorbell's work may be done when it
# returns, and a program that looks first never sleeps.
UNSEEN = 0.1


def event_fds() -> set[int]:
    """The open descriptors of verbs. The list also has the one that it was read through, closed by now."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "infiniband" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


class Sleeper:
    """One program: a queue pair that sends to another, both on one CQ with a channel."""

    def __init__(self, bench: Bench, dice: random.Random) -> None:
        before = event_fds()
        self.channel = CompChannel(bench.ctx)
        # pyverbs does not say which; waiting in its get_cq_event could not be ended.
        (fd,) = event_fds() - before
        self.readable = select.poll()
        self.readable.register(fd, select.POLLIN)
        bench.cq = self.cq = CQ(bench.ctx, CQES, None, self.channel)
        self.sender, self.receiver = bench.pair()
        self.bench, self.dice = bench, dice
        self.due = self.races = self.sleeps = self.spurious = 0

    def turn(self) -> None:
        early = self.dice.random() < 0.5
        if early:
            self.post()
        self.arm()
        posted = not early and self.post()
        self.delay()
        if not (posted and self.dice.random() < UNSEEN) and (
            self.take(self.dice.randint(1, MOST_DUE)) or not self.due
        ):
            return
        self.sleep()
        self.arm()
        if self.dice.random() < BLINDLY:
            self.sleep()
            self.arm()
        if not self.take(1):
            self.spurious += 1

    def post(self) -> bool:
        if self.due >= MOST_DUE:
            return False
        self.receiver.post_recv(RecvWR(sg=[self.bench.sge()], num_sge=1))
        self.sender.post_send(SendWR(sg=[self.bench.sge()], num_sge=1, opcode=e.IBV_WR_SEND))
        self.due += 2
        return True

    def arm(self) -> None:
        self.races += self.due > 0
        self.cq.req_notify()

    def delay(self) -> None:
        end = time.monotonic() + self.dice.random() * MOST_DELAY_S
        while time.monotonic() < end:
            pass

    def take(self, most: int) -> int:
        count, found = self.cq.poll(most)
        for wc in found:
            assert wc.status == e.IBV_WC_SUCCESS, wc
        self.due -= count
        return int(count)

    def sleep(self) -> None:
        if not self.readable.poll(1000 * PATIENCE_S):
            there, _ = self.cq.poll(CQES)
            sys.exit(
                f"no event in {PATIENCE_S} s: {self.due} due, {there} there, {self.races} races"
            )
        self.channel.get_cq_event(self.cq)
        self.cq.ack_events(1)
        self.sleeps += 1


def main() -> None:
    bench = Bench(sys.argv[1], int(sys.argv[2]))
    sleeper = Sleeper(bench, random.Random(int(sys.argv[4])))
    end = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < end:
        sleeper.turn()
    names = ("races", "sleeps", "spurious")
    print(json.dumps({name: getattr(sleeper, name) for name in names}))


if __name__ == "__main__":
    main()
