"""RDS between two addresses of one guest: datagrams there and back, every byte compared.

python3 rds.py ADDRESS ADDRESS, with rds_rdma loaded and both addresses on the device's network interface.
"""

import os
import socket
import sys

AF_RDS = 21  # linux/socket.h
SIZES = (1, 100, 4096, 65_537, 100_000)


def rds_socket(address: str, port: int) -> socket.socket:
    made = socket.socket(AF_RDS, socket.SOCK_SEQPACKET, 0)
    made.settimeout(20)
    made.bind((address, port))
    return made


def main(one: str, other: str) -> None:
    left, right = rds_socket(one, 4000), rds_socket(other, 4001)
    for size in SIZES:
        for source, target in ((left, right), (right, left)):
            data = os.urandom(size)
            source.sendto(data, target.getsockname())
            got, sender = target.recvfrom(1 << 20)
            if got != data or sender != source.getsockname():
                sys.exit(f"{size} bytes: other bytes, or from {sender}")
    print(f"{2 * len(SIZES)} datagrams the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
