"""A stream over SMC, there and back, every byte compared.

python3 smc.py echo ADDRESS     sends back what one client sends
python3 smc.py ask ADDRESS      is that client
python3 smc.py eid NAME         gives the kernel an enterprise id: SMC-Rv2 joins machines that share one
"""

import os
import socket
import struct
import sys

IPPROTO_SMC = 256  # linux/smc.h
PORT = 5555
TIMEOUT_S = 10
SIZE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16

NETLINK_GENERIC = 16
GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME = 16, 3, 1, 2
NLMSG_ERROR, NLM_F_REQUEST, NLM_F_ACK = 2, 1, 4
# linux/smc.h
FAMILY = b"SMC_GEN_NETLINK\0"
SMC_NETLINK_ADD_UEID, SMC_NLA_EID_TABLE_ENTRY, SMC_MAX_EID_LEN = 10, 1, 32


def smc_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_SMC)
    made.settimeout(TIMEOUT_S)
    return made


def echo(address: str) -> None:
    listener = smc_socket()
    listener.bind((address, PORT))
    listener.listen(1)
    peer, _ = listener.accept()
    peer.settimeout(TIMEOUT_S)
    while data := peer.recv(CHUNK_BYTES):
        peer.sendall(data)


def ask(address: str) -> None:
    client = smc_socket()
    client.connect((address, PORT))
    data, got = os.urandom(SIZE_BYTES), bytearray()
    for start in range(0, SIZE_BYTES, CHUNK_BYTES):
        client.sendall(data[start : start + CHUNK_BYTES])
        while len(got) < start + CHUNK_BYTES and (more := client.recv(CHUNK_BYTES)):
            got += more
    print("the same" if got == data else "other bytes")


def generic_netlink() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_GENERIC)
    made.bind((0, 0))
    return made


def attribute(kind: int, data: bytes) -> bytes:
    raw = struct.pack("=HH", 4 + len(data), kind) + data
    return raw + bytes(-len(raw) % 4)


def request(netlink: socket.socket, family: int, command: int, payload: bytes) -> bytes:
    """Sends a generic netlink request; returns the first answer's payload behind its two headers."""
    body = struct.pack("=BBH", command, 1, 0) + payload
    header = struct.pack("=IHHII", 16 + len(body), family, NLM_F_REQUEST | NLM_F_ACK, 1, 0)
    netlink.send(header + body)
    answer = netlink.recv(1 << 16)
    if struct.unpack_from("=H", answer, 4)[0] == NLMSG_ERROR:
        error = -struct.unpack_from("=i", answer, 16)[0]
        if error:
            raise OSError(error, os.strerror(error))
    return answer[20:]


def family_id(netlink: socket.socket) -> int:
    named = attribute(CTRL_ATTR_FAMILY_NAME, FAMILY)
    answer = request(netlink, GENL_ID_CTRL, CTRL_CMD_GETFAMILY, named)
    while answer:
        length, kind = struct.unpack_from("=HH", answer)
        if kind == CTRL_ATTR_FAMILY_ID:
            return int(struct.unpack_from("=H", answer, 4)[0])
        answer = answer[(length + 3) & ~3 :]
    raise LookupError("no id in the answer")


def eid(name: str) -> None:
    entry = attribute(SMC_NLA_EID_TABLE_ENTRY, name.ljust(SMC_MAX_EID_LEN).encode() + b"\0")
    # Two sockets: an acknowledgement follows the answer to the first request.
    with generic_netlink() as asking, generic_netlink() as netlink:
        request(netlink, family_id(asking), SMC_NETLINK_ADD_UEID, entry)


if __name__ == "__main__":
    {"echo": echo, "ask": ask, "eid": eid}[sys.argv[1]](*sys.argv[2:])
