"""The set-up's command line: which steps there are, in which order, and what they made."""

import argparse
import json
import os
import sys

from pvrdma_lab import paths
from pvrdma_lab.debian import HostPackages
from pvrdma_lab.guest_image import GuestInitrd, GuestKernel, GuestRoot, find_guest
from pvrdma_lab.host_image import HostExtension, HostInitrd, HostTree, TinyKernel
from pvrdma_lab.nested_image import NestedInitrd
from pvrdma_lab.old_qemu import OldQemu
from pvrdma_lab.python_env import Library, Virtualenv, find_library, find_venv
from pvrdma_lab.qemu_tree import QemuTree, find_qemu
from pvrdma_lab.service_image import ServiceTree
from pvrdma_lab.steps import Step, StepError, run_step

STEPS: tuple[Step, ...] = (
    HostPackages(), Library(), Virtualenv(), QemuTree(), GuestKernel(), GuestRoot(), GuestInitrd(),
    HostTree(), HostInitrd(), HostExtension(), TinyKernel(), NestedInitrd(), ServiceTree(), OldQemu(),
)  # fmt: skip
# Steps that are run only when they are named.
_ON_DEMAND = ("old-qemu",)
# What a step needs of others, beside the machine itself.
_NEEDS = {
    "venv": ("host", "libvfio-user"),
    "rootfs": ("host", "kernel"),
    "initrd": ("host", "kernel"),
    "rxe-initrd": ("rxe-host",),
    "rxe-extension": ("libvfio-user", "rxe-host"),
    "service-tree": ("host", "kernel", "rootfs", "initrd"),
    "nested-initrd": ("rxe-host", "rxe-initrd", "tiny-kernel"),
}


def environment() -> dict[str, object]:
    """Returns what the set-up has made so far: paths as text, None for what is not there."""
    qemu, guest, venv, library = find_qemu(), find_guest(), find_venv(), find_library()
    return {
        "cache": str(paths.cache_folder()),
        "libvfio_user": library and str(library),
        "venv": venv and str(venv),
        "python": venv and str(venv / "bin/python"),
        "qemu": qemu and list(qemu.argv),
        "qemu_environment": qemu and qemu.environment,
        "kernel": guest and str(guest.kernel),
        "initrd": guest and str(guest.initrd),
        "image": guest and str(guest.image),
    }


def chosen_steps(only: list[str]) -> list[Step]:
    """Returns the steps to run: all but those on demand, or the named ones and what they need, in order."""
    if not only:
        return [step for step in STEPS if step.name not in _ON_DEMAND]
    wanted = {"host", *only}
    for name in only:
        wanted.update(_NEEDS.get(name, ()))
    return [step for step in STEPS if step.name in wanted]


def _parse(argv: list[str]) -> argparse.Namespace:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        prog="bootstrap",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Sets up everything that server, tests and lab need, on Debian 12 with Python 3.11 and root.\n"
        "Runs again are quick: each step is kept in the cache under a key of what it is made of.",
        epilog="steps, in order:\n"
        + "".join(f"  {step.name:<13} {step.title}\n" for step in STEPS)
        + "\nenvironment:\n  PVRDMA_CACHE  cache folder (default ${XDG_CACHE_HOME:-~/.cache}/pvrdma-server)\n",
    )
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="STEP",
                        help="run this step and what it needs; may be repeated")  # fmt: skip
    parser.add_argument("--print-env", action="store_true",
                        help="print what is there as JSON, and do nothing")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs the set-up; returns the process's status."""
    arguments = _parse(argv)
    if arguments.print_env:
        print(json.dumps(environment(), indent=2))
        return 0
    os.umask(0o022)
    steps = chosen_steps(arguments.only)
    try:
        for number, step in enumerate(steps, 1):
            run_step(step, f"[{number}/{len(steps)}]")
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bootstrap: interrupted; run it again, finished steps are kept", file=sys.stderr)
        return 130
    print("bootstrap: all there", file=sys.stderr)
    return 0
