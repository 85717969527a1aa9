"""What one server is made of: its configuration, and its optional parts, imported only where they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pvrdma_server.backend import HostBackend
from pvrdma_server.backend_soft import ShmFabric, SoftConfig
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.errors import ConfigError
from pvrdma_server.gid_sync import GidSync, Policy, Pyroute2Netlink
from pvrdma_server.gsi import Gsi
from pvrdma_server.host_gids import GidTable
from pvrdma_server.mad_old_mux import OldMuxDialect
from pvrdma_server.mad_relay import MadRelay
from pvrdma_server.supervision import Reload


class RelayConfig(NamedTuple):
    """Who relays the guest's connection management: the socket of a MAD hub, or of an rdmacm-mux, or neither."""

    mad_hub: str | None = None
    old_mux: str | None = None


class HostConfig(NamedTuple):
    """The host RDMA device to use instead of the embedded backend.

    Attributes:
        device: its name, as `ibv_devices` lists it.
        port: its port, from 1.
        node_guid: the guest device's, 8 bytes in wire order.
        gid_policy: whether the port's netdev may be given the guest's addresses.
        gid_marker: file that names the addresses given, for the start after a crash.
        relay: who relays the guest's connection management.
    """

    device: str
    port: int
    node_guid: bytes
    gid_policy: Policy
    gid_marker: Path | None
    relay: RelayConfig = RelayConfig()


class FabricConfig(NamedTuple):
    """Where the embedded backends of one host meet: a folder, and users besides ours whose servers may."""

    folder: str
    uids: tuple[int, ...] = ()


class MetricsConfig(NamedTuple):
    """Where metrics are served: a UNIX socket, a loopback address and port, both or neither."""

    socket_path: str | None = None
    listen: tuple[str, int] | None = None


class ServerConfig(NamedTuple):
    """One server. `listen_fd` is a listening socket to use instead of `socket_path` (socket activation).

    `host` chooses the backend over host verbs; None is the embedded one, which reaches the guests of other servers
    over `fabric`. `reload` is called at SIGHUP; without it SIGHUP ends the server.
    """

    socket_path: str | None
    listen_fd: int | None
    status_path: str | None
    device: DeviceConfig
    soft: SoftConfig
    host: HostConfig | None = None
    fabric: FabricConfig | None = None
    metrics: MetricsConfig = MetricsConfig()
    reload: Reload | None = None


def open_host(config: HostConfig, gsi: Gsi) -> HostBackend:
    """The backend over the host's RDMA device, with `gsi` for the guest's QP1.

    Raises:
        ConfigError: pyverbs or the device is missing.
    """
    try:
        from pvrdma_server.backend_ibv import IbvBackend, IbvConfig
    except ImportError as e:
        raise ConfigError(
            f"--backend ibv needs pyverbs 60 or newer (Debian: python3-pyverbs): {e}"
        ) from e
    netlink = Pyroute2Netlink() if config.gid_policy is Policy.ADD else None
    keeper = GidSync(config.gid_policy, config.gid_marker, netlink)
    return IbvBackend(IbvConfig(config.device, config.port, config.node_guid), keeper, gsi)


def open_relay(config: ServerConfig) -> MadRelay | None:
    """The guest's way to the host's MAD hub, if there is one."""
    host, name = config.host, config.soft.name
    if host is None or not any(host.relay):
        return None
    if host.relay.mad_hub is not None:
        return MadRelay(host.relay.mad_hub, name)
    assert host.relay.old_mux is not None
    table = GidTable(Path("/sys/class/infiniband") / host.device / "ports" / str(host.port))
    gid_type = config.device.roce_version
    return MadRelay(
        host.relay.old_mux, name, lambda: OldMuxDialect(lambda gid: table.index_of(gid, gid_type))
    )


def open_fabric(config: ServerConfig) -> ShmFabric | None:
    """Our place in the fabric, if there is one.

    Raises:
        ConfigError: the folder cannot be used.
    """
    if config.fabric is None:
        return None
    return ShmFabric(config.fabric.folder, config.soft.name, uids=config.fabric.uids)


def metrics_server() -> Callable[..., Any]:
    """What serves metrics.

    Raises:
        ConfigError: the packages for it are missing.
    """
    try:
        from pvrdma_server.metrics import serve_metrics
    except ImportError as e:
        raise ConfigError(
            f"--metrics-socket and --metrics-listen need prometheus_client and h11 ({e}): "
            "install pvrdma-server[metrics], or python3-prometheus-client and python3-h11"
        ) from e
    return serve_metrics
