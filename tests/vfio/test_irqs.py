"""Interrupts: MSI-X and INTx, armed, masked, taken away."""

import os
from collections.abc import Iterator

import pytest
import vfu_client
from vfu_client import (
    IRQ_DATA_BOOL,
    IRQ_DATA_EVENTFD,
    IRQ_DATA_NONE,
    IRQ_INTX,
    IRQ_MASK,
    IRQ_MSIX,
    IRQ_TRIGGER,
    IRQ_UNMASK,
    VfioError,
    VfuClient,
    wait_event,
)
from vfu_server import Server

from pvrdma_server.vfio_user import ResetReason


@pytest.fixture
def client(server: Server) -> Iterator[VfuClient]:
    with VfuClient(server.path) as connected:
        yield connected


@pytest.fixture
def events() -> Iterator[list[int]]:
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_counts(client: VfuClient) -> None:
    assert [client.irq_count(index) for index in range(3)] == [1, 0, 3]


def test_msix_vectors_go_to_their_eventfds(
    server: Server, client: VfuClient, events: list[int]
) -> None:
    client.enable_msix()
    client.arm(IRQ_MSIX, 0, events)
    for vector in (2, 0, 1):
        assert server.trigger(vector)
        assert wait_event(events[vector]) == 1
    assert [wait_event(fd, 0) for fd in events] == [0, 0, 0]
    assert server.context.counters.irq_triggered == 3


def test_qemu_arms_vectors_one_by_one(server: Server, client: VfuClient, events: list[int]) -> None:
    client.enable_msix()
    client.arm(IRQ_MSIX, 1, events[1:2])
    assert not server.trigger(0)
    assert server.trigger(1)
    assert wait_event(events[1]) == 1


def test_unarmed_vectors_are_counted_not_logged(server: Server, client: VfuClient) -> None:
    client.enable_msix()
    for vector in (0, 1, 2, 3, 1000):
        for _ in range(100):
            assert not server.trigger(vector)
    assert server.context.counters.irq_unarmed == 500
    assert not server.events_logged("vfu.library")


def test_without_a_client_nothing_is_armed(server: Server) -> None:
    assert not server.trigger(0)
    assert not server.call(server.context.msix_enabled)


def test_intx_stands_in_for_vector_0_only(
    server: Server, client: VfuClient, events: list[int]
) -> None:
    client.arm(IRQ_INTX, 0, events[:1])
    assert server.trigger(0)
    assert wait_event(events[0]) == 1
    assert not server.trigger(1)
    client.set_command(0x400)
    assert not server.trigger(0)


def test_with_msix_off_an_armed_vector_beyond_0_stays_quiet(
    server: Server, client: VfuClient, events: list[int]
) -> None:
    client.arm(IRQ_MSIX, 0, events)
    assert not server.trigger(2)
    assert wait_event(events[2], 0) == 0


@pytest.mark.parametrize("index", [IRQ_INTX, IRQ_MSIX])
def test_a_masked_vector_goes_out_at_unmask(
    server: Server, client: VfuClient, events: list[int], index: int
) -> None:
    client.enable_msix(enabled=index == IRQ_MSIX)
    client.arm(index, 0, events[:1])
    client.set_irqs(index, IRQ_DATA_NONE | IRQ_MASK, 0, 1)
    assert server.trigger(0)
    assert server.trigger(0)
    assert wait_event(events[0], 0) == 0
    client.set_irqs(index, IRQ_DATA_NONE | IRQ_UNMASK, 0, 1)
    assert wait_event(events[0]) == 1
    client.set_irqs(index, IRQ_DATA_NONE | IRQ_UNMASK, 0, 1)
    assert wait_event(events[0], 0) == 0
    assert server.context.counters.irq_masked == 2


def test_reset_forgets_masks(server: Server, client: VfuClient, events: list[int]) -> None:
    client.arm(IRQ_INTX, 0, events[:1])
    client.set_irqs(IRQ_INTX, IRQ_DATA_NONE | IRQ_MASK, 0, 1)
    server.trigger(0)
    client.reset()
    assert server.trigger(0)
    assert wait_event(events[0]) == 1


def test_disarm(server: Server, client: VfuClient, events: list[int]) -> None:
    client.enable_msix()
    client.arm(IRQ_MSIX, 0, events)
    client.disarm(IRQ_MSIX)
    assert not any(server.trigger(vector) for vector in range(3))


def test_a_sub_range_may_be_taken_away(
    server: Server, client: VfuClient, events: list[int]
) -> None:
    """libvfio-user leaves such vectors armed; a late interrupt is legal, a lost one for others is not."""
    client.enable_msix()
    client.arm(IRQ_MSIX, 0, events)
    client.set_irqs(IRQ_MSIX, IRQ_DATA_EVENTFD | IRQ_TRIGGER, 1, 2)
    assert server.trigger(0)
    assert wait_event(events[0]) == 1
    server.trigger(1)
    client.arm(IRQ_MSIX, 1, events[1:])
    assert server.trigger(2)


def test_the_client_may_trigger_for_itself(client: VfuClient, events: list[int]) -> None:
    client.arm(IRQ_MSIX, 0, events)
    client.set_irqs(IRQ_MSIX, IRQ_DATA_NONE | IRQ_TRIGGER, 1, 1)
    client.set_irqs(IRQ_MSIX, IRQ_DATA_BOOL | IRQ_TRIGGER, 0, 3, data=b"\1\0\1")
    assert [wait_event(fd, 0) for fd in events] == [1, 1, 1]


@pytest.mark.parametrize(
    ("index", "flags", "start", "count"),
    [
        (5, IRQ_DATA_NONE | IRQ_TRIGGER, 0, 0),
        (IRQ_MSIX, IRQ_DATA_NONE | IRQ_TRIGGER, 3, 1),
        (IRQ_MSIX, IRQ_DATA_NONE | IRQ_TRIGGER, 0, 4),
        (IRQ_MSIX, IRQ_DATA_NONE | IRQ_MASK, 0, 0),
        (IRQ_MSIX, IRQ_DATA_NONE | IRQ_MASK | IRQ_UNMASK, 0, 1),
        (IRQ_MSIX, IRQ_TRIGGER, 0, 1),
        (IRQ_MSIX, IRQ_DATA_BOOL | IRQ_TRIGGER, 0, 2),
        (1, IRQ_DATA_NONE | IRQ_TRIGGER, 0, 0),
        (3, IRQ_DATA_NONE | IRQ_MASK, 0, 1),
    ],
)
def test_bad_set_irqs_are_error_replies(
    client: VfuClient, index: int, flags: int, start: int, count: int
) -> None:
    with pytest.raises(VfioError):
        client.set_irqs(index, flags, start, count)
    assert client.read_u32(1, 0) == 0


def test_nothing_is_armed_after_the_client_left(server: Server, events: list[int]) -> None:
    with VfuClient(server.path) as client:
        client.enable_msix()
        client.arm(IRQ_MSIX, 0, events)
    server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
    assert not server.trigger(0)
    with VfuClient(server.path) as client:
        client.enable_msix()
        assert not server.trigger(0)
        assert wait_event(events[0], 0) == 0


def test_a_full_eventfd_counts_as_raised(
    server: Server, client: VfuClient, events: list[int]
) -> None:
    client.enable_msix()
    client.arm(IRQ_MSIX, 0, events)
    os.eventfd_write(events[0], (1 << 64) - 2)
    assert server.trigger(0)
    assert server.trigger(0)


def test_err_and_req_interrupts_may_be_armed(client: VfuClient, events: list[int]) -> None:
    for index in (3, 4):
        client.set_irqs(index, vfu_client.IRQ_DATA_EVENTFD | IRQ_TRIGGER, 0, 1, fds=events[:1])
