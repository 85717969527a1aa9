"""Brings a script into bootstrap's virtualenv, after the set-up steps it needs. Standard library only."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.python_env import find_venv

# The set-up steps that a guest on the device takes.
GUEST_STEPS = ("venv", "qemu", "kernel", "rootfs", "initrd")
# Those that the machine with systemd takes, and the small guest in it.
SERVICE_STEPS = ("qemu", "service-tree", "nested-initrd")


def set_up(steps: Sequence[str]) -> bool:
    """Runs scripts/bootstrap for these steps and what they need; it shows its own progress.

    Returns:
        False if a step failed: bootstrap's last line says which, and what to do.
    """
    words = [word for step in steps for word in ("--only", step)]
    bootstrap = paths.REPOSITORY / "scripts" / "bootstrap"
    return subprocess.run([sys.executable, str(bootstrap), *words], check=False).returncode == 0


def venv_python() -> str:
    """Returns the virtualenv's interpreter; call set_up() first."""
    venv = find_venv()
    if venv is None:
        sys.exit(
            "the virtualenv is out of date again: another clone or Python? run scripts/bootstrap"
        )
    return str(venv / "bin" / "python")


def enter_venv(steps: Sequence[str]) -> None:
    """Does the set-up and runs this very script again, in the virtualenv; returns only there."""
    # A variable, not the prefix alone: a virtualenv that goes stale meanwhile must not loop.
    if os.environ.pop("PVRDMA_LAB_ENTERED", None):
        return
    if not set_up(steps):
        sys.exit(f"{Path(sys.argv[0]).name}: the set-up failed; see the lines above")
    python = venv_python()
    os.execve(python, [python, *sys.argv], {**os.environ, "PVRDMA_LAB_ENTERED": "1"})
