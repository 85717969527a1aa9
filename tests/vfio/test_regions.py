"""BARs and configuration space, and what happens when the device model has a bug."""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable

import pytest
from vfu_client import CONFIG_REGION, VfioError, VfuClient
from vfu_server import BAR1_SIZE, BAR2_SIZE, IDENTITY, PAGE, Server

from pvrdma_server.errors import TransportError
from pvrdma_server.vfio_user import Bar, MmapArea, ResetReason

COMMAND = 4
BAR0 = 0x10
MSIX = 0x11


@pytest.mark.parametrize("bar", [0, 1, 2])
def test_reads_of_all_sizes_and_alignments(server: Server, bar: int) -> None:
    if bar:
        server.device.bars[bar][:64] = bytes(range(64))
    with VfuClient(server.path) as client:
        whole = client.read(bar, 0, 64)
        for length in (1, 2, 3, 4, 5, 7, 8, 16, 33):
            for offset in range(9):
                assert client.read(bar, offset, length) == whole[offset : offset + length]


@pytest.mark.parametrize(
    ("bar", "size"), [(0, 0x4000), (1, BAR1_SIZE), (2, BAR2_SIZE), (3, 0), (8, 0), (9, 0), (77, 0)]
)
def test_access_past_the_end_is_an_error_that_the_model_never_sees(
    server: Server, bar: int, size: int
) -> None:
    with VfuClient(server.path) as client:
        for offset, length in (
            (size, 1),
            (size, 8),
            (max(size - 1, 0), 2),
            ((1 << 64) - 4, 4),
            ((1 << 64) - 4, 8),
        ):
            with pytest.raises(VfioError) as caught:
                client.read(bar, offset, length)
            assert caught.value.errno == errno.EINVAL
            with pytest.raises(VfioError):
                client.write(bar, offset, bytes(length))
        if size:
            assert len(client.read(bar, size - 8, 8)) == 8
    assert server.events_logged("vfu.library")


def test_writes_reach_the_model_as_they_are(server: Server) -> None:
    with VfuClient(server.path) as client:
        client.write(1, 3, b"abcde")
        client.write_u32(2, 0, 0xDEADBEEF)
        assert server.device.next_event() == ("write", 1, 3, b"abcde")
        assert server.device.next_event() == ("write", 2, 0, b"\xef\xbe\xad\xde")


def test_posted_writes_are_in_order_with_the_read_that_follows(server: Server) -> None:
    with VfuClient(server.path) as client:
        for value in range(500):
            client.post_write(1, 8, value.to_bytes(4, "little"))
        assert client.read_u32(1, 8) == 499


def test_a_failing_posted_write_has_no_reply(server: Server) -> None:
    with VfuClient(server.path) as client:
        client.post_write(1, BAR1_SIZE, b"1234")
        assert client.read_u32(1, 0) == 0


def test_exactly_the_mmap_areas_are_offered(server: Server) -> None:
    with VfuClient(server.path) as client:
        info = client.region_info(2)
        assert info.size == BAR2_SIZE
        assert info.areas == ((PAGE, BAR2_SIZE - PAGE),)
        assert info.flags == 0xF
        for index in (0, 1):
            assert client.region_info(index).flags == 0x3
        with mmap.mmap(info.fds[0], PAGE, offset=info.offset + PAGE) as page:
            page[:4] = b"ring"
        assert len(info.fds) == 1  # QEMU accepts no more
        os.close(info.fds[0])
    assert os.pread(server.bar2_fd, 4, PAGE) == b"ring"


def test_region_info_of_what_does_not_exist(server: Server) -> None:
    with VfuClient(server.path) as client:
        assert client.region_info(5).size == 0
        with pytest.raises(VfioError):
            client.region_info(10)


def test_msix_table_is_memory_and_pending_bits_are_read_only(server: Server) -> None:
    with VfuClient(server.path) as client:
        assert client.read_u32(0, 12) == 1
        client.write(0, 16, bytes(range(16)))
        assert client.read(0, 16, 16) == bytes(range(16))
        client.write(0, 0x1000, b"\xff" * 8)
        assert client.read(0, 0x1000, 8) == bytes(8)
        client.write(0, 40, b"\xee" * 16)  # the end of the table is at 48
        assert client.read(0, 40, 16) == b"\xee" * 8 + bytes(8)
        client.reset()
        assert client.read(0, 16, 16) == bytes(12) + b"\1\0\0\0"
    server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
    with VfuClient(server.path) as client:
        assert client.read(0, 32, 16) == bytes(12) + b"\1\0\0\0"


def test_the_model_never_sees_bar_0(server: Server) -> None:
    with VfuClient(server.path) as client:
        client.write_u32(0, 0, 1)
        client.read_u32(0, 0)
    assert server.device.next_event() == ("reset", ResetReason.LOST_CONNECTION)


def test_configuration_header(server: Server) -> None:
    with VfuClient(server.path) as client:
        config = client.read(CONFIG_REGION, 0, 256)
        cap = client.capability(MSIX)
    assert config[:4] == bytes.fromhex("ad152008")
    assert config[8:12] == bytes([IDENTITY.revision, 0x00, 0x80, 0x02])
    assert config[0x2C:0x30] == bytes.fromhex("ad152008")
    assert config[BAR0 : BAR0 + 24] == bytes(24)
    assert config[6] & 0x10  # has capabilities
    assert config[0x3D] == 1  # INTA
    assert config[cap + 2 : cap + 12] == bytes.fromhex("0200 00000000 00100000".replace(" ", ""))


@pytest.mark.parametrize("value", [0x0040, 0x0200, 0x0547, 0xFFFF, 0x0000])
def test_any_command_write_succeeds(server: Server, value: int) -> None:
    with VfuClient(server.path) as client:
        client.set_command(value)
        assert int.from_bytes(client.read(CONFIG_REGION, COMMAND, 2), "little") == value & 0x0757


def test_bus_master_changes_are_told_once(server: Server) -> None:
    with VfuClient(server.path) as client:
        for value in (0x2, 0x6, 0x7, 0x3, 0x6):
            client.set_command(value)
        client.reset()
        assert client.read(CONFIG_REGION, COMMAND, 2) == bytes(2)
    events = [server.device.next_event() for _ in range(6)]
    assert [event[1] for event in events[:4]] == [True, False, True, False]
    assert events[4:] == [("reset", ResetReason.DEVICE), ("reset", ResetReason.LOST_CONNECTION)]


def test_bar_sizing(server: Server) -> None:
    with VfuClient(server.path) as client:
        for index, size in enumerate((0x4000, BAR1_SIZE, BAR2_SIZE, None)):
            register = BAR0 + 4 * index
            client.write_u32(CONFIG_REGION, register, 0xFFFFFFFF)
            assert client.read_u32(CONFIG_REGION, register) == (
                0 if size is None else (1 << 32) - size
            )
            client.write_u32(CONFIG_REGION, register, 0xFEB00000)
            assert client.read_u32(CONFIG_REGION, register) == (0 if size is None else 0xFEB00000)


def test_writes_of_all_places_and_sizes_succeed_and_ids_stay(server: Server) -> None:
    with VfuClient(server.path) as client:
        before = client.read(CONFIG_REGION, 0, 256)
        for length in (1, 2, 4, 8):
            for offset in range(0, 257 - length, length):
                client.write(CONFIG_REGION, offset, b"\xff" * length)
        after = client.read(CONFIG_REGION, 0, 256)
        client.write(CONFIG_REGION, 0, bytes(256))
    for fixed in (slice(0, 4), slice(6, 12), slice(0x2C, 0x3C), slice(0x3D, 0x42)):
        assert after[fixed] == before[fixed]
    assert not server.events_logged("vfu.library")[1:]


def test_a_64_bit_bar(start_server: Callable[..., Server]) -> None:
    server = start_server(bars=(Bar(2, 1 << 20, None, (), is_64bit=True),))
    with VfuClient(server.path) as client:
        assert client.read_u32(CONFIG_REGION, 0x18) == 0x4
        client.write_u32(CONFIG_REGION, 0x18, 0xFFFFFFFF)
        client.write_u32(CONFIG_REGION, 0x1C, 0xFFFFFFFF)
        assert client.read_u32(CONFIG_REGION, 0x18) == 0xFFF00004
        assert client.read_u32(CONFIG_REGION, 0x1C) == 0xFFFFFFFF
        assert client.region_info(2).size == 1 << 20


@pytest.mark.parametrize(
    "bars",
    [
        (Bar(0, PAGE, None, (), is_64bit=False),),
        (Bar(6, PAGE, None, (), is_64bit=False),),
        (Bar(1, PAGE, None, (), is_64bit=False), Bar(1, PAGE, None, (), is_64bit=False)),
        (Bar(1, PAGE, None, (MmapArea(0, PAGE),), is_64bit=False),),
        (Bar(1, PAGE, 0, (), is_64bit=False),),
        (Bar(1, PAGE, 0, (MmapArea(PAGE, PAGE),), is_64bit=False),),
        (Bar(1, 2 * PAGE, 0, (MmapArea(0, PAGE), MmapArea(PAGE, PAGE)), is_64bit=False),),
    ],
    ids=["ours", "no-such", "twice", "no-fd", "no-area", "outside", "two-areas"],
)
def test_impossible_bars_are_refused(
    start_server: Callable[..., Server], socket_path: str, bars: tuple[Bar, ...]
) -> None:
    with pytest.raises(TransportError):
        start_server(bars=bars)
    assert not os.path.exists(socket_path)


def test_device_reset(server: Server) -> None:
    with VfuClient(server.path) as client:
        client.enable_msix()
        assert server.call(server.context.msix_enabled)
        client.reset()
        assert not server.call(server.context.msix_enabled)
    assert server.device.next_event() == ("reset", ResetReason.DEVICE)


def test_a_bug_in_the_model_is_an_error_reply_and_ends_serve(server: Server) -> None:
    bug = ZeroDivisionError("ours")
    with VfuClient(server.path) as client:
        server.device.failure = bug
        with pytest.raises(VfioError) as caught:
            client.read_u32(1, 0)
        assert caught.value.errno == errno.EIO
        assert client.hung_up()
    assert server.join() is not None
    assert root_cause(server.error) is bug
    assert server.context.counters.callback_errors >= 1


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.write_u32(1, 0, 1),
        lambda client: client.post_write(1, 0, b"1"),
        lambda client: client.reset(),
        lambda client: client.dma_map(0, PAGE),
        lambda client: client.close(),
        lambda client: client.set_command(4),
    ],
    ids=["write", "posted", "reset", "map", "leave", "bus-master"],
)
def test_a_bug_anywhere_ends_serve(server: Server, act: Callable[[VfuClient], None]) -> None:
    with VfuClient(server.path) as client:
        bug = server.device.failure = KeyError("ours")
        with contextlib.suppress(VfioError, ConnectionError):
            act(client)
    server.join()
    assert root_cause(server.error) is bug


def test_a_read_of_the_wrong_length_is_a_bug(server: Server) -> None:
    server.device.bars[1] = bytearray(2)
    with VfuClient(server.path) as client, pytest.raises(VfioError):
        client.read_u32(1, 0)
    server.join()
    assert isinstance(root_cause(server.error), ValueError)


def root_cause(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        assert len(error.exceptions) == 1
        error = error.exceptions[0]
    return error
