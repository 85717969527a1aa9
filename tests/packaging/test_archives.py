"""The source archive and the wheel made of it: what is in them, and that the wheel needs nothing of the build."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from source_archive import build, clone_files, copy_clone

# What git has and an archive has no use for.
_LEFT_OUT = re.compile(r"^(\.ci/|\.gitignore$)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("archives")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    return build("build_sdist", copy_clone(folder / "clone"), folder / "dist")


@pytest.fixture(scope="module")
def wheel(folder: Path, source: Path) -> Path:
    """Built from the source archive, with the libvfio-user that the machine has."""
    with tarfile.open(source) as tar:
        tar.extractall(folder / "source", filter="data")
    (tree,) = (folder / "source").iterdir()
    return build("build_wheel", tree, folder / "dist")


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_source_archive_has_what_git_has(source: Path) -> None:
    with tarfile.open(source) as tar:
        inside = {member.name.partition("/")[2] for member in tar if member.isfile()}
    wanted = {name for name in clone_files() if not _LEFT_OUT.match(name)}
    assert wanted - inside == set()
    made = {name for name in inside - wanted if not name.startswith("pvrdma_server.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_scripts_stay_executable(source: Path) -> None:
    with tarfile.open(source) as tar:
        modes = {member.name.partition("/")[2]: member.mode for member in tar}
    assert modes["scripts/build-libvfio-user"] & 0o111


def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"pvrdma_server-.*-cp311-abi3-linux_\w+\.whl", wheel.name)
    extensions = [name for name in names(wheel) if name.endswith(".so")]
    assert extensions
    assert all(name.endswith(".abi3.so") for name in extensions), extensions


def test_the_wheel_carries_units_pages_and_licenses(wheel: Path) -> None:
    data = [name.partition(".data/data/")[2] for name in names(wheel) if ".data/data/" in name]
    assert {
        "lib/systemd/system/pvrdma-server@.service",
        "lib/systemd/system/pvrdma-server@.socket",
        "lib/systemd/system/pvrdma-mad-hub@.service",
        "lib/sysusers.d/pvrdma-server.conf",
        "lib/tmpfiles.d/pvrdma-server.conf",
        "share/man/man8/pvrdma-server.8",
    } <= set(data)
    assert "pvrdma_server/licenses/LICENSE.libvfio-user" in names(wheel)
    assert "pvrdma_server/licenses/LICENSE.json-c" in names(wheel)
    assert not [name for name in names(wheel) if name.startswith(("tests/", "scripts/"))]


def test_the_extension_needs_libc_only(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract("pvrdma_server/_vfu.abi3.so", folder / "unpacked"))
    words = ["readelf", "--dynamic", str(path)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", text)
    assert set(needed) <= {"libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    # A Python may add a path of its own; none may lead to what was built.
    assert not re.search(r"\((RUNPATH|RPATH)\).*(libvfio|pvrdma)", text)


def test_it_runs_where_nothing_was_built(wheel: Path, folder: Path) -> None:
    """The wheel unpacked, the dependencies of this virtualenv behind it, and no cache."""
    unpacked = folder / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    code = (
        "import sys; sys.path[:0] = [sys.argv.pop(1), *sys.argv.pop(1).split(':')]\n"
        "import pvrdma_server; print(pvrdma_server.__file__)\n"
        "from pvrdma_server.cli import main; main()\n"
    )
    libraries = f"{sysconfig.get_path('platlib')}:{sysconfig.get_path('purelib')}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(unpacked), libraries, "--print-capabilities"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PVRDMA_CACHE": str(folder / "empty")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{unpacked}/")
    assert '"soft"' in done.stdout
