"""The bed every command test lies in."""

import pytest
from guest import UserProcess
from unit.bed import Bed


@pytest.fixture
def bed() -> Bed:
    return Bed()


@pytest.fixture
def user(bed: Bed) -> UserProcess:
    return UserProcess(bed.driver)
