"""What a device looks like from outside, and how it is drawn for people."""

import io
import json
import re
from typing import Any

import pytest
from guest import PAGE, Srq
from rich.console import Console
from unit.bed import Bed
from unit.vms import Pair, pattern, rc

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus
from pvrdma_server.backend import HostGidFacts
from pvrdma_server.ctl import _console
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.facts import (
    OBJECT_KINDS,
    gid_rows,
    gid_text,
    object_facts,
    port_facts,
    status_facts,
)
from pvrdma_server.journal import MAX_RECENT_ERRORS
from pvrdma_server.tables import KINDS, busiest, count_text, duration, rate_view, size, status_view

V4 = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])


def device_of(pair: Pair) -> PvrdmaDevice:
    return pair.a.machine.device


def test_objects_with_owners_states_peers_and_counts(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    source.write(pattern(PAGE))
    ends.b.post_recv(target.sge(), wr_id=1)
    ends.a.send(source.sge(), wr_id=2)
    assert ends.b.recv_cq.wait_one().status == WcStatus.SUCCESS
    ends.a.write(source.sge(), to=target.remote()._replace(rkey=0xBAD), wr_id=3)
    ends.a.send_cq.wait(2)

    facts = object_facts(device_of(pair), 100, OBJECT_KINDS)
    (qp,) = facts["qps"]
    assert (qp["type"], qp["state"], qp["context"]) == ("RC", "ERR", 1)
    assert (qp["sends"], qp["receives"], qp["errors"], qp["srq"]) == (2, 0, 1, None)
    other = object_facts(pair.b.machine.device, 100, OBJECT_KINDS)["qps"][0]
    assert other["receives"] == 1
    assert other["peer"] == {
        "qpn": qp["qpn"],
        "address": gid_text(pair.a.gid),
        "sgid_index": 0,
        "mtu": 1024,
    }
    all_memory, mr = facts["mrs"]
    assert (mr["length_bytes"], mr["context"], mr["lkey"]) == (PAGE, 1, source.lkey)
    assert all_memory["context"] is None
    assert [cq["context"] for cq in facts["cqs"]] == [1] * len(facts["cqs"])
    assert facts["left_out"] == {}


def test_the_kernels_objects_have_no_process(pair: Pair) -> None:
    rc(pair, in_kernel=True)
    facts = object_facts(device_of(pair), 100, OBJECT_KINDS)
    assert facts["qps"][0]["context"] is None
    assert facts["pds"][0]["context"] is None


def test_an_srq(pair: Pair) -> None:
    process = pair.a.process()
    srq = Srq(process, max_wr=16)
    srq.post_recv(process.pd.reg_mr(PAGE).sge(), wr_id=1)
    (seen,) = object_facts(device_of(pair), 100, OBJECT_KINDS)["srqs"]
    assert (seen["posted"], seen["failed"], seen["limit"]) == (1, False, 0)


def test_as_many_objects_as_asked_for_and_the_others_counted(pair: Pair) -> None:
    process = pair.a.process()
    for _ in range(5):
        process.pd.reg_mr(PAGE)
    facts = object_facts(device_of(pair), 2, OBJECT_KINDS)
    assert len(facts["mrs"]) == 2
    # The kernel has one for all of its memory.
    assert facts["left_out"] == {"mrs": 4}
    assert object_facts(device_of(pair), 9, ["pds"]).keys() == {"pds", "left_out"}


def test_nonsense_in_a_queue_pairs_attributes_is_shown_as_unknown(pair: Pair) -> None:
    ends = rc(pair)
    qp = device_of(pair).resources.qps.get_untrusted(ends.a.handle)
    qp.attr = qp.attr._replace(path_mtu=77, qp_state=9)
    (seen,) = object_facts(device_of(pair), 10, OBJECT_KINDS)["qps"]
    assert (seen["state"], seen["peer"]) == ("9", None)
    qp.attr = qp.attr._replace(qp_state=3)
    assert object_facts(device_of(pair), 10, OBJECT_KINDS)["qps"][0]["peer"]["mtu"] is None


def test_a_ring_whose_memory_is_gone_is_shown_without_its_fill(bed: Bed) -> None:
    bed.kernel.cq(16)
    device = bed.machine.device
    device.dma_unmap(bed.ram.iova, bed.ram.size)
    assert object_facts(device, 10, OBJECT_KINDS)["cqs"][0]["unread"] is None


def test_recent_errors_are_kept_and_only_so_many(bed: Bed) -> None:
    for page in range(MAX_RECENT_ERRORS + 3):
        bed.machine.device.doorbell(page, 0, 99)
    recent = status_facts(bed.machine.device)["recent_guest_errors"]
    assert len(recent) == MAX_RECENT_ERRORS
    assert recent[-1].items() >= {"what": "doorbell", "kind": "bad_handle", "time_s": 0.0}.items()


def test_everything_is_json(pair: Pair) -> None:
    rc(pair)
    device = device_of(pair)
    json.dumps(
        [status_facts(device), object_facts(device, 9, OBJECT_KINDS), port_facts(device.backend)]
    )
    assert port_facts(device.backend) == {"state": "ACTIVE", "mtu": 4096}


@pytest.mark.parametrize(
    ("gid", "text"),
    [(V4, "::ffff:10.0.0.1"), (bytes.fromhex("fe80" + 26 * "0" + "0a"), "fe80::a")],
)
def test_gids_are_written_as_addresses(gid: bytes, text: str) -> None:
    assert gid_text(gid) == text


def test_the_guests_gids_beside_the_hosts(pair: Pair) -> None:
    pair.a.kernel.add_gid(V4, index=3)
    gids = device_of(pair).resources.gids
    host = {3: HostGidFacts("mlx5_2", 1, 7, "eth5")}
    first, second = gid_rows(gids, host)
    assert (first["index"], first["host"]) == (0, None)
    assert (second["address"], second["type"]) == ("::ffff:10.0.0.1", "RoCE v2")
    assert second["host"] == {"device": "mlx5_2", "port": 1, "gid_index": 7, "netdev": "eth5"}


# --- for people ------------------------------------------------------------------------------------------------------


def status_of(device: PvrdmaDevice, **more: Any) -> dict[str, Any]:
    return {
        "name": "vm1", "version": "1", "uptime_s": 10.0, "log_level": "info", "connected": True,
        "backend_kind": "soft", "port": port_facts(device.backend), "fabric": None, "backend": {},
        "vfio_user": {"messages": 5}, "process": {"pid": 9, "cpu_s": 1.0}, **status_facts(device), **more,
    }  # fmt: skip


def drawn(view: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(view)
    return out.getvalue()


def objects_of(device: PvrdmaDevice, host: dict[int, HostGidFacts] | None = None) -> dict[str, Any]:
    return {
        **object_facts(device, 100, OBJECT_KINDS),
        "gids": gid_rows(device.resources.gids, host or {}),
    }


def test_a_status_is_drawn_with_everything_in_it(pair: Pair) -> None:
    rc(pair).a.pd.reg_mr(2 * PAGE)
    device = device_of(pair)
    device.doorbell(9, 0, 99)
    text = drawn(status_view(status_of(device), objects_of(device), KINDS))
    for part in ("vm1, version 1, pid 9", "QEMU          attached", "driver version 20", gid_text(pair.a.gid),
                 "this server only", "Queue pairs", "RTS", gid_text(pair.b.gid), "Completion queues", "Memory regions",
                 "8 KiB", "process 1", "Recent guest errors", "no QP 0x63"):  # fmt: skip
        assert part in text, part


def test_a_narrow_terminal_cuts_nothing_off(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rc(pair)
    device = device_of(pair)
    folder = "/run/pvrdma/fabric"
    peer = {"name": "vm2", "id": "ab" * 16, "state": "up", "sent_messages": 1, "sent_bytes": 2048,
            "received_messages": 12345, "received_bytes": 0, "bells": 9, "lost_messages": 7}  # fmt: skip
    status = status_of(device, fabric={"folder": folder, "peers": [peer]})
    _console().print(status_view(status, objects_of(device), KINDS))
    text = capsys.readouterr().out
    assert "…" not in text
    for part in (gid_text(pair.b.gid), f"MTU 4096, fabric {folder}", "1 contexts, 2 PDs, "):
        assert part in text, part
    assert re.search(r"vm2 +up +1 +2 KiB +12345 +0 B +9 +7\n", text)


def test_errors_are_shown_by_kind(pair: Pair) -> None:
    device = device_of(pair)
    status = status_of(device, backend={"tx_bytes": 5, "retries": 3, "naks": 0, "no_route": 1})
    status["device"]["guest_errors"] = {"bad_command": 2, "key_fault": 1}
    text = drawn(status_view(status, objects_of(device), ()))
    assert "transport     retries 3, no_route 1 " in text
    assert "guest errors  bad_command 2, key_fault 1 " in text


def test_a_gid_that_the_host_lacks_stands_out(pair: Pair) -> None:
    device = device_of(pair)
    host = {0: HostGidFacts("mlx5_2", 1, None, "eth5")}
    status = status_of(device, backend_kind="ibv")
    text = drawn(status_view(status, objects_of(device, host), ()))
    assert "MISSING: add this address to eth5" in text
    assert "mlx5_2/1" in text


def test_a_gid_that_the_hub_refuses_stands_out(pair: Pair) -> None:
    device = device_of(pair)
    host = {0: HostGidFacts("mlx5_2", 1, 3, "eth5")}
    claims = {pair.a.gid.hex(): {"state": "refused", "why": "vm2 holds it"}}
    relay = {"state": "connected", "hub": "hub on rxe0", "socket": "/run/hub", "gids": claims}
    status = status_of(device, backend_kind="ibv", gsi={}, mad_relay=relay)
    text = drawn(status_view(status, objects_of(device, host), ()))
    assert "refused by the hub: vm2 holds it" in text
    assert "connected at /run/hub, hub on rxe0" in text


def test_no_hub_is_said_so(pair: Pair) -> None:
    device = device_of(pair)
    status = status_of(device, backend_kind="ibv", gsi={"sent": 0}, mad_relay=None)
    assert "connects within this VM only" in drawn(status_view(status, objects_of(device), ()))


def test_no_gid_is_said_so(bed: Bed) -> None:
    device = bed.machine.device
    text = drawn(status_view(status_of(device), objects_of(device), ()))
    assert "the guest's vmxnet3 is down, or its driver is not loaded" in text


def test_what_a_guest_says_is_no_markup(pair: Pair) -> None:
    device = device_of(pair)
    error = {"time_s": 0, "what": "x", "kind": "y", "error": "[red]boo[/red]"}
    status = status_of(device, recent_guest_errors=[error])
    assert "[red]boo[/red]" in drawn(status_view(status, objects_of(device), ()))


def test_rates_are_differences_over_time(pair: Pair) -> None:
    device = device_of(pair)
    before = status_of(device, backend={"tx_bytes": 1024}, uptime_s=10.0)
    after = status_of(
        device, backend={"tx_bytes": 21 * 1024}, uptime_s=12.0, process={"pid": 9, "cpu_s": 1.5}
    )
    text = drawn(rate_view(before, after, []))
    assert re.search(r"bytes sent +10 KiB +21 KiB\n", text)
    assert "25.0%" in text
    assert "bytes received" not in text
    restarted = status_of(device, backend={"tx_bytes": 5}, process={"pid": 8, "cpu_s": 0.1})
    assert re.search(r"bytes sent +0 B +5 B\n", drawn(rate_view(before, restarted, [])))


def test_the_busiest_queue_pairs_first_and_reused_numbers_left_out() -> None:
    def qp(handle: int, sends: int) -> dict[str, Any]:
        return {"handle": handle, "qpn": handle, "sends": sends, "receives": 0, "errors": 0}

    before = {"qps": [qp(1, 100), qp(2, 5), qp(3, 50)]}
    after = {"qps": [qp(1, 101), qp(2, 25), qp(3, 1), qp(4, 7)]}
    assert [(row["handle"], row["sends"]) for row in busiest(before, after, 2)] == [(2, 20), (4, 7)]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (size(0), "0 B"), (size(1536), "1.5 KiB"), (size(1 << 30), "1 GiB"), (size(5 << 40), "5.0 TiB"),
        (count_text(1234567), "1,234,567"), (count_text(0.25), "0.2"), (count_text(3.0), "3"),
        (duration(5), "5 s"), (duration(61), "1 min 1 s"), (duration(7260), "2 h 1 min"), (duration(90000), "1 d 1 h"),
    ],
)  # fmt: skip
def test_numbers_for_people(made: str, text: str) -> None:
    assert made == text
