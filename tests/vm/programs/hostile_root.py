"""A guest's root that writes garbage into the device's BARs, under the driver's feet: hostile_root.py SEED COUNT."""

import mmap
import random
import sys
from pathlib import Path

PAGE = 4096
DEVICE = Path("/sys/bus/pci/devices/0000:00:05.1")
REGISTERS = 64
WILD = (0, 1, 2, 3, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_F000, 0xFFFF_FFFF)


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    with (DEVICE / "resource1").open("r+b") as registers, (DEVICE / "resource2").open("r+b") as uar:
        bar1 = memoryview(mmap.mmap(registers.fileno(), PAGE)).cast("I")
        bar2 = memoryview(mmap.mmap(uar.fileno(), 16 * PAGE)).cast("I")
        for _ in range(int(sys.argv[2])):
            bar1[rng.randrange(REGISTERS // 4)] = rng.choice([*WILD, rng.getrandbits(32)])
            bar2[rng.randrange(16) * PAGE // 4 + rng.randrange(4)] = rng.getrandbits(32)
            bar1[rng.randrange(PAGE // 4)]
    print("done")


if __name__ == "__main__":
    main()
