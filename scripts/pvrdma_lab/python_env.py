"""Steps: libvfio-user (by scripts/build-libvfio-user) and the virtualenv with this clone installed editable.

A virtualenv cannot be renamed (its scripts name their interpreter), so it is made in place, and a stamp written last
says that it is complete. The clone's path is part of its key: an editable install points at one clone.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.steps import StepError, StepLog, remove_tree

_PYPROJECT = paths.REPOSITORY / "pyproject.toml"
_LIBRARY_SCRIPT = paths.REPOSITORY / "scripts" / "build-libvfio-user"
# What the compiled extension is made of, besides the library.
_EXTENSION_SOURCES = (
    "setup.py",
    "pvrdma_server/_vfu_build.py",
    "pvrdma_server/_watch_build.py",
    "pvrdma_server/_ring_build.py",
    "pvrdma_server/_ring_lane.h",
)


def find_library() -> Path | None:
    """Returns libvfio-user's prefix (include/, lib/), or None if it is not built."""
    # The script finds a finished build at once; it knows its own key, which we must not repeat here.
    recipe = subprocess.run(
        ["sha256sum", _LIBRARY_SCRIPT], capture_output=True, text=True, check=False
    )
    if recipe.returncode:
        return None
    builds = paths.cache_folder().glob(f"libvfio-user-*-{recipe.stdout[:8]}-*")
    return max(builds, key=lambda path: path.stat().st_mtime, default=None)


class Library:
    """Step: libvfio-user."""

    name = "libvfio-user"
    title = "libvfio-user from Debian's QEMU source"

    def find(self) -> Path | None:
        return find_library()

    def build(self, log: StepLog) -> None:
        log.run([_LIBRARY_SCRIPT])


def _venv() -> Path:
    interpreter = f"{sys.version} {Path(sys.executable).resolve()}"
    pyproject = _PYPROJECT.read_bytes() if _PYPROJECT.exists() else b""
    return paths.cache_folder() / "venvs" / paths.key(interpreter, pyproject, str(paths.REPOSITORY))


def _extension_key() -> str:
    sources = [paths.REPOSITORY / name for name in _EXTENSION_SOURCES]
    sources += sorted((paths.REPOSITORY / "pvrdma_server").rglob("*.c"))
    # What cffi writes is made of the sources above.
    made = {"_vfu.c", "_watch.c", "_ring.c"}
    contents = [path.read_bytes() for path in sources if path.exists() and path.name not in made]
    return paths.key(str(find_library()), *contents)


def _extensions() -> list[Path]:
    return list((paths.REPOSITORY / "pvrdma_server").glob("_vfu.*.so"))


def find_venv() -> Path | None:
    """Returns the virtualenv, or None unless it and this clone's compiled extension are up to date."""
    stamp = _venv() / "complete"
    return (
        _venv()
        if stamp.exists() and stamp.read_text() == _extension_key() and _extensions()
        else None
    )


class Virtualenv:
    """Step: the virtualenv, the clone installed in it, its extension compiled."""

    name = "venv"
    title = "virtualenv, pip install -e .[dev], compiled extension"

    def find(self) -> Path | None:
        return find_venv()

    def build(self, log: StepLog) -> None:
        if not _PYPROJECT.exists():
            raise StepError(f"there is no {_PYPROJECT}", "run bootstrap from a complete clone")
        venv = _venv()
        stamp = venv / "complete"
        fresh = not stamp.exists()
        if fresh and venv.exists():
            remove_tree(venv)
        if fresh:
            log.run([sys.executable, "-m", "venv", venv])
            log.run([venv / "bin/pip", "install", "-q", *self._build_requirements()])
        stamp.unlink(missing_ok=True)
        # The build keeps one that is newer than its source, though the library may be another.
        for extension in _extensions():
            extension.unlink()
        prefix = find_library()
        env = {"LIBVFIO_USER_PREFIX": str(prefix)} if prefix else {}
        # Without isolation: the build's own requirements are there already, and nothing is fetched twice.
        log.run(
            [venv / "bin/pip", "install", "-q", "--no-build-isolation", "-e", f"{paths.REPOSITORY}[dev]"],
            env=env, advice="a compiler error stands above; a network error: check pip's index and run bootstrap again",
        )  # fmt: skip
        stamp.write_text(_extension_key())
        if not _extensions():
            raise StepError("pip installed the clone but compiled no pvrdma_server/_vfu.*.so")

    def _build_requirements(self) -> list[str]:
        requires: list[str] = tomllib.loads(_PYPROJECT.read_text())["build-system"]["requires"]
        return requires
