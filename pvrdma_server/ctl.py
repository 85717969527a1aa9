"""pvrdma-ctl: looks at a running server, and changes its log level, over its control socket."""

import json
import os
import time
from typing import Any, Final

import click

from pvrdma_server import __version__, logs
from pvrdma_server.errors import ConfigError
from pvrdma_server.status import ask

# The names of tables.KINDS, for tables are not imported before they are drawn.
KINDS: Final = ("qps", "cqs", "srqs", "mrs", "pds", "contexts")
# Where the unit pvrdma-server@NAME has its server's control socket.
_SOCKET_OF_VM: Final = "/run/pvrdma/{}/status.sock"


def _find_socket(_: click.Context, __: click.Parameter, value: str) -> str:
    """A path as it is; a VM's name is its unit's socket."""
    if "/" in value or os.path.exists(value):
        return value
    return _SOCKET_OF_VM.format(value)


_SOCKET: Final = click.argument("socket", metavar="VM|SOCKET", callback=_find_socket)
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
_BUSIEST: Final = 20
# More than most guests have, and some ms of the server's time per look.
_WATCHED_QPS: Final = 4096
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"
# A line that is too long for a terminal is wrapped by it; told its width, rich would cut off addresses and numbers.
_WIDE: Final = 400


class _Commands(click.Group):
    """Has every command say in one line why a server cannot be asked."""

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Command`."""
        try:
            return super().invoke(ctx)
        except ConfigError as e:
            raise click.ClickException(str(e)) from e


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__)
def main() -> None:
    """Look at a running pvrdma-server.

    It is found by its --status-socket, or by the name of its VM if systemd runs it (pvrdma-server@VM). Its user and
    root may ask.
    """


@main.command()
@_SOCKET
@click.option(
    "--show",
    type=click.Choice([*KINDS, "all"]),
    multiple=True,
    default=("qps",),
    show_default=True,
    help="Objects to show, beside the summary and the GIDs.",
)
@click.option(
    "--limit", default=256, metavar="NUMBER", show_default=True, help="Objects of a kind, at most."
)
@_JSON
def status(socket: str, show: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Show the device, its GIDs and objects, and recent guest errors."""
    document = ask(socket, "status")
    kinds = KINDS if "all" in show or as_json else tuple(dict.fromkeys(show))
    objects = ask(socket, "objects", limit=limit, kinds=["gids", *kinds])
    if as_json:
        click.echo(json.dumps({**document, "tables": objects}, indent=2))
        return
    from pvrdma_server.tables import status_view

    _console().print(status_view(document, objects, kinds))


@main.command()
@_SOCKET
@click.option(
    "--interval",
    default=1.0,
    metavar="SECONDS",
    show_default=True,
    help="Time between two looks.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="Looks, then end. [default: until Ctrl-C]",
)
@_JSON
def top(socket: str, interval: float, count: int | None, as_json: bool) -> None:
    """Show rates, and the queue pairs that are busiest, again and again."""
    from pvrdma_server.tables import busiest, rate_view

    if interval <= 0:
        raise click.BadParameter("a time above 0 is wanted", param_hint="--interval")
    console = _console()
    before = _look(socket)
    shown = 0
    while count is None or shown < count:
        time.sleep(interval)
        after = _look(socket)
        busy = busiest(before[1], after[1], _BUSIEST)
        if as_json:
            click.echo(json.dumps({"status": after[0], "busiest": busy}))
        else:
            if console.is_terminal:
                click.echo(_HOME_AND_CLEAR, nl=False)
            console.print(rate_view(before[0], after[0], busy))
        before, shown = after, shown + 1


def _look(socket: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return ask(socket, "status"), ask(socket, "objects", limit=_WATCHED_QPS, kinds=["qps"])


@main.command("log-level")
@_SOCKET
@click.argument("level", required=False, metavar="[LEVEL]", type=click.Choice(list(logs.LEVELS)))
def log_level(socket: str, level: str | None) -> None:
    """Show the log level, or change it to LEVEL, until the server ends or reloads.

    LEVEL is debug, info, warning or error.
    """
    if level is None:
        click.echo(ask(socket, "log-level")["log_level"])
        return
    before = ask(socket, "log-level", level=level)["before"]
    click.echo(f"{level} (was {before})")


def _console() -> Any:
    from rich.console import Console

    return Console(width=_WIDE, highlight=False)
