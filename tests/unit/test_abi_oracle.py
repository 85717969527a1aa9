"""The C compiler as the oracle of every offset, size and constant in `pvrdma_server.abi`.

golden/abi_layout.json holds what gcc said about the real headers, so the layouts are checked
everywhere; where gcc and the headers are at hand, the golden table itself is checked against them.

The driver's headers are looked for in $PVRDMA_KERNEL_HEADERS (the vmw_pvrdma folder of a kernel
source) and in the cache folder. PVRDMA_REGENERATE_GOLDEN=1 writes the table anew.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pvrdma_server.abi import mad, pvrdma_dev_api, pvrdma_verbs, vmw_pvrdma_abi
from pvrdma_server.abi.layout import CMapping, Layout
from pvrdma_server.abi.pvrdma_dev_api import (
    CMD_FIRST_RESP,
    CMD_REQ_SIZE,
    CMD_RESP_SIZE,
    PDIR_ENTRIES,
    RING_CONS_HEAD,
    RING_PROD_TAIL,
    RING_STATE_RX,
    RING_STATE_SIZE,
    RING_STATE_TX,
    Cmd,
    GosInfo,
    pack_gos_info,
)

MODULES = (vmw_pvrdma_abi, pvrdma_verbs, pvrdma_dev_api, mad)
MAPPINGS = {m.layout.record.__name__: m for module in MODULES for m in module.C_LAYOUTS}
CONSTANTS = {
    constants.prefix + name: int(value)
    for module in (vmw_pvrdma_abi, pvrdma_verbs, pvrdma_dev_api)
    for constants in module.C_CONSTANTS
    for name, value in constants.members.items()
}
GOLDEN = Path(__file__).with_name("golden") / "abi_layout.json"

# In C the bit-field word is a struct with a pad word behind it: its bits are among the expressions.
BIT_FIELD = "gos_info"
NOT_IN_C = {"MadHdr", "Ipv4Hdr"}


def _ring(pair: str, word: str) -> str:
    return f"offsetof(struct pvrdma_ring_state, {pair}.{word})"


def _gos(member: str) -> str:
    return (
        "({ union { struct pvrdma_gos_info info; u32 word; } x = { .word = 0 };"
        f" x.info.{member} = ~0; x.word; }})"
    )


EXPRESSIONS = {
    "sizeof(union pvrdma_cmd_req)": CMD_REQ_SIZE,
    "sizeof(union pvrdma_cmd_resp)": CMD_RESP_SIZE,
    "sizeof(struct pvrdma_ring_state)": RING_STATE_SIZE,
    _ring("tx", "prod_tail"): RING_STATE_TX + RING_PROD_TAIL,
    _ring("tx", "cons_head"): RING_STATE_TX + RING_CONS_HEAD,
    _ring("rx", "prod_tail"): RING_STATE_RX + RING_PROD_TAIL,
    _ring("rx", "cons_head"): RING_STATE_RX + RING_CONS_HEAD,
    "PVRDMA_PAGE_DIR_PAGE(~0u) + 1": PDIR_ENTRIES,
    "PVRDMA_CMD_MAX": len(Cmd),
    "PVRDMA_CMD_QUERY_PKEY_RESP": CMD_FIRST_RESP + Cmd.QUERY_PKEY,
    "PVRDMA_CMD_DESTROY_SRQ_RESP": CMD_FIRST_RESP + Cmd.DESTROY_SRQ,
    "offsetof(struct pvrdma_device_shared_region, gos_info)": 8,
    _gos("gos_bits"): pack_gos_info(GosInfo(0x3, 0, 0, 0)),
    _gos("gos_type"): pack_gos_info(GosInfo(0, 0xF, 0, 0)),
    _gos("gos_ver"): pack_gos_info(GosInfo(0, 0, 0xFFFF, 0)),
    _gos("gos_misc"): pack_gos_info(GosInfo(0, 0, 0, 0x3FF)),
}

# What the headers expect of the kernel around them.
SHIM = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <linux/types.h>
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef struct { int counter; } atomic_t;
#define atomic_read(v) ((v)->counter)
#define atomic_set(v, i) ((v)->counter = (i))
#define BIT(n) (1UL << (n))
enum rdma_link_layer { SHIM_A }; enum ib_mr_type { SHIM_B };
enum ib_cq_notify_flags { SHIM_C }; enum ib_srq_attr_mask { SHIM_D };
"""

# Structs of the headers which never reach the device: they go between the guest's user and kernel.
GUEST_INTERNAL = {
    "pvrdma_alloc_ucontext_resp",
    "pvrdma_alloc_pd_resp",
    "pvrdma_create_cq",
    "pvrdma_create_cq_resp",
    "pvrdma_resize_cq",
    "pvrdma_create_srq",
    "pvrdma_create_srq_resp",
    "pvrdma_create_qp",
    "pvrdma_create_qp_resp",
    "pvrdma_gos_info",
}
DRIVER_HEADERS = ("pvrdma_verbs.h", "pvrdma_dev_api.h", "pvrdma_ring.h")


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PVRDMA_CACHE") or base / "pvrdma-server")


def _candidate_folders() -> Iterator[Path]:
    if given := os.environ.get("PVRDMA_KERNEL_HEADERS"):
        yield Path(given)
    for pattern in ("driver-src/*/vmw_pvrdma", "headers/*/vmw_pvrdma", "headers/vmw_pvrdma"):
        yield from sorted(_cache_folder().glob(pattern), reverse=True)


@cache
def _headers() -> tuple[Path, ...]:
    """The headers in the order of inclusion, or nothing if they are not to be had."""
    for folder in _candidate_folders():
        driver = [folder / name for name in DRIVER_HEADERS]
        for uapi in (folder / "vmw_pvrdma-abi.h", Path("/usr/include/rdma/vmw_pvrdma-abi.h")):
            if uapi.is_file() and all(path.is_file() for path in driver):
                return (uapi, *driver)
    return ()


def _members(mapping: CMapping) -> dict[str, str]:
    return {
        name: mapping.members.get(name, name) for name in mapping.layout.fields if name != BIT_FIELD
    }


def _questions() -> Iterator[tuple[str, str]]:
    """(label, C expression) of every number to ask the compiler for."""
    for record, mapping in MAPPINGS.items():
        yield f"{record}..size", f"sizeof({mapping.c_type})"
        for name, member in _members(mapping).items():
            yield f"{record}.{name}.offset", f"offsetof({mapping.c_type}, {member})"
            yield f"{record}.{name}.size", f"sizeof((({mapping.c_type} *)0)->{member})"
    for name in CONSTANTS:
        yield f"constant {name}", name
    for number, expression in enumerate(EXPRESSIONS):
        yield f"expression {number}", expression


def _program(headers: tuple[Path, ...]) -> str:
    includes = "".join(f'#include "{path}"\n' for path in headers)
    body = "".join(
        f'printf("%s\\t%u\\n", "{label}", (unsigned)({expression}));\n'
        for label, expression in _questions()
    )
    return f"{SHIM}{includes}int main(void) {{\n{body}return 0; }}\n"


def _ask_compiler(headers: tuple[Path, ...], folder: Path) -> dict[str, int]:
    source, binary = folder / "oracle.c", folder / "oracle"
    source.write_text(_program(headers))
    compile_command = ["gcc", "-std=gnu11", "-w", "-o", str(binary), str(source)]
    subprocess.run(compile_command, check=True, timeout=60)
    answer = subprocess.run([str(binary)], check=True, capture_output=True, text=True, timeout=10)
    return {
        label: int(number)
        for label, number in (line.split("\t") for line in answer.stdout.splitlines())
    }


def _table(answers: dict[str, int]) -> dict[str, Any]:
    """The golden table, from the compiler's answers."""
    layouts = {
        record: {
            "c_type": mapping.c_type,
            "size": answers[f"{record}..size"],
            "fields": {
                name: [answers[f"{record}.{name}.offset"], answers[f"{record}.{name}.size"]]
                for name in _members(mapping)
            },
        }
        for record, mapping in MAPPINGS.items()
    }
    expressions = {
        expression: answers[f"expression {number}"] for number, expression in enumerate(EXPRESSIONS)
    }
    constants = {name: answers[f"constant {name}"] for name in CONSTANTS}
    return {"layouts": layouts, "constants": constants, "expressions": expressions}


def _dump(table: dict[str, Any]) -> str:
    """JSON with one record or number a line, so that a change shows as one."""
    parts = []
    for part, entries in table.items():
        lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
        parts.append(f"  {json.dumps(part)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(GOLDEN.read_text())
    return table


def test_golden_table_is_what_the_compiler_says(tmp_path: Path) -> None:
    headers = _headers()
    if not headers or shutil.which("gcc") is None:
        pytest.skip("needs gcc and the vmw_pvrdma headers (PVRDMA_KERNEL_HEADERS)")
    table = _table(_ask_compiler(headers, tmp_path))
    if os.environ.get("PVRDMA_REGENERATE_GOLDEN") == "1":
        GOLDEN.write_text(_dump(table))
    assert json.loads(GOLDEN.read_text()) == table


def test_every_struct_of_the_headers_has_a_layout() -> None:
    headers = _headers()
    if not headers:
        pytest.skip("needs the vmw_pvrdma headers (PVRDMA_KERNEL_HEADERS)")
    declared = {
        name
        for path in headers
        if path.name != "pvrdma_ring.h"
        for name in re.findall(r"^struct (pvrdma_\w+) \{", path.read_text(), re.MULTILINE)
    }
    mapped = {mapping.c_type.removeprefix("struct ") for mapping in MAPPINGS.values()}
    assert len(declared) > 40
    assert declared - GUEST_INTERNAL == mapped


def test_every_layout_is_compared() -> None:
    layouts = {
        value.record.__name__
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, Layout)
    }
    assert layouts - NOT_IN_C == set(MAPPINGS)


@pytest.mark.parametrize("record", MAPPINGS)
def test_layout_matches_the_golden_table(record: str, golden: dict[str, Any]) -> None:
    layout, expected = MAPPINGS[record].layout, golden["layouts"][record]
    fields = {name: list(place) for name, place in layout.fields.items() if name != BIT_FIELD}
    assert layout.size == expected["size"]
    assert fields == expected["fields"]


def test_constants_match_the_golden_table(golden: dict[str, Any]) -> None:
    assert golden["constants"] == CONSTANTS


def test_expressions_match_the_golden_table(golden: dict[str, Any]) -> None:
    assert golden["expressions"] == EXPRESSIONS


def test_the_bit_field_word_lies_where_the_compiler_puts_it() -> None:
    for layout in (pvrdma_dev_api.DEVICE_SHARED_REGION, pvrdma_dev_api.DEVICE_SHARED_REGION64):
        assert layout.fields[BIT_FIELD] == (8, 4)
