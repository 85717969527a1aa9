"""The bed every command test lies in."""

import pytest
from guest import Qp, UserProcess, World
from hypothesis import settings
from unit.bed import GID, Bed, ready
from unit.vms import Pair, Vm

from pvrdma_server.backend_soft import LocalFabric

# How long an example takes on a loaded machine says nothing.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


@pytest.fixture
def bed() -> Bed:
    return Bed()


@pytest.fixture
def user(bed: Bed) -> UserProcess:
    return UserProcess(bed.driver)


@pytest.fixture
def qp(bed: Bed, user: UserProcess) -> Qp:
    bed.kernel.add_gid(GID)
    return ready(Qp(user))


@pytest.fixture
def pair() -> Pair:
    world, fabric = World(), LocalFabric()
    return Pair(*(Vm(world, fabric, number) for number in range(2)))
