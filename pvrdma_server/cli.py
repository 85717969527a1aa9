"""pvrdma-server, the command line: options in, a running server out. No logic lives here.

What a server that starts does not need is imported where it is used.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
import structlog
import trio
from click.core import ParameterSource

from pvrdma_server import __version__, logs
from pvrdma_server.config import (
    identity_of,
    merge,
    needs_restart,
    read_file,
    server_config,
)
from pvrdma_server.errors import ConfigError, PvrdmaError
from pvrdma_server.server import serve
from pvrdma_server.settings import FilePath, SettingOption, Settings, make_options
from pvrdma_server.status import read_status
from pvrdma_server.systemd import check_listening, take_listening_fd

# Whether it can be read is said by who reads it, in the same words for a file that is missing.
_CONFIG = FilePath(readable=False, path_type=Path)


class ConfigFailure(click.ClickException):
    """What was asked for cannot be had, so that a service manager need not try again. Source: EX_CONFIG, sysexits.h."""

    exit_code = 78


class ServerProgram(click.Group):
    """The program, with its options in the sections of the configuration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Command`."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                title = option.section if isinstance(option, SettingOption) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        self.format_commands(ctx, formatter)


@click.group(
    cls=ServerProgram,
    invoke_without_command=True,
    params=list(make_options()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__)
@click.option(
    "--config",
    type=_CONFIG,
    metavar="FILE",
    help="TOML file with the options below as keys (docs/configuration.md); the command line counts more.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check configuration and host, one line per finding, and do not start; status 1 if it would not work.",
)
@click.option(
    "--print-capabilities", is_flag=True, help="Print what this installation can do, as JSON."
)
@click.pass_context
def main(
    ctx: click.Context, /, config: Path | None, check: bool, print_capabilities: bool, **values: Any
) -> None:
    """Serve a PVRDMA device to one virtual machine over vfio-user.

    QEMU (10.1 or newer) attaches it as function 1 of a slot whose function 0 is a vmxnet3; pvrdma-server qemu-args
    prints the arguments. See docs/configuration.md for the file.
    """
    given = {name: value for name, value in values.items() if _is_given(ctx, name)}
    if ctx.invoked_subcommand is not None:
        if config or check or print_capabilities or given:
            raise click.UsageError(f"options of {ctx.invoked_subcommand} stand after its name")
        return
    if print_capabilities:
        from pvrdma_server.capabilities import capabilities

        click.echo(json.dumps(capabilities(), indent=2))
        return
    try:
        settings = _settings(config, given)
        if check:
            _print_findings(ctx, settings, config)
        else:
            _serve(settings, config, given)
    except ConfigError as e:
        if check:
            _print_problems(ctx, str(e))
        raise ConfigFailure(str(e)) from e


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _settings(config: Path | None, given: dict[str, Any]) -> Settings:
    """What file, command line and systemd say together."""
    settings = merge(read_file(config) if config is not None else {}, given)
    settings = _with_passed_socket(settings, config)
    try:
        server_config(settings, config)
    except ConfigError as e:
        where = f" (keys of {config} have the same names, without the dashes)" if config else ""
        raise ConfigError(f"{e}{where}") from e
    return settings


def _with_passed_socket(settings: Settings, config: Path | None) -> Settings:
    """The socket that systemd passes takes the place of --socket-path, whose path must be the same."""
    fd = take_listening_fd(os.environ)
    if fd is None:
        if settings.fd is None or settings.socket_path is not None:
            return settings
        path = check_listening(settings.fd, "--fd")
        return replace(settings, name=identity_of(replace(settings, socket_path=path), config))
    if settings.fd is not None:
        raise ConfigError("systemd passes a socket: leave --fd away")
    path = check_listening(fd, "the socket unit")
    if settings.socket_path not in (None, path):
        raise ConfigError(
            f"systemd passes a socket at {path}, but --socket-path is {settings.socket_path}: "
            "make them the same, or leave --socket-path away"
        )
    name = identity_of(replace(settings, socket_path=path), config)
    return replace(settings, fd=fd, socket_path=None, name=name)


def _serve(settings: Settings, config: Path | None, given: dict[str, Any]) -> None:
    logs.configure(settings.log_level, settings.log_format)

    def reload() -> None:
        assert config is not None
        fresh = merge(read_file(config), given)
        log: Any = structlog.get_logger(component="server")
        if settings.fd is not None:
            fresh = replace(
                fresh, fd=settings.fd, socket_path=settings.socket_path, name=settings.name
            )
        server_config(fresh, config)
        logs.set_level(fresh.log_level)
        changed = needs_restart(settings, fresh)
        log.info("reloaded", file=str(config), log_level=fresh.log_level)
        if changed:
            log.warning("restart_needed", keys=changed, why="these are read at the start only")

    failures: list[PvrdmaError] = []
    try:
        trio.run(serve, server_config(settings, config, reload if config is not None else None))
    except* PvrdmaError as group:
        failures = list(_leaves(group))
    if failures:
        hopeless = all(isinstance(e, ConfigError) for e in failures)
        kind = ConfigFailure if hopeless else click.ClickException
        raise kind("; ".join(str(e) for e in failures))


def _leaves(group: BaseExceptionGroup[PvrdmaError]) -> Iterator[PvrdmaError]:
    for e in group.exceptions:
        if isinstance(e, BaseExceptionGroup):
            yield from _leaves(e)
        else:
            yield e


def _print_findings(ctx: click.Context, settings: Settings, config: Path | None) -> None:
    from pvrdma_server.check import check_server

    findings = check_server(settings, config)
    for finding in findings:
        click.echo(str(finding))
    if any(finding.is_error for finding in findings):
        ctx.exit(1)


def _print_problems(ctx: click.Context, text: str) -> NoReturn:
    """The findings where the configuration is such that nothing else can be looked at."""
    from pvrdma_server.check import Finding

    for line in text.splitlines():
        why = line.removeprefix("configuration ")
        click.echo(str(Finding("configuration", why, "see docs/configuration.md", is_error=True)))
    ctx.exit(1)


@main.command(short_help="Print the status of a server, as JSON.")
@click.argument("socket", type=FilePath())
def status(socket: str) -> None:
    """Print the status of the server whose --status-socket is SOCKET, as JSON."""
    try:
        click.echo(json.dumps(read_status(socket), indent=2))
    except PvrdmaError as e:
        raise click.ClickException(str(e)) from e


@main.command("qemu-args", short_help="Print QEMU's arguments for this VM.")
@click.option("--config", type=_CONFIG, metavar="FILE", help="The server's file.")
@click.option("--socket-path", type=FilePath(), help="The server's socket, instead of --config.")
@click.option("--memory", default="4G", metavar="SIZE", show_default=True, help="The guest's RAM.")
@click.option(
    "--slot", default=5, metavar="NUMBER", show_default=True, help="Slot on pcie.0 that is free."
)
@click.option(
    "--qemu",
    metavar="PROGRAM",
    help="QEMU's program. [default: the first there is of qemu-system-x86_64, qemu-kvm]",
)
@click.option("--libvirt", is_flag=True, help="Print a snippet for a libvirt domain instead.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of words instead.")
def print_qemu_args(
    config: Path | None,
    socket_path: str | None,
    memory: str,
    slot: int,
    qemu: str | None,
    libvirt: bool,
    as_json: bool,
) -> None:
    """Print QEMU's arguments for this VM: memory, the vmxnet3, the device.

    The VM's own are left to add: -accel, -cpu, disks; and the -netdev of its network in place of user networking.
    """
    if (config is None) == (socket_path is None):
        raise click.UsageError("give --config or --socket-path, and not both")
    from pvrdma_server import qemu_args

    if libvirt and as_json:
        raise click.UsageError("--libvirt and --json exclude each other")
    try:
        path = socket_path or (read_file(config) if config else {}).get("socket_path")
        if path is None:
            raise ConfigError(f"{config} has no socket-path: add it, or give --socket-path")
        program = qemu_args.find_qemu(qemu)
        qemu_args.qemu_version(program)
        machine = qemu_args.check_machine(qemu_args.Machine(path, memory, slot))
    except ConfigError as e:
        raise click.ClickException(str(e)) from e
    if libvirt:
        click.echo(qemu_args.libvirt_snippet(machine), nl=False)
    elif as_json:
        click.echo(json.dumps(qemu_args.arguments(machine)))
    else:
        click.echo(qemu_args.shell_lines(qemu_args.arguments(machine)))
