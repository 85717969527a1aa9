"""What pyproject.toml cannot say: the C extensions, what is carried beside the package, and the wheel's tag."""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_ROOT = Path(__file__).parent
_PACKAGING = _ROOT / "packaging"
# Below the prefix (a virtualenv, /usr): where systemd and man look when the prefix is /usr.
_DATA_FOLDERS = {
    "lib/systemd/system": "systemd",
    "lib/sysusers.d": "sysusers.d",
    "lib/tmpfiles.d": "tmpfiles.d",
    "share/man/man8": "man",
}


class BuildWithLicenses(build_py):
    """Adds the licenses of what the extension is linked with statically: libvfio-user and json-c."""

    def run(self) -> None:
        """Copy the package, then the licenses."""
        super().run()
        builder = runpy.run_path(str(_ROOT / "pvrdma_server" / "_vfu_build.py"))
        target = Path(self.build_lib, "pvrdma_server", "licenses")
        for path in builder["library_licenses"]():
            self.mkpath(str(target))
            shutil.copy(path, target)


setup(
    cffi_modules=[
        "pvrdma_server/_vfu_build.py:ffibuilder",
        "pvrdma_server/_watch_build.py:ffibuilder",
        "pvrdma_server/_ring_build.py:ffibuilder",
    ],
    cmdclass={"build_py": BuildWithLicenses},
    data_files=[
        (folder, sorted(str(p.relative_to(_ROOT)) for p in (_PACKAGING / name).glob("*.*")))
        for folder, name in _DATA_FOLDERS.items()
    ],
    # cffi compiles for the stable ABI: one wheel serves every Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
