"""The lab's agent in a guest: one TCP connection runs one shell command. Python's standard library only.

Request: one JSON line {"command": str, "timeout_s": float | null, "stdin": str | null, "line_buffered": bool};
stdin is base64; line_buffered has C and Python programs write whole lines at once, as on a terminal.
Answer: frames of a kind byte, a big-endian 32-bit length and that many bytes: "o" standard output, "e" standard
error, and last "x", JSON {"status": int, "timed_out": bool}; status is -N for a command that signal N ended.

A connection that breaks, or a time limit, kills the command's process group. What a command leaves running in the
background lives on once the command itself has ended; let it write to a file.
"""

import sys

sys.modules["ssl"] = None  # asyncio does without; loading it takes a second under TCG

import argparse  # noqa: E402
import asyncio  # noqa: E402
import base64  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
from contextlib import suppress  # noqa: E402

CHUNK_BYTES = 65536
REQUEST_MAX_BYTES = 64 << 20
# What stdbuf -oL sets.
LINE_BUFFERED = {
    "_STDBUF_O": "L",
    "LD_PRELOAD": "/usr/libexec/coreutils/libstdbuf.so",
    "PYTHONUNBUFFERED": "1",
}
# After the command's end: how long to wait for output that its children still hold open.
DRAIN_S = 0.3


def frame(kind, data):
    return kind + len(data).to_bytes(4, "big") + data


async def copy_out(stream, kind, writer):
    with suppress(ConnectionError):
        while data := await stream.read(CHUNK_BYTES):
            writer.write(frame(kind, data))
            await writer.drain()


async def feed(process, data):
    with suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


def kill_group(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def exited(process):
    """Waits for the process itself; Process.wait() also waits for whoever else holds its pipes."""
    with suppress(ProcessLookupError):  # asyncio has reaped it already
        fd = os.pidfd_open(process.pid)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    # asyncio learns of it in this or the next round of its loop
    while process.returncode is None:
        await asyncio.sleep(0)


async def run(request, reader, writer):
    """Runs one command; returns its end, or None if the client went away."""
    stdin = request.get("stdin")
    process = await asyncio.create_subprocess_exec(
        "/bin/bash", "-c", request["command"],
        stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        cwd=os.environ.get("HOME", "/"),
        env={**os.environ, **(LINE_BUFFERED if request.get("line_buffered") else {})},
    )  # fmt: skip
    copies = [
        asyncio.create_task(copy_out(process.stdout, b"o", writer)),
        asyncio.create_task(copy_out(process.stderr, b"e", writer)),
    ]
    if stdin is not None:
        copies.append(asyncio.create_task(feed(process, base64.b64decode(stdin))))
    ended = asyncio.create_task(exited(process))
    gone = asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait(
            {ended, gone}, timeout=request.get("timeout_s"), return_when=asyncio.FIRST_COMPLETED
        )
        if gone.done() and not ended.done():
            return None
        timed_out = not ended.done()
        if timed_out:
            kill_group(process)
        await ended
        await asyncio.wait(copies, timeout=DRAIN_S)
        return {"status": process.returncode, "timed_out": timed_out}
    finally:
        if not ended.done():
            kill_group(process)
        for task in (*copies, gone):
            task.cancel()
        process._transport.close()  # its pipes too: what still writes to them gets SIGPIPE


async def serve(reader, writer):
    with suppress(ConnectionError):
        try:
            line = await reader.readline()
            if line:
                end = await run(json.loads(line), reader, writer)
                if end is not None:
                    writer.write(frame(b"x", json.dumps(end).encode()))
                    await writer.drain()
        finally:
            writer.close()


async def main(address, port):
    server = await asyncio.start_server(
        serve, address, port, limit=REQUEST_MAX_BYTES, backlog=256, family=socket.AF_INET
    )
    with open("/proc/uptime") as file:
        print(f"lab: [{file.read().split()[0]}] ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="runs commands in a lab guest")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.address, arguments.port)))
