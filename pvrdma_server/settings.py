"""The table of settings: every option once, for the command line, the file, --help and the documentation.

Each field of `Settings` is an option (`fabric_uids` is --fabric-uid) and, with the same name, a key of the TOML file
(`fabric-uids`). click's types check the values of both.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final

import click

from pvrdma_server.caps import LIMIT_NAMES
from pvrdma_server.gid_sync import Policy
from pvrdma_server.logs import FORMATS, LEVELS

# The driver's fields have 32 bits.
MAX_LIMIT: Final = (1 << 32) - 1


class FilePath(click.Path):
    """click's, but for texts that name no file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        return super().convert(_solid(self, value, param, ctx), param, ctx)


class Text(click.ParamType):  # type: ignore[type-arg]
    """Some text."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See `click.ParamType`."""
        return str(_solid(self, value, param, ctx))


def _solid(
    kind: click.ParamType,  # type: ignore[type-arg]
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    if value == "" or "\0" in str(value):
        kind.fail("at least one character is wanted, and no zero byte", param, ctx)
    return value


class Number(click.IntRange):
    """click's, with a name for people."""

    name = "number"


_PATH: Final = FilePath()
_FOLDER: Final = FilePath(file_okay=False)


class LimitType(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """NAME=VALUE on the command line."""

    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """See `click.ParamType`."""
        if isinstance(value, tuple):
            return value
        name, _sign, number = str(value).partition("=")
        if name not in LIMIT_NAMES or not number.isdecimal() or not 0 < int(number) <= MAX_LIMIT:
            self.fail(
                f"{value}: NAME=VALUE, with a number from 1 to {MAX_LIMIT} and one of "
                f"{', '.join(LIMIT_NAMES)}",
                param,
                ctx,
            )
        return name, int(number)


class Loopback(click.ParamType):  # type: ignore[type-arg]
    """ADDRESS:PORT of this machine alone."""

    name = "ADDRESS:PORT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """See `click.ParamType`."""
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        host = host.strip("[]")
        if host not in ("127.0.0.1", "::1") or not port.isdecimal() or not int(port) < 1 << 16:
            self.fail(f"{value}: 127.0.0.1:PORT or [::1]:PORT, nothing else is served", param, ctx)
        return host, int(port)


def _setting(
    section: str,
    help_text: str,
    type_: Any,
    default: Any = None,
    *,
    multiple: bool = False,
    option: str | None = None,
    in_file: bool = True,
) -> Any:
    """A field of `Settings`. `option` is the long name where it is not the field's."""
    return field(
        default=default,
        metadata={
            "section": section,
            "help": help_text,
            "type": type_,
            "multiple": multiple,
            "option": option,
            "in_file": in_file,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator decides. The fields' order is that of --help and of docs/configuration.md."""

    socket_path: str | None = _setting("Sockets", "UNIX socket where QEMU finds the device.", _PATH)
    fd: int | None = _setting(
        "Sockets", "Listening socket to use instead of --socket-path, an inherited descriptor. "
        "One that systemd passes (socket activation) is found without it.", Number(min=0), in_file=False,
    )  # fmt: skip
    status_socket: str | None = _setting(
        "Sockets", "UNIX socket for pvrdma-ctl: status, objects, log level. Only our user and root may connect.",
        _PATH,
    )  # fmt: skip
    metrics_socket: str | None = _setting(
        "Sockets", "UNIX socket that serves metrics for Prometheus over HTTP. Our user and group may connect.",
        _PATH,
    )  # fmt: skip
    metrics_listen: tuple[str, int] | None = _setting(
        "Sockets", "The same on a TCP port of the loopback interface, to everybody on this host.", Loopback(),
    )  # fmt: skip
    name: str | None = _setting(
        "Device", "Name of the VM; its node GUID follows from it. "
        "[default: the name of the configuration file, or else the socket's path]", Text(),
    )  # fmt: skip
    roce_version: int = _setting(
        "Device", "The one RoCE version of the device's GIDs, 1 or 2; the driver refuses both.",
        Number(1, 2), 2,
    )  # fmt: skip
    doorbells: str = _setting(
        "Device", "Doorbell pages of the guest's processes: memory that is watched, or registers that are trapped.",
        click.Choice(["mapped", "trapped"]), "mapped",
    )  # fmt: skip
    limits: tuple[tuple[str, int], ...] = _setting(
        "Device", f"A limit of the device, clamped to what guests survive: {', '.join(LIMIT_NAMES)}.",
        LimitType(), (), multiple=True, option="limit",
    )  # fmt: skip
    backend: str = _setting(
        "Backend", "Embedded, without RDMA on the host, or a host RDMA device through verbs.",
        click.Choice(["soft", "ibv"]), "soft",
    )  # fmt: skip
    fabric: str | None = _setting(
        "Backend soft", "Folder where the embedded backends of this host meet; their guests reach each other.",
        _FOLDER,
    )  # fmt: skip
    fabric_uids: tuple[int, ...] = _setting(
        "Backend soft", "Another user whose servers may take part in the fabric; ours and root's always may.",
        Number(min=0), (), multiple=True, option="fabric-uid",
    )  # fmt: skip
    ibdev: str | None = _setting(
        "Backend ibv", "Host RDMA device, as ibv_devices lists it.", Text()
    )
    ibport: int = _setting("Backend ibv", "Its port.", Number(1, 255), 1)
    gid_policy: str = _setting(
        "Backend ibv", "Add the guest's addresses to the port's netdev, or only say which are missing.",
        click.Choice([policy.value for policy in Policy]), Policy.CHECK.value,
    )  # fmt: skip
    state_dir: str | None = _setting(
        "Backend ibv", "Folder for what must survive a crash: the addresses that --gid-policy add has added.",
        FilePath(file_okay=False, exists=True),
    )  # fmt: skip
    mad_hub: str | None = _setting(
        "Backend ibv", "UNIX socket of pvrdma-mad-hub, through which the guest's rdma_cm reaches other hosts and VMs.",
        _PATH,
    )  # fmt: skip
    old_mux: str | None = _setting(
        "Backend ibv", "UNIX socket of QEMU's old rdmacm-mux, to use instead of a hub.", _PATH,
    )  # fmt: skip
    log_level: str = _setting(
        "Log", "What to log; pvrdma-ctl log-level changes it in a running server.", click.Choice(list(LEVELS)), "info",
    )  # fmt: skip
    log_format: str = _setting(
        "Log", "JSON lines, or text for people. auto: text on a terminal, JSON elsewhere.",
        click.Choice(FORMATS), "auto",
    )  # fmt: skip


class SettingOption(click.Option):
    """The option of one setting. Attributes: `section` of --help, `key` of the file, or None."""

    section: str
    key: str | None


def make_options() -> list[SettingOption]:
    """The options of the command line, one per setting."""
    options = []
    for setting in fields(Settings):
        meta, key = setting.metadata, setting.name.replace("_", "-")
        option = SettingOption(
            [f"--{meta['option'] or key}", setting.name],
            type=meta["type"],
            # A folder that must exist need not before the configuration is complete.
            default=setting.default or None,
            show_default=bool(setting.default),
            multiple=meta["multiple"],
            metavar=_metavar(meta["type"]),
            help=meta["help"],
        )
        option.section = meta["section"]
        option.key = key if meta["in_file"] else None
        options.append(option)
    return options


def _metavar(type_: Any) -> str | None:
    return "NUMBER" if isinstance(type_, click.IntRange) else None
