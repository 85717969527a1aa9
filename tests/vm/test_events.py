"""Asynchronous events as programs of the guest see them."""

import json
from pathlib import Path

import pytest
from pvrdma_lab import Guest
from vm.server_state import guest_errors

PROGRAM = Path(__file__).parent / "programs" / "events.py"


@pytest.mark.usefixtures("settled")
def test_every_event_that_a_program_can_make(guest: Guest) -> None:
    """PORT_ACTIVE and PORT_ERR are in test_life.py: the driver makes them by itself."""
    guest.write_file("/root/events.py", PROGRAM.read_bytes())
    output = guest.check("python3 /root/events.py vmw_pvrdma0 1")
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["event"].removeprefix("IBV_EVENT_") for event in events] == [
        "COMM_EST",
        "SRQ_LIMIT_REACHED",
        "QP_LAST_WQE_REACHED",
        "SQ_DRAINED",
        "QP_ACCESS_ERR",
        "CQ_ERR",
    ]
    assert guest_errors(guest) == {}
