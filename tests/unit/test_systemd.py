"""What systemd passes and hears: sockets, notifications, the watchdog, signals; and the log."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pvrdma_server import logs
from pvrdma_server.errors import ConfigError
from pvrdma_server.supervision import keep_alive, obey_signals
from pvrdma_server.systemd import (
    Notifier,
    check_listening,
    is_journal,
    take_listening_fd,
    watchdog_s,
)


class Manager:
    """A service manager's end of the notification socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(30)

    def heard(self) -> str:
        return self.socket.recv(4096).decode()

    def all_heard(self) -> list[str]:
        self.socket.setblocking(False)
        messages = []
        try:
            while True:
                messages.append(self.heard())
        except BlockingIOError:
            return messages


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    with manager.socket:
        yield manager


def notifier(manager: Manager) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": manager.socket.getsockname()})


def test_notifications(manager: Manager) -> None:
    us = notifier(manager)
    us.ready()
    us.alive("3 queue pairs")
    us.stopping()
    us.reloading()
    heard = [manager.heard() for _ in range(3)]
    assert heard == ["READY=1", "WATCHDOG=1\nSTATUS=3 queue pairs", "STOPPING=1"]
    reloading, _, time_us = manager.heard().partition("\nMONOTONIC_USEC=")
    assert reloading == "RELOADING=1"
    assert int(time_us) > 0


def test_an_address_without_a_file() -> None:
    name = f"pvrdma-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    with manager.socket:
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert manager.heard() == "READY=1"


def test_nobody_to_tell_is_no_error(tmp_path: Path) -> None:
    Notifier({}).ready()
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).ready()


def test_a_manager_that_does_not_read_blocks_nobody(manager: Manager) -> None:
    us = notifier(manager)
    for _ in range(10_000):
        us.alive("fine")
    assert len(manager.all_heard()) < 10_000


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
    ],
)
def test_the_watchdogs_time(environment: dict[str, str], seconds: float | None) -> None:
    assert watchdog_s(environment) == seconds


# --- sockets ---------------------------------------------------------------------------------------------------------

PASSED = """
import os, sys
from pvrdma_server.errors import ConfigError
from pvrdma_server.systemd import take_listening_fd
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[1]))
try:
    print(take_listening_fd(os.environ), sorted(name for name in os.environ if name.startswith("LISTEN")))
except ConfigError as e:
    print(e)
"""


def passed(sock: socket.socket, count: str = "1", other: str = "0") -> str:
    """What a process says that was given `sock` as descriptor 3."""

    def give() -> None:
        os.dup2(sock.fileno(), 3)

    return subprocess.run(
        [sys.executable, "-c", PASSED, other], capture_output=True, text=True, check=True, preexec_fn=give,
        env={**os.environ, "LISTEN_FDS": count, "LISTEN_FDNAMES": "a:b"}, pass_fds=(3,), timeout=60,
    ).stdout.strip()  # fmt: skip


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "vm.sock"))
        sock.listen()
        yield sock


def test_a_socket_that_is_passed_is_taken_and_its_variables_go(listener: socket.socket) -> None:
    assert passed(listener) == "3 []"


def test_a_socket_for_another_process_is_not_taken(listener: socket.socket) -> None:
    assert passed(listener, other="1") == "None []"
    assert passed(listener, count="0") == "None []"


def test_more_sockets_than_one_are_refused(listener: socket.socket) -> None:
    assert "passes 2 sockets (a:b); one is needed" in passed(listener, count="2")


def test_what_is_no_listening_stream_socket_is_refused(tmp_path: Path) -> None:
    for sock in (
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        socket.socket(socket.AF_INET),
    ):
        with sock:
            assert "no listening UNIX stream socket" in passed(sock)
    with open(tmp_path / "file", "w") as file, pytest.raises(ConfigError, match="is no socket"):
        check_listening(file.fileno(), "--fd")


def test_the_path_of_a_passed_socket(listener: socket.socket, tmp_path: Path) -> None:
    assert check_listening(listener.fileno(), "--fd") == str(tmp_path / "vm.sock")
    assert listener.fileno() >= 0
    assert take_listening_fd({}) is None


# --- the watchdog and signals -------------------------------------------------------------------------------------


class Work:
    """Turns that are had at once when woken, unless it hangs."""

    turns = 0
    hangs = False

    def wake(self) -> None:
        self.turns += not self.hangs


def test_a_sign_of_life_comes_while_the_work_goes_on_and_no_longer(manager: Manager) -> None:
    work, timeout_s = Work(), 8.0

    async def live() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                keep_alive, notifier(manager), timeout_s, lambda: work.turns, work.wake, lambda: "x"
            )
            for _ in range(10):
                await trio.sleep(timeout_s)
                lively = manager.all_heard()
                assert set(lively) == {"WATCHDOG=1\nSTATUS=x"}
                # More than one in every span of the timeout, so that a late one ends nothing.
                assert len(lively) >= 2
            work.hangs = True
            await trio.sleep(timeout_s / 2)
            manager.all_heard()
            await trio.sleep(10 * timeout_s)
            assert manager.all_heard() == []
            nursery.cancel_scope.cancel()

    trio.run(live, clock=MockClock(autojump_threshold=0))


def obey(manager: Manager, reload: Callable[[], None] | None, *numbers: int) -> None:
    async def live() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(obey_signals, nursery.cancel_scope, notifier(manager), reload)
                await wait_all_tasks_blocked()
                for number in numbers:
                    os.kill(os.getpid(), number)
                    await wait_all_tasks_blocked(0.01)
                await trio.sleep_forever()

    trio.run(live)


@contextmanager
def sighup(handler: signal.Handlers) -> Iterator[None]:
    """As a process is started with it."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_and_the_manager_hears_of_it(manager: Manager, number: int) -> None:  # fmt: skip
    with sighup(signal.SIG_DFL):  # we may run under nohup
        obey(manager, None, number)
    assert manager.all_heard() == ["STOPPING=1"]


def test_without_a_file_nohup_holds(manager: Manager) -> None:
    with sighup(signal.SIG_IGN), structlog.testing.capture_logs() as records:
        obey(manager, None, signal.SIGHUP, signal.SIGTERM)
    assert [record["signal"] for record in records] == ["SIGTERM"]


def test_sighup_reloads_as_often_as_it_comes_and_ends_nothing(manager: Manager) -> None:
    reloads = []

    def reload() -> None:
        reloads.append(1)
        if len(reloads) == 2:
            raise ConfigError("vm1.toml: nonsense")

    obey(manager, reload, signal.SIGHUP, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    assert len(reloads) == 3
    said = [message.partition("\n")[0] for message in manager.all_heard()]
    assert said == [*["RELOADING=1", "READY=1"] * 3, "STOPPING=1"]


# --- the log ---------------------------------------------------------------------------------------------------------

TALK = """
import sys, structlog
from pvrdma_server import logs
log = structlog.get_logger(component="early")
logs.configure(sys.argv[1], sys.argv[2])
log.debug("a"); log.info("b"); log.warning("c", text="x\\ny")
print(logs.set_level("debug"), logs.level())
log.debug("d")
try: 1 / 0
except ZeroDivisionError: log.exception("e")
"""


def talk(level: str, form: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TALK, level, form], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.stdout == f"{level} debug\n"
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["auto", "json"])
def test_records_are_json_lines_and_the_level_changes_at_once(form: str) -> None:
    records = [json.loads(line) for line in talk("warning", form)]
    assert [record["event"] for record in records] == ["c", "d", "e"]
    assert records[0].items() >= {"component": "early", "level": "warning", "text": "x\ny"}.items()
    assert "ZeroDivisionError" in records[2]["exception"]


def test_text_is_for_people() -> None:
    lines = talk("info", "text")
    assert "warning" in lines[1]
    assert not any(line.startswith("{") for line in lines)
    assert any("ZeroDivisionError" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_the_journal_gets_priorities(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+b") as journal:
        seen = os.fstat(journal.fileno())
        stream = f"{seen.st_dev}:{seen.st_ino}"
        environment = {**os.environ, "JOURNAL_STREAM": stream}
        subprocess.run(
            [sys.executable, "-c", TALK, "debug", "auto"], stdout=subprocess.DEVNULL, stderr=journal, check=True,
            env=environment, timeout=60,
        )  # fmt: skip
        assert is_journal(journal.fileno(), environment)
        assert not is_journal(journal.fileno(), {})
        journal.seek(0)
        lines = journal.read().decode().splitlines()
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<7>", "<3>"]
    assert all(json.loads(line[3:]) for line in lines)


def test_a_descriptor_that_is_closed_is_no_journal() -> None:
    assert not is_journal(10**6, {"JOURNAL_STREAM": "1:1"})


def test_levels_are_those_of_structlog() -> None:
    assert set(logs.LEVELS) <= set(structlog.processors.NAME_TO_LEVEL)
