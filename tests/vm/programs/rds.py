"""RDS: datagrams there and back, every byte compared. With rds_rdma loaded:

python3 rds.py echo ADDRESS         sends back what it gets, until all sizes have come; makes READY once it can
python3 rds.py ask ADDRESS PEER     sends random bytes from ADDRESS to the one that echoes at PEER

Both addresses are those of the device's network interface; both may be of one guest.
"""

import os
import socket
import sys
from pathlib import Path

AF_RDS = 21  # linux/socket.h
SIZES = (1, 100, 4096, 65_537, 100_000)
PORT = 4000
READY = Path("/tmp/rds.ready")


def rds_socket(address: str, port: int) -> socket.socket:
    made = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0)
    made.settimeout(20)
    made.bind((address, port))
    return made


def echo(address: str) -> None:
    mine = rds_socket(address, PORT)
    READY.touch()
    for _ in SIZES:
        data, sender = mine.recvfrom(1 << 20)
        mine.sendto(data, sender)
    READY.unlink()


def ask(address: str, peer: str) -> None:
    mine = rds_socket(address, PORT + 1)
    for size in SIZES:
        data = os.urandom(size)
        mine.sendto(data, (peer, PORT))
        got, sender = mine.recvfrom(1 << 20)
        if got != data or sender != (peer, PORT):
            sys.exit(f"{size} bytes: other bytes, or from {sender}")
    print(f"{2 * len(SIZES)} datagrams the same")


if __name__ == "__main__":
    if sys.argv[1] == "echo":
        echo(*sys.argv[2:])
    else:
        ask(*sys.argv[2:])
