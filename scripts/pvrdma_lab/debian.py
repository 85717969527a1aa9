"""Debian: the machine's own mirror, host packages, and trees of another release.

No host name of a mirror stands here: the machine's apt settings say where Debian comes from.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from pvrdma_lab.steps import StepError, StepLog

TREE_RELEASE = "trixie"

# Debian package -> what shows that the machine has it by another way (a program), or None.
_HOST_PACKAGES: dict[str, str | None] = {
    "binutils": "ar",
    "cpio": "cpio",
    "e2fsprogs": "mke2fs",
    "gcc": "gcc",
    "iproute2": "ip",
    "libc6-dev": None,
    "mmdebstrap": "mmdebstrap",
    "xz-utils": "xz",
}
# Settings of the machine's apt that a tree's apt needs as well.
_APT_SETTINGS = re.compile(
    r'^(Acquire::(?:https?::Proxy|https?::CaInfo|Check-Valid-Until|Check-Date|Retries) "[^"]+";)$',
    re.M,
)


def _apt_get(log: StepLog, *words: str, advice: str) -> None:
    log.run(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words],
        env={"DEBIAN_FRONTEND": "noninteractive"}, advice=advice,
    )  # fmt: skip


def _is_installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout == "installed"


def missing_host_packages() -> list[str]:
    """Returns the host packages that the set-up needs and the machine lacks."""
    missing = [
        package
        for package, program in _HOST_PACKAGES.items()
        if not (program and shutil.which(program)) and not _is_installed(package)
    ]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")
    if subprocess.run(
        [sys.executable, "-c", "import venv, ensurepip"], check=False, capture_output=True
    ).returncode:
        missing.append("python3-venv")
    return missing


class HostPackages:
    """Step: Debian packages on the machine itself."""

    name = "host"
    title = "install missing Debian packages"

    def find(self) -> Path | None:
        return None if missing_host_packages() else Path("/usr")

    def build(self, log: StepLog) -> None:
        missing = missing_host_packages()
        if os.geteuid():
            raise StepError(
                f"needs root to install {' '.join(missing)}",
                f"run as root once: apt-get install {' '.join(missing)}",
            )
        install = ["install", "-y", "--no-install-recommends", *missing]
        try:
            _apt_get(log, *install, advice="")
        except StepError:
            # Lists are missing or old: fetch them once. A third party's dead source is no reason to stop here.
            log.run(["sh", "-c", "apt-get -q update || true"])
            _apt_get(
                log,
                *install,
                advice="check the machine's apt sources and network, then run bootstrap again",
            )


def mirror(log: StepLog) -> str:
    """Returns the URI of the Debian archive that this machine's apt uses.

    Raises:
        StepError: apt knows none.
    """
    query = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    for _ in range(2):
        for line in log.output(query).splitlines():
            label, _, uri = line.partition(" ")
            if label == "Debian":
                return uri.rstrip("/")
        log.run(["sh", "-c", "apt-get -q update || true"])
    raise StepError("apt knows no Debian archive", "add Debian to the machine's apt sources")


def make_tree(
    log: StepLog,
    target: Path,
    *,
    packages: list[str],
    variant: str = "apt",
    suites: tuple[str, ...] = (TREE_RELEASE,),
    options: tuple[str, ...] = (),
) -> None:
    """Makes a Debian tree in `target` (which must not exist), with the machine's mirror.

    Args:
        log: the step's log.
        target: the folder to make.
        packages: names for --include.
        variant: mmdebstrap's variant.
        suites: the first is the release, others are added to its sources.
        options: more options of mmdebstrap (hooks).
    """
    uri = mirror(log)
    settings = subprocess.run(
        ["apt-config", "dump"], capture_output=True, text=True, check=True
    ).stdout
    # In a mount namespace of its own: what a killed run mounted (proc, sys) is gone with it.
    argv = ["nice", "unshare", "--mount", "mmdebstrap", f"--variant={variant}", "--mode=root"]
    argv += [f"--aptopt={setting}" for setting in _APT_SETTINGS.findall(settings)]
    argv += ["--dpkgopt=force-unsafe-io", "--dpkgopt=path-exclude=/usr/share/man/*"]
    argv += ["--dpkgopt=path-exclude=/usr/share/locale/*", *options]
    if packages:
        argv.append(f"--include={','.join(packages)}")
    argv += [suites[0], str(target), *(f"deb {uri} {suite} main" for suite in suites)]
    log.run(
        argv, env={"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        advice="the log's end says what apt missed; check network and mirror, then run bootstrap again",
    )  # fmt: skip
