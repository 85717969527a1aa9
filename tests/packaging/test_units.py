"""The units, without a running systemd: their hardening, their syntax, and that they agree with the rest."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[2] / "packaging"
UNITS = sorted((PACKAGING / "systemd").iterdir())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
# systemd's exposure level times ten; 12 was reached. Below 20 it says OK.
MOST_EXPOSURE = 16

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd-analyze here; `scripts/test service` has one",
)


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with the units and what they call."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
    for program in (
        "opt/pvrdma-server/bin/pvrdma-server",
        "opt/pvrdma-server/bin/pvrdma-mad-hub",
        "bin/kill",
    ):
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_hardening(root: Path, service: Path) -> None:
    threshold = f"--threshold={MOST_EXPOSURE}"
    done = analyze("security", "--offline=true", threshold, f"--root={root}", service.name)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_understands_every_line(root: Path, unit: Path) -> None:
    instance = unit.name.replace("@", "@vm1")
    done = analyze("verify", "--man=no", "--recursive-errors=no", f"--root={root}", instance)
    assert not [line for line in done.stderr.splitlines() if "pvrdma" in line], done.stderr


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_users_and_groups_are_made_by_sysusers(service: Path) -> None:
    made = (PACKAGING / "sysusers.d/pvrdma-server.conf").read_text()
    for kind, names in re.findall(
        r"^(User|Group|SupplementaryGroups)=(.*)$", service.read_text(), re.M
    ):
        for name in names.split():
            assert re.search(rf"^[{'u' if kind == 'User' else 'ug'}] {name} ", made, re.M), name


def test_the_socket_is_where_the_documentation_says() -> None:
    text = (PACKAGING / "systemd/pvrdma-server@.socket").read_text()
    assert "\nListenStream=/run/pvrdma/%i.sock\n" in text
    docs = PACKAGING.parent / "docs"
    assert 'socket-path = "/run/pvrdma/vm1.sock"' in (docs / "quick-start.md").read_text()


def test_folders_of_the_units_are_made_by_tmpfiles() -> None:
    made = re.findall(r"^d (\S+) ", (PACKAGING / "tmpfiles.d/pvrdma-server.conf").read_text(), re.M)
    for service in SERVICES:
        for path in re.findall(r"^ReadWritePaths=-?(\S+)$", service.read_text(), re.M):
            assert path in made
        for name in re.findall(r"^StateDirectory=(\S+)$", service.read_text(), re.M):
            assert f"/var/lib/{name}" in made
