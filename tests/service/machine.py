"""Commands in the machine with systemd, and waiting for what they show."""

import json
import time
from typing import Any

from pvrdma_lab import quick_start
from pvrdma_lab.agent_client import Result
from pvrdma_lab.service_vm import CLONE, NESTED, TESTS, ServiceVm

# One look at something that comes by itself.
LOOK_S = 0.3
UNIT = "pvrdma-server@vm1.service"
SOCKET = "/run/pvrdma/vm1.sock"


class Machine:
    """Commands in the machine, and waiting for what they show."""

    def __init__(self, vm: ServiceVm, installation: str) -> None:
        self._vm = vm
        self.installation = installation

    def run(self, command: str, timeout_s: float = 120.0) -> Result:
        return self._vm.run(command, timeout_s)

    def check(self, command: str, timeout_s: float = 120.0) -> str:
        return self._vm.check(f"set -eu\n{command}", timeout_s)

    def follow(self, section: str) -> str:
        """Runs the shell blocks of one section of the quick start; returns their output."""
        return "".join(self.check(f"cd /{CLONE}\n{block}") for block in quick_start.blocks(section))

    def write(self, path: str, text: str) -> None:
        self._vm.check(f"mkdir -p $(dirname {path}); cat >{path}", stdin=text.encode())

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit, as `systemctl show` prints them."""
        text = self.check(f"systemctl show -p {','.join(names)} {unit}")
        return dict(line.split("=", 1) for line in text.splitlines())

    def wait_for(
        self, what: str, command: str, timeout_s: float = 120.0, look_s: float = LOOK_S
    ) -> str:
        """The output of a command once it succeeds."""
        deadline = time.monotonic() + timeout_s
        while not (result := self.run(command)).ok:
            assert time.monotonic() < deadline, (
                f"not in {timeout_s} s: {what}: {result.stdout}{result.stderr}\n{self.journal()}"
            )
            time.sleep(look_s)
        return result.stdout

    def journal(self, unit: str = UNIT) -> str:
        return self.run(f"journalctl --no-pager -o cat -u {unit} | tail -n 200").stdout

    def events(self, name: str) -> list[dict[str, Any]]:
        """The server's log records of one event, since the machine's start."""
        lines = self.check(f"journalctl --no-pager -o cat -u {UNIT}").splitlines()
        records = (json.loads(line) for line in lines if line.startswith("{"))
        return [record for record in records if record.get("event") == name]

    def python(self, code: str, *, user: str = "nobody", groups: str = "kvm") -> Result:
        """Runs Python code with the tests' vfio-user client, as a user like the one of a QEMU."""
        self.write("/srv/code.py", code)
        return self.run(
            f"cd /{TESTS} && setpriv --reuid={user} --regid=nogroup --groups={groups} "
            f"env PYTHONPATH=/{TESTS} PYTHONDONTWRITEBYTECODE=1 python3 /srv/code.py"
        )

    def nested_words(self) -> str:
        """QEMU's words for a guest that is small enough to be emulated twice."""
        kernel = "console=ttyS0 quiet panic=-1 lab.ip=10.9.0.111/24 lab.peer=10.9.0.2"
        # The card's boot ROM would look for a network first, which takes a minute.
        rom = "-global vmxnet3.romfile="
        # The guest's agent reads from this console; without one the guest turns itself off.
        agent = "-device virtio-serial-pci -chardev null,id=agent -device virtconsole,chardev=agent"
        return f"-kernel /{NESTED}/bzImage -initrd /{NESTED}/initrd.gz -append '{kernel}' {rom} {agent}"
