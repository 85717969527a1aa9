"""Where everything that is fetched or built lies. Standard library only: bootstrap runs before the virtualenv."""

import hashlib
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST_FILES = REPOSITORY / "scripts" / "guest"

# sun_path is 108 bytes with its terminating zero.
SOCKET_PATH_MAX_BYTES = 107
# The longest name below a run folder: "/<lab>/<guest>/vfio.sock".
_LONGEST_SOCKET_NAME = "/123456789012345678901234/a/status.sock.x"


def cache_folder() -> Path:
    """Returns the cache folder: PVRDMA_CACHE, else pvrdma-server below the user's cache."""
    chosen = os.environ.get("PVRDMA_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "pvrdma-server"


def log_folder() -> Path:
    return cache_folder() / "logs"


def run_folder() -> Path:
    """Returns the folder of all labs' run folders, short enough for UNIX sockets in them."""
    chosen = cache_folder() / "run"
    if len(f"{chosen}{_LONGEST_SOCKET_NAME}".encode()) <= SOCKET_PATH_MAX_BYTES:
        return chosen
    digest = hashlib.sha256(str(chosen).encode()).hexdigest()[:8]
    return Path(f"/tmp/pvrdma-lab-{os.getuid()}-{digest}")


def key(*parts: str | bytes) -> str:
    """Returns a short content hash: the part of a cache entry's name that says what it was made of."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:12]
