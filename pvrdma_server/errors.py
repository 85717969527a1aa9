"""The exceptions of this package, and who may see which.

Contract: a `GuestError` says that the guest did something illegal. It is caught in exactly three places (a command, a
work request, a register access), counted, warned of once per object and kind, and never ends the server. A
`BackendError` carries the errno of the verb that failed. A `TransportError` ends the vfio-user session, not the server.
Anything else is our bug: it propagates until the process exits non-zero.
"""

import errno as _errno


class PvrdmaError(Exception):
    """Base of everything this package raises on purpose."""


class GuestError(PvrdmaError):
    """The guest did something illegal. Never ends the server.

    Attributes:
        kind: a short constant name for rate-limited logs and counters.
    """

    kind = "guest_error"


class BadGuestAddress(GuestError):
    """A guest address (or part of the range behind it) is not guest RAM that the device may use now."""

    kind = "bad_guest_address"

    def __init__(self, address: int, length_bytes: int, why: str) -> None:
        super().__init__(f"guest address {address:#x} length {length_bytes:#x}: {why}")
        self.address = address
        self.length_bytes = length_bytes


class BadRingIndex(GuestError):
    """A ring's producer or consumer index has bits that no valid index has."""

    kind = "bad_ring_index"


class BadHandle(GuestError):
    """No object with that handle, or not one the caller may use."""

    kind = "bad_handle"


class TableFullError(GuestError):
    """The guest has as many objects of a kind as the device advertises."""

    kind = "table_full"


class BadWqe(GuestError):
    """A work queue entry cannot be executed.

    Attributes:
        status: the `WcStatus` its completion must carry.
    """

    kind = "bad_wqe"

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class CommandError(GuestError):
    """A command is refused.

    Attributes:
        errno: positive errno that goes to the ERR register.
    """

    kind = "bad_command"

    def __init__(self, errno: int, why: str) -> None:
        super().__init__(f"{_errno.errorcode.get(errno, errno)}: {why}")
        self.errno = errno


class BackendError(PvrdmaError):
    """The backend could not do what was asked.

    Attributes:
        errno: positive errno of the verb.
        verb: the verb that failed, such as "ibv_reg_mr".
    """

    def __init__(self, errno: int, verb: str, why: str = "") -> None:
        text = f"{verb}: {_errno.errorcode.get(errno, errno)}"
        super().__init__(f"{text}: {why}" if why else text)
        self.errno = errno
        self.verb = verb


class TransportError(PvrdmaError):
    """libvfio-user or its socket failed: the session ends, the server attaches again."""


class ConfigError(PvrdmaError):
    """The configuration or the host does not allow the server to start; the message says what to change."""
