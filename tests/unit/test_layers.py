"""Who may import whom: a module imports only from lower levels, never its own (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pvrdma_server"
LEVELS = [
    {"errors"},
    {"abi"},
    {"guest_memory"},
    {"backend", "rings", "qp_state", "mad_frames"},
    {"qp_ops", "gsi", "mad_dialect", "mad_old_mux"},
    {"caps", "objects", "journal"},
    {"resources"},
    {"cmd_base"},
    {"cmd_qp"},
    {"cmd_ring"},
    {"watches", "reports"},
    {"device"},
    {"regions"},
    {
        "vfio_user",
        "backend_ibv",
        "backend_soft",
        "mad_relay",
        "gid_sync",
        "host_gids",
        "status",
        "watcher",
        "facts",
        "systemd",
        "qemu_args",
        "tables",
    },
    {"logs", "supervision", "metrics"},
    {"parts", "settings"},
    {"server", "config"},
    {"check", "capabilities"},
    {"cli", "ctl", "mad_hub"},
    {"__main__"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
CORE = LEVEL["regions"]
FORBIDDEN_IN_CORE = {
    "trio",
    "cffi",
    "pyverbs",
    "os",
    "time",
    "socket",
    "threading",
    "asyncio",
    "logging",
}
ONLY_IMPORTER = {
    "pvrdma_server._vfu": "vfio_user",
    "pvrdma_server._watch": "watcher",
    "pvrdma_server._ring": "backend_soft",
    "pyverbs": "backend_ibv",
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if not p.name.endswith("_build.py"))


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "pvrdma_server" else {node.module or ""}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        assert not imports(path)
        return
    level = LEVEL[unit]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pvrdma_server" and parts[1] not in (
            unit,
            "_vfu",
            "_watch",
            "_ring",
            "__version__",
        ):
            assert LEVEL[parts[1]] < level, f"{unit} (level {level}) imports {parts[1]}"
        if level <= CORE:
            assert parts[0] not in FORBIDDEN_IN_CORE, f"{unit} imports {name}"
        for prefix, owner in ONLY_IMPORTER.items():
            if name == prefix or name.startswith(prefix + "."):
                assert unit == owner, f"{unit} imports {name}; only {owner} may"


def test_structlog_in_the_core_is_for_the_journal_only() -> None:
    users = {unit_of(p) for p in modules() if "structlog" in imports(p)}
    assert {u for u in users if LEVEL.get(u, 99) <= CORE} <= {"journal"}
