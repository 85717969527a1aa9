"""The configuration of one server, out of a TOML file and the command line, which counts more; see settings.py.

Contract: `read_file` and `server_config` raise ConfigError with a message that says which key, which value, and what is
allowed.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click

from pvrdma_server.backend_soft import SoftConfig
from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig, survivable
from pvrdma_server.errors import ConfigError
from pvrdma_server.gid_sync import Policy
from pvrdma_server.parts import FabricConfig, HostConfig, MetricsConfig, RelayConfig, ServerConfig
from pvrdma_server.settings import MAX_LIMIT, SettingOption, Settings, make_options

# The locally administered range, so that no two makers' devices meet; the rest is the VM's name.
_GUID_PREFIX: Final = bytes.fromhex("0250")
LIMITS: Final = "limits"


# --- the file ------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> dict[str, Any]:
    """The settings that the TOML file at `path` gives, by field name, checked one by one.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    import tomllib  # a server without a file starts sooner

    try:
        document = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(
            f"configuration file {path}: {e.strerror}; it must be a file that the server's user may read"
        ) from e
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
            problems += [f"{path}: {problem}" for problem in e.problems]
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


class _BadValue(Exception):
    """A key's value that it cannot have, or several values of its array or table."""

    def __init__(self, key: str, value: Any, why: str) -> None:
        super().__init__(key)
        self.problems = [f"{key} = {_toml_text(value)}: {why}"]


def _all_of(key: str, convert: Callable[[Any], Any], items: Iterable[Any]) -> tuple[Any, ...]:
    """Every item converted; the problems of all of them, if there are any."""
    good, bad = [], _BadValue(key, items, "")
    bad.problems.clear()
    for item in items:
        try:
            good.append(convert(item))
        except _BadValue as e:
            bad.problems += e.problems
    if bad.problems:
        raise bad
    return tuple(good)


def _value_of(option: SettingOption, value: Any) -> Any:
    key = str(option.key)
    if key == LIMITS:
        return _limits_of(value)
    if not option.multiple:
        return _single(option, key, value)
    if not isinstance(value, list):
        raise _BadValue(key, value, f"an array is wanted, of {_wanted(option)[1]}s")
    return _all_of(key, lambda item: _single(option, key, item), value)


def _limits_of(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, dict):
        raise _BadValue(
            LIMITS, value, f"a table is wanted: [{LIMITS}], lines such as max_qp = 1024"
        )
    return _all_of(LIMITS, _limit, value.items())


def _limit(item: tuple[str, Any]) -> tuple[str, int]:
    name, number = item
    key = f"{LIMITS}.{name}"
    if name not in LIMIT_NAMES:
        raise _BadValue(key, number, _unknown(name, LIMIT_NAMES, "limit"))
    if type(number) is not int or not 0 < number <= MAX_LIMIT:
        raise _BadValue(key, number, f"an integer from 1 to {MAX_LIMIT} is wanted")
    return name, number


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
    import difflib

    near = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    near = near or difflib.get_close_matches(name, known, 1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return f"there is no {what} of that name{guess}; there are {', '.join(known)}"


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
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
    if settings.mad_hub is not None and settings.old_mux is not None:
        raise ConfigError("--mad-hub and --old-mux exclude each other: give one of them")
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
    relay = RelayConfig(settings.mad_hub, settings.old_mux)
    return HostConfig(settings.ibdev, settings.ibport, guid, policy, marker, relay)
