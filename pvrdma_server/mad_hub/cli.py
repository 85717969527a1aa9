"""`pvrdma-mad-hub`: options in, a running hub out. No logic lives here."""

import json
from collections.abc import Iterator

import click
import trio

from pvrdma_server import __version__, logs
from pvrdma_server.errors import ConfigError, PvrdmaError
from pvrdma_server.mad_hub.daemon import HubConfig, serve
from pvrdma_server.mad_hub.umad import Umad
from pvrdma_server.status import read_status


class ConfigFailure(click.ClickException):
    """What was asked for cannot be had, so that a service manager need not try again. Source: EX_CONFIG, sysexits.h."""

    exit_code = 78


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--socket", "socket_path", type=click.Path(), help="UNIX socket for the servers.")
@click.option("--ibdev", help="Host RDMA device whose CM class to relay. Without: VM to VM only.")
@click.option(
    "--ibport", type=click.IntRange(1, 255), default=1, show_default=True, help="Its port."
)
@click.option(
    "--old-mux-socket",
    type=click.Path(),
    help="UNIX socket for QEMU's old pvrdma devices, in place of rdmacm-mux.",
)
@click.option(
    "--status-socket", type=click.Path(), help="UNIX socket that answers with the status."
)
@click.option(
    "--allow-uid",
    "allowed_uids",
    type=int,
    multiple=True,
    help="Another user whose servers may connect; ours and root's always may.",
)
@click.option(
    "--log-level",
    type=click.Choice(list(logs.LEVELS)),
    default="info",
    show_default=True,
    help="What to log.",
)
@click.pass_context
def main(
    ctx: click.Context,
    socket_path: str | None,
    ibdev: str | None,
    ibport: int,
    old_mux_socket: str | None,
    status_socket: str | None,
    allowed_uids: tuple[int, ...],
    log_level: str,
) -> None:
    """Relay connection management between this host's VMs, and to the network of an RDMA device.

    One hub per port of a device; each VM's pvrdma-server connects to its socket. SIGHUP has it try the device again.
    """
    if ctx.invoked_subcommand is not None:
        return
    if socket_path is None:
        raise click.UsageError("give --socket")
    logs.configure(log_level)
    config = HubConfig(socket_path, old_mux_socket, status_socket, allowed_uids)
    port = Umad(ibdev, ibport) if ibdev is not None else None
    failures: list[str] = []
    try:
        trio.run(serve, config, port)
    except* ConfigError as group:
        failures = [str(e) for e in _leaves(group)]
    if failures:
        raise ConfigFailure("; ".join(failures))


def _leaves(group: BaseExceptionGroup[ConfigError]) -> Iterator[ConfigError]:
    for e in group.exceptions:
        if isinstance(e, BaseExceptionGroup):
            yield from _leaves(e)
        else:
            yield e


@main.command()
@click.argument("socket", type=click.Path())
def status(socket: str) -> None:
    """Print the status of the hub whose --status-socket is SOCKET, as JSON."""
    try:
        click.echo(json.dumps(read_status(socket), indent=2))
    except PvrdmaError as e:
        raise click.ClickException(str(e)) from e
