"""A QMP command to a running QEMU: connects, negotiates, executes one command, closes."""

import json
import socket
from pathlib import Path
from typing import Any


class QmpError(Exception):
    """QEMU refused the command, or its socket does not answer."""


def execute(path: Path, command: str, arguments: dict[str, Any], timeout_s: float = 10.0) -> Any:
    """Executes one QMP command and returns what it returned.

    Raises:
        QmpError: no QEMU there, no answer in time, or an error answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            with sock.makefile("rwb") as file:
                file.readline()  # the greeting
                _ask(file, {"execute": "qmp_capabilities"})
                return _ask(file, {"execute": command, "arguments": arguments})
    except OSError as error:
        raise QmpError(f"{path}: {error}") from error


def _ask(file: Any, request: dict[str, Any]) -> Any:
    file.write(json.dumps(request).encode() + b"\n")
    file.flush()
    while line := file.readline():
        answer = json.loads(line)
        if "error" in answer:
            raise QmpError(f"{request['execute']}: {answer['error']['desc']}")
        if "return" in answer:
            return answer["return"]
        # anything else is an event
    raise QmpError(f"{request['execute']}: QEMU closed the connection")
