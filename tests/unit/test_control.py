"""The control socket: what it answers, to whom, and that nobody who misuses it holds anything up."""

import json
import os
import select
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.errors import ConfigError
from pvrdma_server.status import (
    BACKLOG,
    EXCHANGE_TIMEOUT_S,
    MAX_CLIENTS,
    MAX_REQUEST_BYTES,
    RefusedRequest,
    answer,
    answers,
    ask,
    listen_unix,
    read_status,
    serve_control,
)

LONG = {"text": "x" * (8 << 20)}


def refuse(_: dict[str, Any]) -> dict[str, Any]:
    raise RefusedRequest("not today")


COMMANDS = {
    "status": lambda _: {"state": "active"},
    "echo": lambda request: {"request": request},
    "long": lambda _: LONG,
    "refuse": refuse,
}


class Running:
    """`serve_control` in a thread of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()
        assert self._ready.wait(30)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, self.path, COMMANDS)
                self._ready.set()

    def stop(self) -> None:
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    running = Running(str(tmp_path / "control"))
    yield running.path
    running.stop()
    assert not os.path.exists(running.path)


def connect(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    # Blocking: one with a timeout fails at once where others wait to be served.
    client.connect(path)
    client.settimeout(60)
    return client


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


def test_a_request_and_its_reply(path: str) -> None:
    assert ask(path, "echo", level=3) == {"request": {"command": "echo", "level": 3}}
    assert read_status(path) == {"state": "active"}


@pytest.mark.parametrize("end", [True, False])
def test_who_says_nothing_gets_the_status(path: str, end: bool) -> None:
    with connect(path) as client:
        if end:
            client.shutdown(socket.SHUT_WR)
        assert json.loads(read_all(client)) == {"state": "active"}


def test_a_request_in_pieces_and_without_an_end_of_line(path: str) -> None:
    with connect(path) as client:
        for piece in (b'{"comm', b'and": "echo"', b"}"):
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        assert json.loads(read_all(client)) == {"request": {"command": "echo"}}


def test_a_long_reply_arrives_whole(path: str) -> None:
    assert ask(path, "long") == LONG


def test_only_the_user_may_connect(path: str) -> None:
    mode = os.stat(path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_the_mode_is_not_what_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with listen_unix(str(tmp_path / "s"), 0o660, "--metrics-socket"):
            assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o660
    finally:
        os.umask(before)


def test_a_refusal_is_told(path: str) -> None:
    with pytest.raises(ConfigError, match="refuses refuse: not today"):
        ask(path, "refuse")
    with pytest.raises(ConfigError, match='"command" must be one of: echo, long, refuse, status'):
        ask(path, "stop")


def test_who_does_not_read_holds_up_nobody_and_is_dropped(path: str) -> None:
    """More of them than are served at once: the others are served when the first are dropped."""
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(path)) for _ in range(MAX_CLIENTS)]
        for client in idle:
            client.sendall(b'{"command": "long"}\n')
        assert read_status(path) == {"state": "active"}
        for client in idle:
            dropped = select.poll()
            dropped.register(client, select.POLLHUP)
            assert dropped.poll(60_000)
            assert len(read_all(client)) < len(LONG["text"])


def test_who_never_ends_a_request_is_dropped(path: str) -> None:
    with connect(path) as client:
        client.sendall(b'{"command": ')
        assert read_all(client) == b""


def test_who_goes_away_is_forgotten(path: str) -> None:
    for _ in range(2 * MAX_CLIENTS):
        with connect(path) as client:
            client.sendall(b'{"command": "long"}\n')
    assert read_status(path) == {"state": "active"}


def test_more_askers_than_the_backlog_holds_are_all_answered(path: str) -> None:
    replies: list[dict[str, Any]] = []
    askers = [
        threading.Thread(target=lambda: replies.append(read_status(path)))
        for _ in range(MAX_CLIENTS + 2 * BACKLOG)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert replies == [{"state": "active"}] * len(askers)


def test_a_request_that_is_too_long_is_refused(path: str) -> None:
    with connect(path) as client:
        client.sendall(b" " * (MAX_REQUEST_BYTES + 1))
        assert "longer than" in json.loads(read_all(client))["error"]


@given(st.binary(max_size=100) | st.text(max_size=50).map(str.encode))
def test_no_request_raises(line: bytes) -> None:
    reply = answer(line, COMMANDS)
    assert "error" in reply or not line.strip()


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_raises(request: Any) -> None:
    for value in (request, {"command": request}):
        assert answer(json.dumps(value).encode(), COMMANDS)


def test_deep_json_is_refused() -> None:
    assert "not JSON" in answer(b"[" * MAX_REQUEST_BYTES, COMMANDS)["error"]


# --- the asking side -------------------------------------------------------------------------------------------------


def test_errors_of_the_asking_side_say_what_to_do(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with pytest.raises(ConfigError, match="is the server running, with this --status-socket"):
        ask(path, "status")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(path)
    with pytest.raises(ConfigError, match="left over from a server that ended"):
        ask(path, "status")


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH", b"[]", b""])
def test_what_is_no_server_is_said_so(tmp_path: Path, reply: bytes) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError, match="is no pvrdma-server"):
            ask(path, "status")
        thread.join(30)


def test_a_path_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another --status-socket"):
        listen_unix(str(tmp_path / "none" / "s"), 0o600, "--status-socket")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="Address already in use"):
        listen_unix(str(tmp_path / "file"), 0o600, "--status-socket")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="not longer than 107 bytes"):
        listen_unix(str(tmp_path / ("x" * 120)), 0o600, "--status-socket")


def test_a_live_servers_socket_is_not_taken_and_a_stale_one_is(path: str) -> None:
    with pytest.raises(ConfigError, match="a server listens there; stop it, or choose another"):
        listen_unix(path, 0o600, "--status-socket")
    assert read_status(path) == {"state": "active"}
    stale = f"{path}.stale"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(stale)
    with listen_unix(stale, 0o600, "--status-socket"):
        assert answers(stale)


def test_the_exchange_has_a_limit_that_the_asking_side_outlives() -> None:
    assert 0 < EXCHANGE_TIMEOUT_S < 60
