"""The project's source archive, made of a copy of the clone, so that building leaves nothing in the clone."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def clone_files() -> list[str]:
    """What the clone has: what git knows, and what is new and not ignored."""
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({name for name in listing if (ROOT / name).exists()})


def copy_clone(target: Path) -> Path:
    """A copy of the clone's files in `target`."""
    for name in clone_files():
        into = target / name
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into)
    return target


def build(what: str, source: Path, target: Path) -> Path:
    """An archive ("build_sdist") or wheel ("build_wheel") of the tree `source`, in `target`."""
    target.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, what, str(target)],
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return target / done.stdout.splitlines()[-1]
