"""`--check`: whether this configuration can work on this host. One finding per thing, with one line of advice.

Contract: looks, and changes nothing; a running server of the same VM is not disturbed. Everything about the host comes
through `Host`, whose root a test can move.
"""

import importlib
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pvrdma_server import qemu_args
from pvrdma_server.config import server_config
from pvrdma_server.errors import ConfigError
from pvrdma_server.settings import Settings
from pvrdma_server.status import answers

# sockaddr_un's path, and its end.
_MAX_SOCKET_PATH: Final = 107
# A region of 1 GiB whose pages are all scattered takes a mapping for each of its 262144 pages.
_ENOUGH_MAPPINGS: Final = 1 << 20
_ENOUGH_FDS: Final = 1024
# Source: linux/capability.h.
_CAP_NET_ADMIN: Final = 12
_ACTIVE: Final = "ACTIVE"


class Finding(NamedTuple):
    """One line. `advice` is empty where all is well; `is_error` when the server would not work."""

    subject: str
    text: str
    advice: str = ""
    is_error: bool = False

    def __str__(self) -> str:
        word = "error" if self.is_error else "warning" if self.advice else "ok"
        advice = f"; {self.advice}" if self.advice else ""
        return f"{word:<8}{self.subject}: {self.text}{advice}"


def _good(subject: str, text: str) -> Finding:
    return Finding(subject, text)


def _warning(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, text, advice)


def _error(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, text, advice, is_error=True)


class Host:
    """What is looked at of the host.

    Args:
        root: where /proc, /sys and /dev are.
        load: imports a module; raises ImportError.
        ask: what a program prints; raises OSError.
        find_qemu: the path of QEMU; raises ConfigError.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        load: Callable[[str], object] = importlib.import_module,
        ask: qemu_args.Run = qemu_args.run,
        find_qemu: Callable[[], str] = qemu_args.find_qemu,
    ) -> None:
        self.root = root
        self.load = load
        self.ask = ask
        self.find_qemu = find_qemu

    def read(self, path: str) -> str | None:
        """A file's content without its end of line, or None if it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.root / path).exists()

    def names(self, path: str) -> list[str]:
        """What is in a folder; nothing if there is none."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def limit(self, which: int) -> int:
        """A limit of resources in force; -1 for none."""
        return resource.getrlimit(which)[0]


def check_server(
    settings: Settings, file: Path | None = None, host: Host | None = None
) -> list[Finding]:
    """Everything that can be said before the server starts, in the order in which it would matter."""
    host = host or Host()
    return [
        *_configuration(settings, file),
        *_libraries(settings, host),
        *_sockets(settings),
        *_limits(settings, host),
        *(_host_device(settings, host) if settings.backend == "ibv" else ()),
        *_qemu(host),
    ]


def _configuration(settings: Settings, file: Path | None) -> Iterator[Finding]:
    subject = f"configuration {file}" if file is not None else "configuration"
    try:
        config = server_config(settings, file)
    except ConfigError as e:
        yield _error(subject, str(e), "see docs/configuration.md")
        return
    yield _good(subject, f"valid, for the VM {config.soft.name}")
    for name, wanted in settings.limits:
        got = getattr(config.device, name)
        if got != wanted:
            yield _warning(
                f"limit {name}",
                f"{wanted} becomes {got}",
                "guests' drivers do not survive the former",
            )


# --- libraries -----------------------------------------------------------------------------------------------------


def _libraries(settings: Settings, host: Host) -> Iterator[Finding]:
    yield _library(
        host, "pvrdma_server.vfio_user", "libvfio-user",
        "install pvrdma-server again: its C extension or the library under it is missing",
    )  # fmt: skip
    if settings.metrics_socket or settings.metrics_listen:
        for name in ("prometheus_client", "h11"):
            yield _library(host, name, name, "install pvrdma-server[metrics]")
    if settings.backend == "ibv":
        advice = "install python3-pyverbs 60 or newer for the Python that runs the server"
        yield _library(host, "pvrdma_server.backend_ibv", "pyverbs", advice)
    if settings.gid_policy == "add":
        advice = "install python3-pyroute2, or pvrdma-server[ibv]"
        yield _library(host, "pyroute2", "pyroute2", advice)


def _library(host: Host, module: str, name: str, advice: str) -> Finding:
    try:
        host.load(module)
    except ImportError as e:
        return _error(name, str(e), advice)
    return _good(name, "found")


# --- sockets and folders -------------------------------------------------------------------------------------------


def _sockets(settings: Settings) -> Iterator[Finding]:
    for option, path in (
        ("socket-path", settings.socket_path),
        ("status-socket", settings.status_socket),
        ("metrics-socket", settings.metrics_socket),
    ):
        if path is not None:
            yield _socket(option, path)
    if settings.fabric is not None:
        yield _fabric(Path(settings.fabric))
    if settings.state_dir is not None:
        yield _folder("state-dir", Path(settings.state_dir))
    if settings.mad_hub is not None:
        yield _hub("mad-hub", settings.mad_hub, "pvrdma-mad-hub")
    if settings.old_mux is not None:
        yield _hub("old-mux", settings.old_mux, "rdmacm-mux")


def _socket(option: str, path: str) -> Finding:
    subject = f"{option} {path}"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        return _error(subject, f"longer than {_MAX_SOCKET_PATH} bytes", "choose a shorter path")
    there = Path(path)
    if there.exists() and not there.is_socket():
        return _error(subject, "there is a file that is no socket", "remove it, or choose another")
    if there.is_socket() and answers(path):
        return _warning(subject, "a server listens there", "stop it before this one is started")
    found = _folder(option, there.absolute().parent)
    return found if found.is_error else _good(subject, "can be made")


def _hub(option: str, path: str, program: str) -> Finding:
    if answers(path):
        return _good(f"{option} {path}", "a hub listens there")
    advice = f"start {program}: until it is there, rdma_cm connects within this VM only"
    return _warning(f"{option} {path}", "nobody listens there", advice)


def _fabric(folder: Path) -> Finding:
    found = _folder("fabric", folder, may_be_made=True)
    if found.is_error or not folder.exists() or not folder.stat().st_mode & stat.S_IWOTH:
        return found
    return _error(found.subject, "writable for everybody", f"chmod o-w {folder}, or name another")


def _folder(option: str, folder: Path, *, may_be_made: bool = False) -> Finding:
    subject = f"{option} folder {folder}"
    if not folder.exists() and may_be_made:
        parent = _folder(option, folder.absolute().parent)
        return parent if parent.is_error else _good(subject, "can be made")
    if not folder.is_dir():
        return _error(subject, "there is no such folder", f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return _error(
            subject, "not writable", "give it to the server's user (RuntimeDirectory= in a unit)"
        )
    return _good(subject, "writable")


# --- limits of resources -------------------------------------------------------------------------------------------


def _limits(settings: Settings, host: Host) -> Iterator[Finding]:
    fds = host.limit(resource.RLIMIT_NOFILE)
    if 0 <= fds < _ENOUGH_FDS:
        yield _warning(
            "RLIMIT_NOFILE",
            str(fds),
            f"raise it to {_ENOUGH_FDS}: LimitNOFILE= in the unit, or ulimit -n",
        )
    else:
        yield _good("RLIMIT_NOFILE", str(fds))
    if settings.backend != "ibv":
        return
    locked = host.limit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield _good("RLIMIT_MEMLOCK", "unlimited")
    else:
        advice = "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited: regions are pinned"
        yield _warning("RLIMIT_MEMLOCK", f"{locked} bytes", advice)
    mappings = host.read("proc/sys/vm/max_map_count")
    if mappings is None or not mappings.isdecimal():
        yield _warning("vm.max_map_count", "cannot be read", "look with sysctl vm.max_map_count")
    elif int(mappings) < _ENOUGH_MAPPINGS:
        advice = (
            f"sysctl -w vm.max_map_count={_ENOUGH_MAPPINGS}, or huge pages for the guest's RAM: a "
            "scattered region takes a mapping for each of its pieces"
        )
        yield _warning("vm.max_map_count", mappings, advice)
    else:
        yield _good("vm.max_map_count", mappings)


# --- the host's RDMA device ----------------------------------------------------------------------------------------


def _host_device(settings: Settings, host: Host) -> Iterator[Finding]:
    if host.has("sys/module/ib_uverbs"):
        yield _good("module ib_uverbs", "loaded")
    else:
        yield _error("module ib_uverbs", "not loaded", "modprobe ib_uverbs")
    name, devices = settings.ibdev, host.names("sys/class/infiniband")
    if name not in devices:
        advice = f"there are: {', '.join(devices)}" if devices else (
            "there are none: load the HCA's driver (mlx5_ib), or rdma_rxe and rdma link add"
        )  # fmt: skip
        yield _error(f"device {name}", "not there", advice)
        return
    yield _good(f"device {name}", "there")
    yield _access(str(name), host)
    port = f"sys/class/infiniband/{name}/ports/{settings.ibport}"
    if not host.has(port):
        ports = ", ".join(host.names(f"sys/class/infiniband/{name}/ports"))
        yield _error(f"port {settings.ibport} of {name}", "not there", f"ibport: there are {ports}")
        return
    yield from _port(f"port {settings.ibport} of {name}", port, host)
    yield from _gids(settings, port, host)


def _access(device: str, host: Host) -> Finding:
    for node in host.names("sys/class/infiniband_verbs"):
        if host.read(f"sys/class/infiniband_verbs/{node}/ibdev") == device:
            path = host.root / "dev/infiniband" / node
            if os.access(path, os.R_OK | os.W_OK):
                return _good(f"/dev/infiniband/{node}", "may be opened")
            advice = "the server's user must be in the group of the node (rdma), and a unit's DeviceAllow= must name it"
            return _error(f"/dev/infiniband/{node}", "may not be opened", advice)
    return _error(f"verbs of {device}", "it has no uverbs node", "modprobe ib_uverbs")


def _port(subject: str, port: str, host: Host) -> Iterator[Finding]:
    layer = host.read(f"{port}/link_layer")
    if layer != "Ethernet":
        yield _error(
            subject, f"its link layer is {layer}", "a RoCE port is needed: PVRDMA has GIDs, no LIDs"
        )
    state = (host.read(f"{port}/state") or "unknown").rpartition(" ")[2]
    if state == _ACTIVE:
        yield _good(subject, "active")
    else:
        yield _warning(
            subject, f"its state is {state}", "ip link set its netdev up, and look at the cable"
        )


def _gids(settings: Settings, port: str, host: Host) -> Iterator[Finding]:
    wanted = f"RoCE v{settings.roce_version}"
    found = 0
    for index in host.names(f"{port}/gid_attrs/types"):
        kind = host.read(f"{port}/gid_attrs/types/{index}") or ""
        found += (kind == "IB/RoCE v1") if settings.roce_version == 1 else (kind == wanted)
    subject = f"GIDs of {settings.ibdev}"
    if found:
        yield _good(subject, f"{found} of type {wanted}")
    else:
        yield _warning(
            subject, f"none of type {wanted}", "give its netdev an address and set it up"
        )
    if settings.gid_policy == "add":
        yield _net_admin(host)


def _net_admin(host: Host) -> Finding:
    status = host.read("proc/self/status") or ""
    bits = next((ln.split()[1] for ln in status.splitlines() if ln.startswith("CapEff:")), "0")
    if int(bits, 16) >> _CAP_NET_ADMIN & 1:
        return _good("CAP_NET_ADMIN", "there")
    advice = "AmbientCapabilities=CAP_NET_ADMIN in the unit, or gid-policy check and add addresses yourself"
    return _error("CAP_NET_ADMIN", "missing, and gid-policy add needs it", advice)


# --- QEMU ----------------------------------------------------------------------------------------------------------


def _qemu(host: Host) -> Iterator[Finding]:
    try:
        program = host.find_qemu()
    except ConfigError:
        names = ", ".join(qemu_args.PROGRAMS)
        yield _warning(
            "QEMU", f"none of {names} found", "QEMU 10.1 or newer must attach the device"
        )
        return
    try:
        version = qemu_args.qemu_version(program, host.ask)
        qemu_args.check_client(program, host.ask)
    except ConfigError as e:
        # Without its own advice, which is about qemu-args.
        why = str(e).partition(";")[0]
        yield _error("QEMU", why, "install QEMU 10.1 or newer with vfio-user-pci")
        return
    yield _good("QEMU", f"{program} is {qemu_args.version_text(version)}")
