"""rdma-core's own Python tests on this device: each one does what rdma_core_expected.toml says, and nothing is left."""

import pytest
from pvrdma_lab import Guest
from vm.rdma_core import differences, expected, run
from vm.server_state import assert_same, guest_errors, held


@pytest.mark.parametrize("lab", ["mapped", "trapped"], indirect=True, scope="module")
def test_rdma_core_tests_do_what_is_listed(guest: Guest) -> None:
    before = held(guest)
    outcomes = run(guest)
    assert differences(expected(), outcomes) == []
    assert_same(guest, before)
    # The suite asks for 65535 elements, and for what else the device must refuse; it forges nothing.
    assert set(guest_errors(guest)) <= {"bad_command"}
