"""The server as a service of a real systemd: readiness, watchdog, crash, stop, reload, activation, hardening."""

import json
import re

import pytest
from service.machine import SOCKET, UNIT, Machine

CONNECT = f"""
from vfu_client import VfuClient
client = VfuClient({SOCKET!r}, timeout_s=60)
print(hex(int.from_bytes(client.read(7, 0, 4), "little")))
"""
DEVICE = "0x82015ad"
DROP_IN = f"/run/systemd/system/{UNIT}.d/test.conf"


def main_pid(machine: Machine) -> int:
    return int(machine.show(UNIT, "MainPID")["MainPID"])


def test_the_quick_start_installs_all_of_it(machine: Machine) -> None:
    assert "Successfully installed" in machine.installation
    # Built there and then, from the distribution's own source package.
    assert "cp311-abi3-linux_x86_64.whl" in machine.installation
    assert re.fullmatch(r"pvrdma-server, version \S+\n", machine.check("pvrdma-server --version"))
    licenses = machine.check(
        "cd /opt/pvrdma-server/lib/python3*/site-packages/pvrdma_server; ls licenses"
    )
    assert licenses.split() == ["LICENSE.json-c", "LICENSE.libvfio-user"]


def test_it_is_ready_when_systemd_says_so(served: Machine) -> None:
    shown = served.show(UNIT, "ActiveState", "Type", "NRestarts")
    assert shown == {"ActiveState": "active", "Type": "notify", "NRestarts": "0"}
    assert len(served.events("ready")) == 1
    who = served.check(f"stat -c '%U:%G %a' {SOCKET} /run/pvrdma/vm1 /proc/{main_pid(served)}")
    assert who.splitlines()[:2] == ["pvrdma:kvm 660", "pvrdma:pvrdma 750"]
    assert who.splitlines()[2].startswith("pvrdma:pvrdma")


def test_a_client_reads_the_device(running: Machine) -> None:
    result = running.python(CONNECT)
    assert (result.stdout.strip(), result.stderr) == (DEVICE, "")


def test_who_is_not_in_the_group_cannot_connect(running: Machine) -> None:
    result = running.python(CONNECT, groups="nogroup")
    assert "PermissionError" in result.stderr


def test_pvrdma_ctl_reaches_it(running: Machine) -> None:
    status = json.loads(running.check("pvrdma-ctl status --json vm1"))
    assert status["state"] == "reset"


def test_killed_it_comes_back_on_the_same_socket(running: Machine) -> None:
    before = running.show(UNIT, "NRestarts", "MainPID")
    running.check(f"kill -9 {before['MainPID']}")
    restarted = int(before["NRestarts"]) + 1
    # A client that comes while it is down waits in the socket's backlog.
    assert running.python(CONNECT).stdout.strip() == DEVICE
    running.wait_for(
        "running again",
        f"systemctl show -p NRestarts {UNIT} | grep -x NRestarts={restarted} && systemctl is-active {UNIT}",
    )
    assert main_pid(running) != int(before["MainPID"])


@pytest.fixture
def quick_watchdog(served: Machine) -> Machine:
    """The service with a watchdog of some seconds instead of half a minute, as no test wants to wait so long."""
    served.write(DROP_IN, "[Service]\nWatchdogSec=10\n")
    served.check(
        f"systemctl daemon-reload; systemctl reset-failed {UNIT} || true; systemctl restart {UNIT}"
    )
    return served


def test_stuck_it_is_ended_and_started_again(quick_watchdog: Machine) -> None:
    machine = quick_watchdog
    before = machine.show(UNIT, "NRestarts", "MainPID")
    machine.check(f"kill -STOP {before['MainPID']}")
    restarted = int(before["NRestarts"]) + 1
    machine.wait_for(
        "running again", f"systemctl show -p NRestarts {UNIT} | grep -x NRestarts={restarted}"
    )
    machine.wait_for("active", f"systemctl is-active {UNIT}")
    assert "Watchdog timeout" in machine.journal()
    machine.check(f"rm {DROP_IN}; systemctl daemon-reload; systemctl restart {UNIT}")


def test_stopped_it_leaves_nothing_behind(running: Machine) -> None:
    running.check(f"systemctl stop {UNIT}")
    assert running.show(UNIT, "Result", "ExecMainStatus") == {
        "Result": "success",
        "ExecMainStatus": "0",
    }
    assert running.check("ls /run/pvrdma/fabric") == ""
    assert running.check("ls /run/pvrdma").split() == ["fabric", "vm1.sock"]


def test_a_connection_starts_it(running: Machine) -> None:
    running.check(f"systemctl stop {UNIT}")
    assert running.python(CONNECT).stdout.strip() == DEVICE
    assert running.show(UNIT, "ActiveState")["ActiveState"] == "active"


def test_stopping_the_socket_stops_the_service(running: Machine) -> None:
    running.check("systemctl stop pvrdma-server@vm1.socket")
    assert running.run(f"systemctl is-active {UNIT}").stdout.strip() == "inactive"
    assert running.check("ls /run/pvrdma").split() == ["fabric"]


def test_reload_reads_the_file_again(running: Machine) -> None:
    pid = main_pid(running)
    before = len(running.events("reloaded"))
    running.check("echo 'log-level = \"debug\"' >>/etc/pvrdma/vm1.toml")
    running.check(f"systemctl reload {UNIT}")
    running.wait_for(
        "reloaded",
        f'test $(journalctl -o cat -u {UNIT} | grep -c \'"event": "reloaded"\') -gt {before}',
    )
    assert running.events("reloaded")[-1]["log_level"] == "debug"
    running.check("sed -i /log-level/d /etc/pvrdma/vm1.toml")
    assert main_pid(running) == pid
    assert running.show(UNIT, "ActiveState")["ActiveState"] == "active"


def test_a_wrong_file_is_named_in_the_journal(running: Machine) -> None:
    """And systemd does not try again, for nothing would change."""
    running.check("echo 'fabrik = \"x\"' >>/etc/pvrdma/vm1.toml")
    assert not running.run(f"systemctl restart {UNIT}").ok
    shown = running.show(UNIT, "ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    journal = running.journal()
    running.check("sed -i /fabrik/d /etc/pvrdma/vm1.toml")
    assert '/etc/pvrdma/vm1.toml: fabrik = "x": there is no key of that name' in journal


def test_metrics_over_tcp_take_the_drop_in_that_the_error_names(running: Machine) -> None:
    running.check("echo 'metrics-listen = \"127.0.0.1:9745\"' >>/etc/pvrdma/vm1.toml")
    assert not running.run(f"systemctl restart {UNIT}").ok
    line = "RestrictAddressFamilies=AF_INET AF_INET6"
    assert f"port 9745: Address family not supported by protocol; in a unit: {line}" in running.journal()  # fmt: skip
    running.write(DROP_IN, f"[Service]\n{line}\n")
    running.check(f"systemctl daemon-reload; systemctl reset-failed {UNIT}; systemctl start {UNIT}")
    page = running.check(
        "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:9745/metrics\").read())'"
    )
    assert 'name="vm1"' in page
    running.check(f"sed -i /metrics-listen/d /etc/pvrdma/vm1.toml; rm {DROP_IN}")
    running.check(f"systemctl daemon-reload; systemctl restart {UNIT}")


def test_the_hub_of_the_mad_relay_runs_beside_it(running: Machine) -> None:
    """Without a device of that name it says so and stays, for the VMs of this host."""
    hub = "pvrdma-mad-hub@none0.service"
    running.check(f"systemctl start {hub}")
    assert running.show(hub, "ActiveState", "Type") == {"ActiveState": "active", "Type": "notify"}
    assert running.check("stat -c %U:%a /run/pvrdma-mad-hub") == "pvrdma:750\n"
    running.check("test -S /run/pvrdma-mad-hub/none0.sock")
    assert "umad_unavailable" in running.journal(hub)
    running.check(f"systemctl stop {hub}")
    assert running.show(hub, "Result") == {"Result": "success"}


def test_its_units_are_hardened(served: Machine) -> None:
    """In tenths: below 20 is what systemd calls OK; 12 was reached."""
    for unit in served.check("cd /opt/pvrdma-server/lib/systemd/system; ls *@.service").split():
        served.check(f"systemd-analyze security --no-pager --offline=true --threshold=16 {unit}")
