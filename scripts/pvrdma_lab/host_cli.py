"""scripts/lab host: the rxe host by hand. Standard library only."""

import argparse
import sys

from pvrdma_lab.agent_client import TIMEOUT_STATUS
from pvrdma_lab.host import HostVm
from pvrdma_lab.state import LabError


def main(argv: list[str]) -> int:
    """Runs `lab host ...`; returns the process's status."""
    parser = argparse.ArgumentParser(
        prog="lab host",
        description="The rxe host: a virtual machine with two soft-RoCE devices and this clone in it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="boot it, or copy the clone in again if it runs")
    commands.add_parser("down", help="end it")
    commands.add_parser("logs", help="print its console")
    run = commands.add_parser("exec", help="run a shell command in it, in the clone's folder")
    run.add_argument("--timeout", type=float, default=600.0, help="seconds [600]")
    run.add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    try:
        return _do(HostVm(), arguments)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1


def _do(vm: HostVm, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "up":
            print(
                f"up in {vm.up():.1f} s; rxe0 on d0 (10.9.0.1), rxe1 on d1 (10.9.0.2, ip netns exec peer)"
            )
        case "down":
            vm.down()
        case "logs":
            print(vm.console(), end="")
        case _:
            if not vm.alive:
                raise LabError("the rxe host does not run: scripts/lab host up")
            with vm.popen(vm.project(" ".join(arguments.words)), arguments.timeout) as running:
                running.stream(sys.stdout.buffer.write, sys.stderr.buffer.write)
                status = running.wait(arguments.timeout + 30).status
            sys.stdout.flush()
            return status if status != TIMEOUT_STATUS else 124
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
