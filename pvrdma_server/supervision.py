"""What stands over a running server: signals, and the service manager that watches it.

Contract: SIGTERM and SIGINT end the server. SIGHUP reads the configuration again where there is a file; where there is
none it ends the server too, unless it was ignored at the start (nohup).
"""

import signal
from collections.abc import Callable
from typing import Any, Final

import structlog
import trio

from pvrdma_server.errors import ConfigError
from pvrdma_server.systemd import Notifier

# Signs of life in the time the manager allows for one: a late one does not end the server.
_BEATS_PER_TIMEOUT: Final = 4

Reload = Callable[[], None]


async def obey_signals(scope: trio.CancelScope, notifier: Notifier, reload: Reload | None) -> None:
    """End `scope` at a signal, but `reload` at SIGHUP if there is one; it raises ConfigError when it cannot."""
    log: Any = structlog.get_logger(component="server")
    wanted = [signal.SIGTERM, signal.SIGINT]
    if reload is not None or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    with trio.open_signal_receiver(*wanted) as signals:
        async for number in signals:
            if number == signal.SIGHUP and reload is not None:
                notifier.reloading()
                try:
                    reload()
                except ConfigError as e:
                    log.error("reload_failed", error=str(e), goes_on_with="what was in force")
                notifier.ready()
                continue
            log.info("stopping", signal=signal.Signals(number).name)
            notifier.stopping()
            scope.cancel()
            return


async def keep_alive(
    notifier: Notifier,
    timeout_s: float,
    turns: Callable[[], int],
    wake: Callable[[], None],
    describe: Callable[[], str],
) -> None:
    """Give a sign of life whenever the work task has had a turn since the last look.

    Args:
        notifier: who wants to know.
        timeout_s: within how long.
        turns: how many turns the work task has had.
        wake: has it take one.
        describe: what to say beside it, one line.
    """
    before = -1
    while True:
        now = turns()
        if now != before:
            notifier.alive(describe())
        before = now
        wake()
        await trio.sleep(timeout_s / _BEATS_PER_TIMEOUT)
