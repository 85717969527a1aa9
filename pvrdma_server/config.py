"""The configuration of one server: every option once, for the command line, the file, --help and the documentation.

`Settings` is the table. Each field is an option (`fabric_uids` is --fabric-uid) and, with the same name, a key of the
TOML file (`fabric-uids`); click's types check the values of both. What is given on the command line counts more than
what is in the file.

Contract: `read_file` and `server_config` raise ConfigError with a message that says which key, which value, and what is
allowed.
"""

import difflib
import hashlib
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import click

from pvrdma_server.backend_soft import SoftConfig
from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig, survivable
from pvrdma_server.errors import ConfigError
from pvrdma_server.gid_sync import Policy
from pvrdma_server.logs import FORMATS, LEVELS
from pvrdma_server.parts import FabricConfig, HostConfig, MetricsConfig, ServerConfig

# The locally administered range, so that no two makers' devices meet; the rest is the VM's name.
_GUID_PREFIX: Final = bytes.fromhex("0250")
_PATH: Final = click.Path()
_FOLDER: Final = click.Path(file_okay=False)
LIMITS: Final = "limits"
# The driver's fields have 32 bits.
MAX_LIMIT: Final = (1 << 32) - 1


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
        "One that systemd passes (socket activation) is found without it.", click.IntRange(min=0), in_file=False,
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
        "[default: the name of the configuration file, or else the socket's path]", click.STRING,
    )  # fmt: skip
    roce_version: int = _setting(
        "Device", "The one RoCE version of the device's GIDs, 1 or 2; the driver refuses both.",
        click.IntRange(1, 2), 2,
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
        click.IntRange(min=0), (), multiple=True, option="fabric-uid",
    )  # fmt: skip
    ibdev: str | None = _setting(
        "Backend ibv", "Host RDMA device, as ibv_devices lists it.", click.STRING
    )
    ibport: int = _setting("Backend ibv", "Its port.", click.IntRange(1, 255), 1)
    gid_policy: str = _setting(
        "Backend ibv", "Add the guest's addresses to the port's netdev, or only say which are missing.",
        click.Choice([policy.value for policy in Policy]), Policy.CHECK.value,
    )  # fmt: skip
    state_dir: str | None = _setting(
        "Backend ibv", "Folder for what must survive a crash: the addresses that --gid-policy add has added.",
        click.Path(file_okay=False, exists=True),
    )  # fmt: skip
    mad_hub: str | None = _setting(
        "Backend ibv", "UNIX socket of pvrdma-mad-hub, through which the guest's rdma_cm reaches other hosts and VMs.",
        _PATH,
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


# --- the file ------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> dict[str, Any]:
    """The settings that the TOML file at `path` gives, by field name, checked one by one.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"configuration file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"configuration file {path} is not TOML: {e}") from e
    options = {option.key: option for option in make_options() if option.key is not None}
    settings: dict[str, Any] = {}
    problems = []
    for key, value in document.items():
        try:
            option = options.get(key)
            if option is None:
                raise _BadValue(key, value, _unknown(key, options.keys(), "key"))
            settings[str(option.name)] = _value_of(option, value)
        except _BadValue as e:
            problems.append(f"{path}: {e}")
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


class _BadValue(Exception):
    """A key's value that it cannot have."""

    def __init__(self, key: str, value: Any, why: str) -> None:
        super().__init__(f"{key} = {_toml_text(value)}: {why}")


def _value_of(option: SettingOption, value: Any) -> Any:
    key = str(option.key)
    if key == LIMITS:
        return _limits_of(value)
    if not option.multiple:
        return _single(option, key, value)
    if not isinstance(value, list):
        raise _BadValue(key, value, f"an array is wanted, of {_wanted(option)[1]}s")
    return tuple(_single(option, key, item) for item in value)


def _limits_of(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, dict):
        raise _BadValue(
            LIMITS, value, f"a table is wanted: [{LIMITS}], lines such as max_qp = 1024"
        )
    limits = []
    for name, number in value.items():
        key = f"{LIMITS}.{name}"
        if name not in LIMIT_NAMES:
            raise _BadValue(key, number, _unknown(name, LIMIT_NAMES, "limit"))
        if type(number) is not int or not 0 < number <= MAX_LIMIT:
            raise _BadValue(key, number, f"an integer from 1 to {MAX_LIMIT} is wanted")
        limits.append((name, number))
    return tuple(limits)


def _single(option: SettingOption, key: str, value: Any) -> Any:
    kind, name = _wanted(option)
    # bool is an int to Python, but not to whoever writes `ibport = true`.
    if type(value) is not kind:
        raise _BadValue(key, value, f"{'an' if name[0] == 'i' else 'a'} {name} is wanted")
    return _converted(option, key, value)


def _converted(option: SettingOption, key: str, value: Any) -> Any:
    try:
        return option.type.convert(value, option, None)
    except click.BadParameter as e:
        raise _BadValue(key, value, e.message.rstrip(".")) from e


def _wanted(option: SettingOption) -> tuple[type, str]:
    return (int, "integer") if isinstance(option.type, click.IntRange) else (str, "string")


def _unknown(name: str, known: Collection[str], what: str) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    near = near or difflib.get_close_matches(name, known, 1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return f"there is no {what} of that name{guess}; there are {', '.join(known)}"


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return "{...}" if isinstance(value, dict) else str(value)


def merge(from_file: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """What the command line gives over what the file gives; limits one by one, everything else as a whole."""
    values = {**from_file, **given}
    both = {**dict(from_file.get(LIMITS, ())), **dict(given.get(LIMITS, ()))}
    return Settings(**{**values, LIMITS: tuple(both.items())})


def needs_restart(before: Settings, after: Settings) -> list[str]:
    """The keys that differ, of those that a running server cannot take over."""
    return [
        setting.name.replace("_", "-")
        for setting in fields(Settings)
        if setting.name != "log_level"
        and getattr(before, setting.name) != getattr(after, setting.name)
    ]


# --- the server's own form -----------------------------------------------------------------------------------------


def node_guid_of(name: str) -> bytes:
    """A node GUID (8 bytes, wire order) that is the same whenever the VM of this name starts."""
    return _GUID_PREFIX + hashlib.sha256(name.encode()).digest()[:6]


def identity_of(settings: Settings, file: Path | None) -> str:
    """The VM's name."""
    stem = file.stem if file is not None else None
    return settings.name or stem or settings.socket_path or f"fd {settings.fd}"


def check_together(settings: Settings) -> None:
    """Check what one setting alone does not show.

    Raises:
        ConfigError: settings that exclude or need one another.
    """
    if settings.socket_path is None and settings.fd is None:
        raise ConfigError("nowhere to listen: give --socket-path PATH, or --fd NUMBER")
    if settings.socket_path is not None and settings.fd is not None:
        raise ConfigError("--socket-path and --fd exclude each other: give one of them")
    if settings.backend == "ibv" and settings.ibdev is None:
        raise ConfigError("--backend ibv needs --ibdev NAME (ibv_devices lists the names)")
    other = "soft" if settings.backend == "ibv" else "ibv"
    for setting in fields(Settings):
        changed = getattr(settings, setting.name) != setting.default
        if changed and setting.metadata["section"] == f"Backend {other}":
            option = setting.metadata["option"] or setting.name.replace("_", "-")
            raise ConfigError(
                f"--{option} is for --backend {other}, this is --backend {settings.backend}: "
                "leave it away, or change the backend"
            )
    if settings.fabric_uids and settings.fabric is None:
        raise ConfigError("--fabric-uid says who may take part in a fabric: give --fabric FOLDER")


def server_config(
    settings: Settings, file: Path | None = None, reload: Callable[[], None] | None = None
) -> ServerConfig:
    """The server's configuration. `reload` is called at SIGHUP.

    Raises:
        ConfigError: settings do not go together.
    """
    check_together(settings)
    identity = identity_of(settings, file)
    limits = dict(settings.limits)
    device = survivable(
        DeviceConfig(settings.roce_version, settings.doorbells == "mapped", **limits)
    )
    own = {record.name for record in fields(SoftConfig)} & limits.keys()
    return ServerConfig(
        socket_path=settings.socket_path,
        listen_fd=settings.fd,
        status_path=settings.status_socket,
        device=device,
        # The embedded backend follows the device's limits where it has some of its own.
        soft=SoftConfig(
            name=identity,
            node_guid=node_guid_of(identity),
            **{name: getattr(device, name) for name in own},
        ),
        host=_host_config(settings, identity),
        fabric=FabricConfig(settings.fabric, settings.fabric_uids) if settings.fabric else None,
        metrics=MetricsConfig(settings.metrics_socket, settings.metrics_listen),
        reload=reload,
    )


def _host_config(settings: Settings, identity: str) -> HostConfig | None:
    if settings.ibdev is None:
        return None
    guid = node_guid_of(identity)
    marker = Path(settings.state_dir) / f"gids-{guid.hex()}.json" if settings.state_dir else None
    policy = Policy(settings.gid_policy)
    return HostConfig(settings.ibdev, settings.ibport, guid, policy, marker, settings.mad_hub)
