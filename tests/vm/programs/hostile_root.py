"""A guest's root as a driver that means harm: hostile_root.py SEED COUNT, while vmw_pvrdma is not loaded.

It gives the device a good shared region or a bad one, activates it or does not, and asks for garbage: COUNT accesses,
all through the real BARs, with pages whose guest addresses /proc/self/pagemap tells. Prints "done" at the end.
"""

import mmap
import random
import struct
import sys
from pathlib import Path

PAGE = 4096
DEVICE = Path("/sys/bus/pci/devices/0000:00:05.1")
# Registers: offsets / 4. Source: pvrdma_dev_api.h, PVRDMA_REG_*.
DSR_LOW, DSR_HIGH, CTL, REQUEST, ERR, IMR = 1, 2, 3, 4, 5, 7
REGISTERS, COMMANDS = 10, 21
ENABLE_MEMORY_AND_MASTER = 0x6
PAGES = 24
DSR, COMMAND, RESPONSE, PDIR, TABLE = range(5)
RINGS = 8
WILD = (0, 1, 2, 3, 4, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_F000, 0xFFFF_FFFF)


def guest_addresses(memory: mmap.mmap, address: int) -> list[int]:
    """Guest addresses of the pages; bits 0 to 54 of a pagemap entry are the page frame."""
    for page in range(PAGES):
        memory[page * PAGE] = 1
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = struct.unpack(f"={PAGES}Q", pagemap.read(8 * PAGES))
    return [(entry & (1 << 55) - 1) * PAGE for entry in entries]


def mapping_of(memory: mmap.mmap) -> int:
    """Where the pages are in this process; the marker stands nowhere else."""
    marker = random.SystemRandom().randbytes(64)
    memory[:64] = marker
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as own:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if end - start < PAGES * PAGE or "rw" not in line:
                continue
            for page in range(start, end, PAGE):
                own.seek(page)
                if own.read(64) == marker:
                    return page
    sys.exit("own pages not found")


class Driver:
    """The harm: `memory` are the pages, `at` their guest addresses."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # Shared, so that a page stays where it is.
        self.memory = mmap.mmap(-1, PAGES * PAGE)
        self.at = guest_addresses(self.memory, mapping_of(self.memory))
        with (DEVICE / "config").open("r+b", buffering=0) as config:
            config.seek(4)
            config.write(struct.pack("<H", ENABLE_MEMORY_AND_MASTER))
        self.bars = []
        for bar, pages in ((1, 1), (2, 16)):
            with (DEVICE / f"resource{bar}").open("r+b") as file:
                self.bars.append(memoryview(mmap.mmap(file.fileno(), pages * PAGE)).cast("I"))

    def wild(self) -> int:
        """A number that is an address, a small number, an edge, or anything."""
        address = self.rng.choice(self.at)
        return self.rng.choice(
            [address, address, address + 8, self.rng.randrange(8), self.rng.choice(WILD), self.rng.getrandbits(64)]
        )  # fmt: skip

    def argument(self) -> int:
        """Eight bytes of a command's body: two small numbers, as handles are, or something wild."""
        if self.rng.random() < 0.3:
            return self.wild()
        return self.rng.randrange(5) | self.rng.randrange(5) << 32

    def put(self, page: int, offset: int, layout: str, *values: int) -> None:
        struct.pack_into(layout, self.memory, page * PAGE + offset, *values)

    def share(self) -> None:
        """A shared region as a driver's, with one field spoilt most of the time."""
        self.put(PDIR, 0, "<Q", self.at[TABLE])
        self.put(TABLE, 0, f"<{PAGES - RINGS}Q", *self.at[RINGS:])
        fields = [20, 0, self.at[COMMAND], self.at[RESPONSE], 4, self.at[PDIR], 4, self.at[PDIR], 1]
        if self.rng.random() < 0.6:
            fields[self.rng.randrange(len(fields))] = self.wild()
        driver, gos, command, response, events, event_pages, cqs, cq_pages, uar = fields
        self.put(DSR, 0, "<I4xI4xQQ", driver & 0xFFFF_FFFF, gos & 0xFFFF_FFFF, command, response)
        self.put(
            DSR,
            32,
            "<I4xQI4xQQ",
            events & 0xFFFF_FFFF,
            event_pages,
            cqs & 0xFFFF_FFFF,
            cq_pages,
            uar,
        )
        dsr = self.at[DSR] if self.rng.random() < 0.9 else self.wild()
        self.bars[0][DSR_LOW] = dsr & 0xFFFF_FFFF
        self.bars[0][DSR_HIGH] = dsr >> 32 & 0xFFFF_FFFF
        self.bars[0][CTL] = self.rng.choice([0, 0, 0, 1, 2, 3, 0xFFFF_FFFF])

    def command(self) -> None:
        """A command: mostly of a known number, its body small numbers, addresses and edges."""
        number = self.rng.randrange(COMMANDS) if self.rng.random() < 0.9 else self.wild()
        body = b"".join(struct.pack("<Q", self.argument()) for _ in range(24))
        start = COMMAND * PAGE
        self.memory[start : start + 16 + len(body)] = (
            struct.pack("<QII", 1, number & 0xFFFF_FFFF, 0) + body
        )
        self.bars[0][REQUEST] = self.rng.choice([0, 0, 0, 1, 0xFFFF_FFFF])
        self.bars[0][ERR]

    def scribble(self) -> None:
        """Any word of our pages, at any time: rings, indices, directories."""
        page = self.rng.choice([PDIR, TABLE, *range(RINGS, PAGES)])
        self.put(page, self.rng.randrange(PAGE // 4) * 4, "<I", self.wild() & 0xFFFF_FFFF)
        self.put(
            self.rng.randrange(RINGS, PAGES), self.rng.randrange(4) * 4, "<I", self.rng.choice(WILD)
        )

    def doorbell(self) -> None:
        page, offset = self.rng.randrange(16), self.rng.randrange(4)
        self.bars[1][page * PAGE // 4 + offset] = (
            self.rng.randrange(8) | self.rng.randrange(8) << 29
        )

    def register(self) -> None:
        self.bars[0][self.rng.randrange(REGISTERS + 2)] = self.wild() & 0xFFFF_FFFF
        self.bars[0][self.rng.randrange(PAGE // 4)]

    def harm(self, count: int) -> None:
        acts = [self.command] * 6 + [self.doorbell] * 3 + [self.scribble] * 2 + [self.register]
        for step in range(count):
            if step % 40 == 0:
                self.share()
            self.rng.choice(acts)()


if __name__ == "__main__":
    Driver(int(sys.argv[1])).harm(int(sys.argv[2]))
    print("done")
