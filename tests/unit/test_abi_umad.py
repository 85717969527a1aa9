"""umad, rdmacm-mux and CM formats: against gcc where the kernel's header is at hand, and by hand."""

import shutil
import subprocess
from pathlib import Path

import pytest

from pvrdma_server.abi import ib_user_mad
from pvrdma_server.abi.ib_user_mad import USER_MAD_HDR, UserMadHdr
from pvrdma_server.abi.ibta_vol1_c12 import (
    CM_DREQ,
    CM_IDS,
    CM_REJ,
    CM_REP,
    CM_REQ,
    CM_SIDR_REQ,
    CmDreq,
    CmRej,
)
from pvrdma_server.abi.rdmacm_mux import MUX_MSG, MUX_MSG_SIZE, MuxMsg

HEADER = Path("/usr/include/rdma/ib_user_mad.h")
# libibumad's ib_user_mad and the mux's own structs, from memory of their layout rules: natural alignment, enum is int.
MUX_C = """
union gid { unsigned char raw[16]; struct { unsigned long long prefix, id; } global; };
enum e { A };
struct umad { struct { unsigned w[5]; unsigned qpn, qkey; unsigned short lid; unsigned char b[6]; unsigned char gid[16];
    unsigned flow; unsigned short pkey; unsigned char r[6]; } hdr; char mad[256]; };
struct mux { struct { enum e type, op; union gid sgid; enum e err; } hdr; int len; struct umad umad; };
"""


def ask_gcc(tmp_path: Path, prologue: str, expressions: list[str]) -> list[int]:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    body = "".join(f'printf("%zu\\n", (size_t)({e}));' for e in expressions)
    source = tmp_path / "ask.c"
    source.write_text(
        f"#include <stdio.h>\n#include <stddef.h>\n{prologue}\nint main(void) {{ {body} return 0; }}\n"
    )
    subprocess.run(["gcc", "-o", tmp_path / "ask", source], check=True, timeout=60)
    answer = subprocess.run([tmp_path / "ask"], check=True, capture_output=True, timeout=60)
    return [int(line) for line in answer.stdout.split()]


@pytest.mark.skipif(not HEADER.exists(), reason="needs linux-libc-dev")
def test_the_kernels_header(tmp_path: Path) -> None:
    expressions, expected = [], []
    for mapping in ib_user_mad.C_LAYOUTS:
        expressions.append(f"sizeof({mapping.c_type})")
        expected.append(mapping.layout.size)
        for name, field in mapping.layout.fields.items():
            expressions.append(f"offsetof({mapping.c_type}, {name})")
            expected.append(field.offset)
    expressions += [
        "IB_USER_MAD_REGISTER_AGENT",
        "IB_USER_MAD_UNREGISTER_AGENT",
        "IB_USER_MAD_ENABLE_PKEY",
    ]
    expected += [
        ib_user_mad.REGISTER_AGENT,
        ib_user_mad.UNREGISTER_AGENT,
        ib_user_mad.ENABLE_PKEY,
    ]
    assert ask_gcc(tmp_path, f'#include "{HEADER}"', expressions) == expected


def test_the_mux_message_is_laid_out_as_the_compiler_does(tmp_path: Path) -> None:
    places = ["hdr.type", "hdr.op", "hdr.sgid", "hdr.err", "len", "umad", "umad.mad"]
    expressions = ["sizeof(struct mux)", *(f"offsetof(struct mux, {place})" for place in places)]
    offsets = [field.offset for field in MUX_MSG.fields.values()]
    assert ask_gcc(tmp_path, MUX_C, expressions) == [MUX_MSG_SIZE, *offsets]


def test_a_mux_message_there_and_back() -> None:
    gid = bytes(range(16))
    umad = UserMadHdr(
        0, 0, 0, 0, 320, b"\0\0\0\1", bytes(4), bytes(2), 0, 0, 1, 3, 255, 0, gid, bytes(4), 0
    )
    message = MuxMsg(0, 2, gid, 0, 256, umad, bytes(256))
    raw = MUX_MSG.pack(message)
    assert len(raw) == 360
    assert raw[8:24] == raw[36 + 36 : 36 + 52] == gid
    assert raw[32:36] == (256).to_bytes(4, "little")
    assert MUX_MSG.unpack(raw) == message
    assert USER_MAD_HDR.unpack_from(raw, 36) == umad


def test_cm_fields_by_hand() -> None:
    """Offsets of ibta_vol1_c12.h, which count from behind the MAD header, plus 24."""
    mad = bytes(i for i in range(256))
    assert CM_IDS.unpack_from(mad) == (0x18191A1B, 0x1C1D1E1F)
    req = CM_REQ.unpack(mad)
    assert (req.local_ca_guid[0], req.local_qpn >> 24) == (24 + 16, 24 + 32)
    assert (req.primary_local_gid[0], req.primary_remote_gid[0]) == (24 + 56, 24 + 72)
    assert CM_REP.unpack(mad).local_qpn >> 24 == 24 + 12
    assert CM_DREQ.unpack(mad).remote_qpn >> 24 == 24 + 8
    rej = CM_REJ.unpack(mad)
    assert (rej.message_rejected, rej.info_length, rej.reason) == (32, 33, 0x2223)
    assert rej.ari == mad[24 + 12 : 24 + 84]
    sidr = CM_SIDR_REQ.unpack(mad)
    # Private data at 16; there cma_version, ip_version, port, source, destination.
    assert (sidr.ip_version, sidr.dst_addr[0]) == (24 + 16 + 1, 24 + 16 + 4 + 16)


def test_cm_messages_are_whole_mads() -> None:
    assert len(CM_REJ.pack(CmRej(1, 2, 0, 0, 28, bytes(72)))) == 256
    assert CM_DREQ.pack(CmDreq(1, 2, 0x00000100))[32:36] == b"\0\0\1\0"
