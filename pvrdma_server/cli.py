"""The command line: options in, a running server out. No logic lives here."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import structlog
import trio

from pvrdma_server import __version__
from pvrdma_server.backend_soft import SoftConfig
from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig, survivable
from pvrdma_server.errors import ConfigError, PvrdmaError
from pvrdma_server.gid_sync import Policy
from pvrdma_server.server import FabricConfig, HostConfig, ServerConfig, serve
from pvrdma_server.status import read_status

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
# The locally administered range, so that no two makers' devices meet; the rest is the VM's name.
_GUID_PREFIX = bytes.fromhex("0250")


def configure_logging(level: str) -> None:
    """Log to stderr: for people on a terminal, as JSON lines elsewhere."""
    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def node_guid_of(name: str) -> bytes:
    """A node GUID (8 bytes, wire order) that is the same whenever the VM of this name starts."""
    return _GUID_PREFIX + hashlib.sha256(name.encode()).digest()[:6]


def _parse_limits(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    limits = {}
    for text in values:
        name, _sign, value = text.partition("=")
        if name not in LIMIT_NAMES or not value.isdecimal() or not 0 < int(value) < 1 << 32:
            raise click.BadParameter(
                f"{text}: NAME=VALUE, with a positive number and one of {', '.join(LIMIT_NAMES)}"
            )
        limits[name] = int(value)
    return limits


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--socket-path", type=click.Path(), help="UNIX socket where QEMU finds the device.")
@click.option(
    "--fd", "listen_fd", type=int, help="Listening socket to use instead of --socket-path."
)
@click.option(
    "--status-socket", type=click.Path(), help="UNIX socket that answers with the status."
)
@click.option(
    "--name", help="Name of the VM; its node GUID follows from it. [default: the socket's path]"
)
@click.option(
    "--roce-version",
    type=click.Choice(["1", "2"]),
    default="2",
    show_default=True,
    help="The one RoCE version of the device's GIDs; the driver refuses both.",
)
@click.option(
    "--doorbells",
    type=click.Choice(["mapped", "trapped"]),
    default="mapped",
    show_default=True,
    help="Doorbell pages of the guest's processes: memory that is watched, or registers that are trapped.",
)
@click.option(
    "--backend",
    type=click.Choice(["soft", "ibv"]),
    default="soft",
    show_default=True,
    help="Embedded, without RDMA on the host, or a host RDMA device through verbs.",
)
@click.option(
    "--fabric",
    type=click.Path(file_okay=False),
    help="Folder where the embedded backends of this host meet; their guests reach each other.",
)
@click.option(
    "--fabric-uid",
    "fabric_uids",
    type=int,
    multiple=True,
    help="Another user whose servers may take part in the fabric; ours and root's always may.",
)
@click.option("--ibdev", help="Host RDMA device of --backend ibv, as ibv_devices lists it.")
@click.option("--ibport", type=int, default=1, show_default=True, help="Its port.")
@click.option(
    "--gid-policy",
    type=click.Choice([policy.value for policy in Policy]),
    default=Policy.CHECK.value,
    show_default=True,
    help="With --backend ibv: add the guest's addresses to the port's netdev, or only say which are missing.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder for what must survive a crash: the addresses that --gid-policy add has added.",
)
@click.option(
    "--limit",
    "limits",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parse_limits,
    help=f"A limit of the device, clamped to what guests survive: {', '.join(LIMIT_NAMES)}.",
)
@click.option(
    "--log-level",
    type=click.Choice(list(_LEVELS)),
    default="info",
    show_default=True,
    help="What to log.",
)
@click.pass_context
def main(
    ctx: click.Context,
    socket_path: str | None,
    listen_fd: int | None,
    status_socket: str | None,
    name: str | None,
    roce_version: str,
    doorbells: str,
    backend: str,
    fabric: str | None,
    fabric_uids: tuple[int, ...],
    ibdev: str | None,
    ibport: int,
    gid_policy: str,
    state_dir: Path | None,
    limits: dict[str, int],
    log_level: str,
) -> None:
    """Serve a PVRDMA device to one virtual machine over vfio-user.

    QEMU (10.1 or newer) attaches it as function 1 of a slot whose function 0 is a vmxnet3:

    \b
      -object memory-backend-memfd,id=mem,size=1G,share=on -machine q35,memory-backend=mem
      -device vmxnet3,netdev=n0,bus=pcie.0,addr=5.0,multifunction=on
      -device '{"driver":"vfio-user-pci","bus":"pcie.0","addr":"5.1",
                "socket":{"type":"unix","path":"SOCKET"}}'
    """  # noqa: D301 - \b is click's
    if ctx.invoked_subcommand is not None:
        return
    if (socket_path is None) == (listen_fd is None):
        raise click.UsageError("give --socket-path or --fd, and not both")
    if (backend == "ibv") != (ibdev is not None):
        raise click.UsageError("--backend ibv and --ibdev go together")
    if fabric is not None and backend != "soft":
        raise click.UsageError("--fabric is the embedded backend's; leave --backend ibv away")
    configure_logging(log_level)
    identity = name or socket_path or f"fd {listen_fd}"
    device = survivable(DeviceConfig(int(roce_version), doorbells == "mapped", **limits))
    config = ServerConfig(
        socket_path=socket_path,
        listen_fd=listen_fd,
        status_path=status_socket,
        device=device,
        soft=_soft_config(identity, {name: getattr(device, name) for name in limits}),
        host=_host_config(ibdev, ibport, gid_policy, state_dir, identity),
        fabric=FabricConfig(fabric, fabric_uids) if fabric is not None else None,
    )
    failures: list[str] = []
    try:
        trio.run(serve, config)
    except* PvrdmaError as group:
        failures = [str(e) for e in _leaves(group)]
    if failures:
        raise click.ClickException("; ".join(failures))


def _soft_config(identity: str, limits: dict[str, int]) -> SoftConfig:
    """The embedded backend follows the device's limits where it has some of its own."""
    own = {field.name for field in fields(SoftConfig)} & limits.keys()
    try:
        return SoftConfig(
            name=identity, node_guid=node_guid_of(identity), **{name: limits[name] for name in own}
        )
    except ConfigError as e:
        raise click.ClickException(str(e)) from e


def _host_config(
    ibdev: str | None, ibport: int, gid_policy: str, state_dir: Path | None, identity: str
) -> HostConfig | None:
    if ibdev is None:
        return None
    marker = state_dir / f"gids-{node_guid_of(identity).hex()}.json" if state_dir else None
    return HostConfig(ibdev, ibport, node_guid_of(identity), Policy(gid_policy), marker)


def _leaves(group: BaseExceptionGroup[PvrdmaError]) -> Iterator[PvrdmaError]:
    for e in group.exceptions:
        if isinstance(e, BaseExceptionGroup):
            yield from _leaves(e)
        else:
            yield e


@main.command()
@click.argument("socket", type=click.Path(exists=True))
def status(socket: str) -> None:
    """Print the status of the server whose --status-socket is SOCKET, as JSON."""
    try:
        click.echo(json.dumps(read_status(socket), indent=2))
    except PvrdmaError as e:
        raise click.ClickException(str(e)) from e
