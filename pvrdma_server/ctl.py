"""pvrdma-ctl: looks at a running server, and changes its log level, over its control socket."""

import json

import click

from pvrdma_server.errors import PvrdmaError
from pvrdma_server.status import read_status


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Look at a running pvrdma-server."""


@main.command()
@click.argument("socket", type=click.Path())
def status(socket: str) -> None:
    """Print the status of the server whose --status-socket is SOCKET, as JSON."""
    try:
        click.echo(json.dumps(read_status(socket), indent=2))
    except PvrdmaError as e:
        raise click.ClickException(str(e)) from e
