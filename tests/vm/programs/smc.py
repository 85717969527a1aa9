"""A stream over SMC between two sockets of one guest, every byte compared. python3 smc.py ADDRESS"""

import os
import socket
import sys
import threading

IPPROTO_SMC = 256  # linux/smc.h
SIZE_BYTES = 1 << 20


def smc_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_SMC)
    made.settimeout(20)
    return made


def main(address: str) -> None:
    listener = smc_socket()
    listener.bind((address, 5555))
    listener.listen(1)
    data = os.urandom(SIZE_BYTES)
    client = smc_socket()
    connecting = threading.Thread(target=client.connect, args=((address, 5555),))
    connecting.start()
    server, _ = listener.accept()
    server.settimeout(20)
    connecting.join()
    sending = threading.Thread(target=client.sendall, args=(data,))
    sending.start()
    got = bytearray()
    while len(got) < SIZE_BYTES and (more := server.recv(1 << 16)):
        got += more
    sending.join()
    print("the same" if got == data else "other bytes")


if __name__ == "__main__":
    main(sys.argv[1])
