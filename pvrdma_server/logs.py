"""The server's log: to stderr, for people on a terminal, as JSON lines elsewhere, with priorities for the journal.

Contract: `configure` once, `set_level` at any time; it holds for every logger there is.
"""

import logging
import os
import sys
from typing import Any, Final

import structlog

from pvrdma_server.systemd import is_journal

STDERR_FD: Final = 2
LEVELS: Final = {
    name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")
}
FORMATS: Final = ("auto", "json", "text")
# Source: sd-daemon(3), SD_DEBUG and so on.
_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}

_state = {"level": "info"}


def configure(level: str, form: str = "auto") -> None:
    """Log to stderr from `level` on; `form` is one of FORMATS."""
    terminal = sys.stderr.isatty()
    renderers: list[Any]
    if form == "text" or (form == "auto" and terminal):
        renderers = [structlog.dev.ConsoleRenderer(colors=terminal)]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if is_journal(STDERR_FD, os.environ):
        renderers = _with_priority(renderers)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *renderers,
        ],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    set_level(level)


def _with_priority(renderers: list[Any]) -> list[Any]:
    """The same, with the prefix by which the journal tells priorities."""

    def render(logger: Any, method: str, event: Any) -> str:
        priority = _PRIORITIES.get(event.get("level", method), _PRIORITIES["info"])
        for renderer in renderers:
            event = renderer(logger, method, event)
        # One record is one line to the journal; a traceback's others would become records of their own.
        return f"<{priority}>" + str(event).replace("\n", f"\n<{priority}>")

    return [render]


def set_level(level: str) -> str:
    """Log from `level` on, one of LEVELS; returns the level of before."""
    before, _state["level"] = _state["level"], level
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]))
    return before


def level() -> str:
    """The level in force."""
    return _state["level"]
