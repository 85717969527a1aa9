"""The bed every command test lies in."""

import pytest
from guest import Qp, UserProcess
from unit.bed import GID, Bed, ready


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
