"""scripts/lab's command line."""

import os
import shlex
import sys
import time
from pathlib import Path

import click

from pvrdma_lab import host_cli, state
from pvrdma_lab.agent_client import AgentError
from pvrdma_lab.guest import Guest
from pvrdma_lab.lab import Lab
from pvrdma_lab.state import LabError

_NAME = click.option("--name", default="lab", show_default=True, help="The lab's name.")
_GUEST = click.argument("guest")
_INTERRUPTED = 130


class _Commands(click.Group):
    """Shows a LabError as what it says, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (LabError, AgentError) as error:
            raise click.ClickException(str(error)) from error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def main() -> None:
    """Real QEMU guests on pvrdma-server: each has its own server, all share an IP network over vmxnet3.

    \b
    scripts/lab up                                 two guests, a (10.77.0.1) and b (10.77.0.2)
    scripts/lab exec a ibv_devinfo                 a command in guest a, with its exit status
    scripts/lab logs a server                      the log of a's server
    scripts/lab down
    """


@main.command()
@_NAME
@click.option("--guests", default=2, show_default=True, help="How many: a, b, c, ...")
@click.option("--memory", default=512, show_default=True, help="RAM of each in MiB.")
@click.option("--smp", default=1, show_default=True, help="vCPUs of each.")
@click.option("--server-args", default="", help="More arguments for each server, as a shell would split them; "
              "{name} {index} {ip} {mac} {folder} {lab} are filled in.")  # fmt: skip
@click.option(
    "--qemu-args", default="", help="More arguments for each QEMU, as a shell would split them."
)
@click.option(
    "--kernel-args", default="", help="More arguments for each guest's kernel, such as pci=nomsi."
)
@click.option("--no-server", is_flag=True, help="No pvrdma-server and no RDMA device.")
@click.option("--replace", is_flag=True, help="End a lab of this name that is up.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for the boot.")
def up(
    name: str, guests: int, memory: int, smp: int, server_args: str, qemu_args: str, kernel_args: str, no_server: bool,
    replace: bool, timeout: float,
) -> None:  # fmt: skip
    """Start servers and guests, and wait until the guests answer."""
    lab = Lab(
        name, guests=guests, memory_mib=memory, smp=smp, server=not no_server,
        server_args=shlex.split(server_args), qemu_args=shlex.split(qemu_args),
        kernel_args=shlex.split(kernel_args),
    )  # fmt: skip
    started = time.monotonic()
    click.echo(f"lab {name}: starting {guests} guests ...", err=True)
    lab.up(replace=replace, timeout_s=timeout)
    click.echo(
        f"lab {name}: up in {time.monotonic() - started:.1f} s ({lab.state.accel}), {lab.folder}",
        err=True,
    )
    for guest in lab:
        _print_guest(guest)


@main.command()
@_NAME
def down(name: str) -> None:
    """End servers and guests; the logs stay until the next up."""
    Lab.load(name).down()
    click.echo(f"lab {name}: down", err=True)


@main.command("exec", context_settings={"ignore_unknown_options": True})
@_NAME
@click.option("--timeout", type=float, help="Seconds; then the command is killed, status 124.")
@_GUEST
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(name: str, timeout: float | None, guest: str, command: tuple[str, ...]) -> None:
    """Run COMMAND in GUEST with bash; its output and exit status become this command's."""
    text = command[0] if len(command) == 1 else shlex.join(command)
    target = Lab.load(name)[guest]
    with target.popen(text, timeout) as running:
        running.stream(_writer(1), _writer(2))
        try:
            status = running.wait().status
        except AgentError as error:
            raise target.error("exec", str(error)) from error
        except KeyboardInterrupt:
            status = _INTERRUPTED
    if status == 124 and timeout is not None:
        click.echo(str(target.error("exec", f"killed after {timeout:.0f} s: {text}")), err=True)
    sys.exit(status)


@main.command()
@_NAME
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows.")
@click.option("-n", "--lines", type=int, help="Only the last lines.")
@_GUEST
@click.argument("which", type=click.Choice(["server", "console", "qemu"]), default="console")
def logs(name: str, follow: bool, lines: int | None, guest: str, which: str) -> None:
    """Show a log of GUEST: server, console or qemu. Works after down, too."""
    path = state.LabState.fresh(name, state.Options(guests=26)).folder / guest / f"{which}.log"
    if not path.exists():
        raise click.ClickException(f"there is no {path}")
    argv = ["tail", "-n", str(lines) if lines else "+1", *(["-f"] if follow else []), str(path)]
    sys.stdout.flush()
    os.execvp(argv[0], argv)


@main.command()
@click.option("--name", help="Only this lab.")
def status(name: str | None) -> None:
    """Show labs, guests and processes; status 1 if something that should run does not."""
    broken = False
    for lab_name in [name] if name else state.names():
        lab = Lab.load(lab_name)
        click.echo(f"lab {lab.name}: {lab.folder} ({lab.state.accel})")
        for guest in lab:
            _print_guest(guest)
            broken |= not guest.qemu_alive or (lab.state.options.server and not guest.server_alive)
    sys.exit(1 if broken else 0)


def _process_command(verb: str, method: str, summary: str, *, boots: bool = False) -> None:
    """Adds a command that calls one of Guest's methods."""

    @main.command(verb, help=summary)
    @_NAME
    @_GUEST
    def command(name: str, guest: str) -> None:
        target = Lab.load(name)[guest]
        with state.locked(name):
            getattr(target, method)()
        if boots:
            target.wait_ready()
        _print_guest(target)


_process_command("start-server", "start_server", "Start GUEST's server.")
_process_command("stop-server", "stop_server", "Stop GUEST's server with SIGTERM.")
_process_command("kill-server", "kill_server", "Kill GUEST's server with SIGKILL.")
_process_command("restart-server", "restart_server", "Stop and start GUEST's server.")
_process_command(
    "start-qemu", "start_qemu", "Start GUEST's QEMU and wait for the guest.", boots=True
)
_process_command("stop-qemu", "stop_qemu", "Stop GUEST's QEMU with SIGTERM.")
_process_command("kill-qemu", "kill_qemu", "Kill GUEST's QEMU with SIGKILL.")


@main.command()
@_NAME
@_GUEST
def reboot(name: str, guest: str) -> None:
    """Reboot GUEST at once (reboot -f) and wait for it."""
    Lab.load(name)[guest].reboot()


def _print_guest(guest: Guest) -> None:
    def shown(pid: int | None, alive: bool) -> str:
        return "none" if pid is None else str(pid) if alive else f"{pid} (ended)"

    devices = [
        line.partition("rdma devices:")[2].strip()
        for line in guest.console().splitlines()
        if "rdma devices:" in line
    ]
    click.echo(
        f"  {guest.name}  {guest.ip}  qemu {shown(guest.qemu_pid, guest.qemu_alive)}  "
        f"server {shown(guest.server_pid, guest.server_alive)}  rdma {(devices or ['?'])[-1] or 'none'}"
    )


def _writer(fd: int):  # type: ignore[no-untyped-def]  # click has no say here
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(fd, data) :]

    return write


@main.command("host", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def host(words: tuple[str, ...]) -> None:
    """The rxe host, a virtual machine with RDMA: up, exec, down, logs."""
    sys.exit(host_cli.main(list(words)))


def run() -> None:
    """Runs the command line under the name that was typed."""
    main(prog_name=Path(sys.argv[0]).name)
