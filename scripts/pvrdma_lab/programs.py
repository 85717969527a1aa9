"""RDMA programs in guests: a server and a client, run and judged. For scripts/demo and the guest tests.

Every function runs one pair of processes, checks the exit status of both and what they printed, and returns what was
measured. Server and client may be one guest.
"""

import json
import re
from dataclasses import dataclass

from pvrdma_lab import paths
from pvrdma_lab.agent_client import AgentError
from pvrdma_lab.guest import Guest

# What ibv_*_pingpong and perftest listen on.
PORT = 18515
# The GID that follows from the guest's IPv4 address; 0 is the link-local one.
GID_INDEX = 1
TIMEOUT_S = 90.0
_LISTENING = "lab: listening"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a client measured.

    Attributes:
        size_bytes: of one message.
        iterations: how many messages.
        mib_per_s: mean rate; None if the program does not tell.
        usec: microseconds of one message (ibv_*_pingpong: there and back); None if the program does not tell.
        output: all that the client printed.
    """

    size_bytes: int
    iterations: int
    mib_per_s: float | None
    usec: float | None
    output: str


def _server_command(command: str, listens: str) -> str:
    """Returns a command that runs a server and says when it listens; its status is the server's."""
    return (
        f"{command} & server=$!; until {listens}; do kill -0 $server 2>/dev/null || break; sleep 0.05; done; "
        f"echo {_LISTENING}; wait $server"
    )


def listens_on_port(port: int) -> str:
    """Returns a shell condition: somebody listens on the TCP port."""
    # Local address, any peer, state LISTEN.
    return f"grep -qs ':{port:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6"


def run_pair(
    step: str,
    server: Guest,
    client: Guest,
    commands: tuple[str, str],
    listens: str,
    timeout_s: float,
) -> tuple[str, str]:
    """Runs a server, waits until it listens, runs a client, and waits for both.

    Args:
        step: what an error calls it.
        server: where the server runs.
        client: where the client runs.
        commands: the server's and the client's.
        listens: a shell condition in the server's guest that holds once a client may come.
        timeout_s: for all of it, in seconds; a hanging program is killed then.

    Returns:
        Both outputs, the server's first.

    Raises:
        LabError: one of them failed; with its output and the ends of the logs.
    """
    with server.popen(_server_command(commands[0], listens), timeout_s) as running:
        try:
            running.wait_for(_LISTENING, timeout_s)
            done = client.run(commands[1], timeout_s)
            # A server waits for its client; one whose client has failed may wait for ever.
            served = running.wait(timeout_s if done.ok else 2.0)
        except TimeoutError as error:
            if "done" not in locals():
                raise server.error(step, f"server: {error}") from error
            raise client.error(
                step,
                f"client: status {done.status}: {done.command}\n{done.stdout}{done.stderr}\n{error}",
            ) from error
        except AgentError as error:
            raise server.error(step, str(error)) from error
    for who, guest, result in (("client", client, done), ("server", server, served)):
        if not result.ok:
            output = f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
            raise guest.error(step, f"{who}: status {result.status}: {result.command}\n{output}")
    return served.stdout + served.stderr, done.stdout + done.stderr


def _found(step: str, guest: Guest, pattern: str, output: str) -> re.Match[str]:
    match = re.search(pattern, output, re.M)
    if match is None:
        raise guest.error(step, f"no {pattern!r} in its output:\n{output[-2000:]}")
    return match


def pingpong(
    server: Guest,
    client: Guest,
    size_bytes: int,
    iterations: int = 100,
    options: str = "",
    *,
    program: str = "ibv_rc_pingpong",
    timeout_s: float = TIMEOUT_S,
) -> Measured:
    """Runs ibv_rc_pingpong -c: both ends look at the first byte of every page that they receive.

    Raises:
        LabError: it failed, or received other bytes than were sent.
    """
    words = f"{program} -c -g {GID_INDEX} -s {size_bytes} -n {iterations} {options}".rstrip()
    commands = (words, f"{words} {server.ip}")
    outputs = run_pair(words, server, client, commands, listens_on_port(PORT), timeout_s)
    for output in outputs:
        if "invalid data" in output:
            raise client.error(words, f"received other bytes than were sent:\n{output[-2000:]}")
    usec = _found(words, client, r"= ([\d.]+) usec/iter", outputs[1])
    mbit = _found(words, client, r"= ([\d.]+) Mbit/sec", outputs[1])
    rate = float(mbit[1]) * 1e6 / 8 / (1 << 20)
    return Measured(size_bytes, iterations, rate, float(usec[1]), outputs[1])


def perftest(
    server: Guest,
    client: Guest,
    program: str,
    size_bytes: int,
    iterations: int = 200,
    options: str = "",
    *,
    timeout_s: float = TIMEOUT_S,
) -> Measured:
    """Runs one of perftest's programs: ib_{write,read,send,atomic}_{bw,lat}. An atomic's size is always 8 bytes.

    Raises:
        LabError: it failed, or measured another size than was asked for.
    """
    size = "" if "_atomic_" in program else f"-s {size_bytes} "
    words = f"{program} -F -x {GID_INDEX} {size}-n {iterations} {options}".rstrip()
    commands = (words, f"{words} {server.ip}")
    _, output = run_pair(words, server, client, commands, listens_on_port(PORT), timeout_s)
    row = rf"^\s*{size_bytes}\s+{iterations}\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)(?:[ \t]+([\d.]+))?"
    values = _found(words, client, row, output)
    if program.endswith("_lat"):
        # t_min, t_max, t_typical, t_avg
        return Measured(size_bytes, iterations, None, float(values[4] or values[3]), output)
    return Measured(size_bytes, iterations, float(values[2]), None, output)


def rping(
    server: Guest,
    client: Guest,
    size_bytes: int = 64,
    iterations: int = 10,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Measured:
    """Runs rping: a connection by rdma_cm, then SEND, RDMA READ and RDMA WRITE, both ends comparing bytes.

    Raises:
        LabError: it failed, or did fewer pings than were asked for.
    """
    words = f"rping -v -V -S {size_bytes} -C {iterations}"
    commands = (f"{words} -s -a 0.0.0.0", f"{words} -c -a {server.ip}")
    listens = "rdma resource show cm_id | grep -q 'LISTEN.*comm rping'"
    outputs = run_pair(words, server, client, commands, listens, timeout_s)
    for output in outputs:
        pings = len(re.findall(r"^(?:server )?ping data: rdma-ping-", output, re.M))
        if pings != iterations:
            raise client.error(words, f"{pings} pings of {iterations}:\n{output[-2000:]}")
    return Measured(size_bytes, iterations, None, None, outputs[1])


def rdma_check(guest: Guest, *sizes: int, timeout_s: float = TIMEOUT_S) -> tuple[int, int]:
    """Runs scripts/guest/rdma_check.py: every RC operation with random bytes, every byte compared.

    Args:
        guest: where it runs; one process has both ends.
        sizes: of messages in bytes; none for the program's own choice.
        timeout_s: seconds; it is killed then.

    Returns:
        How many operations it verified, and how many bytes.

    Raises:
        LabError: a byte, a completion or an atomic's value was wrong.
    """
    program = "/run/lab/rdma_check.py"
    guest.write_file(program, (paths.GUEST_FILES / "rdma_check.py").read_bytes())
    words = " ".join(map(str, sizes))
    report = json.loads(guest.check(f"python3 {program} {words}", timeout_s).splitlines()[-1])
    return report["checks"], report["bytes"]
