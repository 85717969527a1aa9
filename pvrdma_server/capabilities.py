"""What this installation can do, for programs that start servers (`--print-capabilities`)."""

from importlib.util import find_spec
from typing import Any

from pvrdma_server import __version__
from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig, survivable
from pvrdma_server.qemu_args import MIN_QEMU
from pvrdma_server.settings import MAX_LIMIT, make_options


def capabilities() -> dict[str, Any]:
    """JSON values. Keys are added in later versions, none is taken away."""
    defaults = DeviceConfig()
    return {
        "type": "pvrdma",
        "version": __version__,
        "features": sorted(_features()),
        "backends": ["soft", "ibv"] if find_spec("pyverbs") else ["soft"],
        "options": [option.opts[0] for option in make_options()],
        "limits": {
            name: {"default": getattr(defaults, name), "maximum": _largest(name)}
            for name in LIMIT_NAMES
        },
        "minimum-qemu": ".".join(map(str, MIN_QEMU)),
    }


def _largest(name: str) -> int:
    """The most of one limit, with the others at their defaults."""
    wanted: dict[str, Any] = {name: MAX_LIMIT}
    return int(getattr(survivable(DeviceConfig(**wanted)), name))


def _features() -> set[str]:
    features = {"config-file", "socket-path", "fd", "socket-activation", "sd-notify", "watchdog",
                "reload", "check", "qemu-args", "control-socket", "log-level", "fabric",
                "mapped-doorbells", "roce-v1", "roce-v2"}  # fmt: skip
    if find_spec("prometheus_client") and find_spec("h11"):
        features.add("metrics")
    if find_spec("pyverbs"):
        features.add("host-verbs")
    if find_spec("pyroute2"):
        features.add("gid-policy-add")
    return features
