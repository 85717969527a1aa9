"""Pairs of programs: the server first, the client once the server listens. Both ends may be one guest."""

import re
import shlex
from typing import NamedTuple

import pytest
from pvrdma_lab import Guest, LabError
from pvrdma_lab.programs import listens_on_port, run_pair

PORT_PERFTEST = 18515
PORT_UCX = 13337
PORT_LIBFABRIC = 47592
CM_LISTENS = "rdma resource show cm_id | grep -q LISTEN"
# perftest -R connects twice: by the first connection, which CM_LISTENS waits for, both ends say that they go on, and
# then the server listens for the second while its client connects already. A client that comes too early means to try
# again (rdma_cm_client_connection), but ends by SIGSEGV when it does (perftest 4.5). Reason 8 of a REJ: nobody listens.
_CM_TOO_EARLY = re.compile(r"client: status 139: .*RDMA_CM_EVENT_REJECTED; error: 8\.", re.S)
_CM_TRIES = 4


class Kind(NamedTuple):
    """A kind of lab: how many guests, and the servers' --doorbells."""

    guests: int
    doorbells: str


KINDS = {"mapped": Kind(1, "mapped"), "trapped": Kind(1, "trapped"), "two": Kind(2, "mapped")}


def labs(*kinds: str) -> pytest.MarkDecorator:
    """Runs a test, or a module's, in a lab of each kind (of KINDS)."""
    return pytest.mark.parametrize("lab", kinds, indirect=True, scope="module")


class Ends(NamedTuple):
    """The guests of a server and its client; the same guest twice, or two guests."""

    server: Guest
    client: Guest

    @property
    def same(self) -> bool:
        return self.server is self.client

    @property
    def ways(self) -> "list[Ends]":
        """Both directions between two guests; the only one within a guest."""
        return [self] if self.same else [self, Ends(self.client, self.server)]


def pair(
    ends: Ends, server: str, client: str, listens: str, timeout_s: float = 60.0
) -> tuple[str, str]:
    """Runs both; both must end well. Returns what they printed, the server's first."""
    return run_pair(client, ends.server, ends.client, (server, client), listens, timeout_s)


def perftest_pair(ends: Ends, words: str, timeout_s: float = 60.0) -> str:
    """Runs a program of perftest; returns what the client printed."""
    words = f"{words} -F -x 1"
    listens = listens_on_port(PORT_PERFTEST)
    return pair(ends, words, f"{words} {ends.server.ip}", listens, timeout_s)[1]


def perftest_cm_pair(ends: Ends, words: str, timeout_s: float = 60.0) -> str:
    """Runs a program of perftest that connects by rdma_cm; returns what the client printed."""
    words = f"{words} -F -R"
    client = f"{words} {ends.server.ip}"
    for _ in range(_CM_TRIES - 1):
        try:
            return pair(ends, words, client, CM_LISTENS, timeout_s)[1]
        except LabError as error:
            if not _CM_TOO_EARLY.search(str(error)):
                raise
            print(f"{words}: the client came before its server listened; again")
    return pair(ends, words, client, CM_LISTENS, timeout_s)[1]


def cm_pair(ends: Ends, words: str, client: str = "", timeout_s: float = 60.0) -> str:
    """Runs a program of librdmacm, the client with -s and the server's address; returns what it printed."""
    client = f"{client or words} -s {ends.server.ip}"
    return pair(ends, words, client, CM_LISTENS, timeout_s)[1]


def ucx_pair(ends: Ends, transports: str, words: str, timeout_s: float = 90.0) -> str:
    """Runs ucx_perftest; returns what the client printed.

    Debian's is built with MPI, and without a terminal takes itself for an MPI job.
    """
    settings = f"UCX_TLS={transports} UCX_NET_DEVICES=vmw_pvrdma0:1 UCX_WARN_UNUSED_ENV_VARS=n"

    def on_terminal(command: str) -> str:
        return f"{settings} script -qec {shlex.quote(command)} /dev/null </dev/null"

    server = f"ucx_perftest {words}"
    client = f"{server} {ends.server.ip}"
    listens = listens_on_port(PORT_UCX)
    return pair(ends, on_terminal(server), on_terminal(client), listens, timeout_s)[1]


def libfabric_pair(ends: Ends, words: str, settings: str = "", timeout_s: float = 60.0) -> str:
    """Runs fi_pingpong; returns what the client printed."""
    server = f"{settings} fi_pingpong {words}".lstrip()
    client = f"{server} {ends.server.ip}"
    return pair(ends, server, client, listens_on_port(PORT_LIBFABRIC), timeout_s)[1]
