"""Pairs of programs in one guest: the server first, the client once the server listens."""

import shlex

from pvrdma_lab import Guest
from pvrdma_lab.programs import run_pair

PORT_PERFTEST = 18515
PORT_UCX = 13337
PORT_LIBFABRIC = 47592
CM_LISTENS = "rdma resource show cm_id | grep -q LISTEN"


def tcp_listens(port: int) -> str:
    """A shell condition: somebody listens on the TCP port."""
    return f"grep -qs ':{port:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6"


def pair(
    guest: Guest, server: str, client: str, listens: str, timeout_s: float = 60.0
) -> tuple[str, str]:
    """Runs both in one guest; both must end well. Returns what they printed, the server's first."""
    return run_pair(client, guest, guest, (server, client), listens, timeout_s)


def perftest_pair(guest: Guest, words: str, timeout_s: float = 60.0) -> str:
    """Runs a program of perftest; returns what the client printed."""
    words = f"{words} -F -x 1"
    listens = tcp_listens(PORT_PERFTEST)
    return pair(guest, words, f"{words} {guest.ip}", listens, timeout_s)[1]


def cm_pair(guest: Guest, words: str, client: str = "", timeout_s: float = 60.0) -> str:
    """Runs a program of librdmacm, the client with -s and the server's address; returns what it printed."""
    client = f"{client or words} -s {guest.ip}"
    return pair(guest, words, client, CM_LISTENS, timeout_s)[1]


def ucx_pair(guest: Guest, transports: str, words: str, timeout_s: float = 90.0) -> str:
    """Runs ucx_perftest; returns what the client printed.

    Debian's is built with MPI, and without a terminal takes itself for an MPI job.
    """
    settings = f"UCX_TLS={transports} UCX_NET_DEVICES=vmw_pvrdma0:1 UCX_WARN_UNUSED_ENV_VARS=n"

    def on_terminal(command: str) -> str:
        return f"{settings} script -qec {shlex.quote(command)} /dev/null </dev/null"

    server = f"ucx_perftest {words}"
    client = f"{server} {guest.ip}"
    listens = tcp_listens(PORT_UCX)
    return pair(guest, on_terminal(server), on_terminal(client), listens, timeout_s)[1]


def libfabric_pair(guest: Guest, words: str, settings: str = "", timeout_s: float = 60.0) -> str:
    """Runs fi_pingpong; returns what the client printed."""
    server = f"{settings} fi_pingpong {words}".lstrip()
    return pair(guest, server, f"{server} {guest.ip}", tcp_listens(PORT_LIBFABRIC), timeout_s)[1]
