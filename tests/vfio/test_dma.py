"""Guest memory: mapped, unmapped, shared or not, and views that outlive it."""

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import vfu_client
from vfu_client import DMA_READ, DMA_WRITE, VfioError, VfuClient
from vfu_server import PAGE, Server

from pvrdma_server.vfio_user import ResetReason

SIZE = 1 << 20


@pytest.fixture
def ram() -> Iterator[int]:
    fd = os.memfd_create("ram")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def view_of(server: Server, iova: int) -> memoryview:
    view = server.device.regions[iova][1]
    assert view is not None
    return view


def test_both_sides_see_the_same_bytes(server: Server, ram: int) -> None:
    os.pwrite(ram, b"guest", 100)
    with VfuClient(server.path) as client:
        client.dma_map(0x4000_0000, SIZE, fd=ram)
        view = view_of(server, 0x4000_0000)
        assert server.device.regions[0x4000_0000][2]
        assert (view.nbytes, view.format, view.readonly) == (SIZE, "B", False)
        assert bytes(view[100:105]) == b"guest"
        view[200:206] = b"device"
        assert os.pread(ram, 6, 200) == b"device"
        client.dma_unmap(0x4000_0000, SIZE)
        assert not server.device.regions
        del view


@pytest.mark.parametrize("offset", [PAGE, 100, PAGE + 3])
def test_a_region_starts_anywhere_in_its_file(server: Server, ram: int, offset: int) -> None:
    os.pwrite(ram, b"here", offset)
    with VfuClient(server.path) as client:
        client.dma_map(0, 3 * PAGE, fd=ram, offset=offset)
        view = view_of(server, 0)
        assert len(view) == 3 * PAGE
        assert bytes(view[:4]) == b"here"


def test_read_only_memory_gives_a_read_only_view(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0, PAGE, fd=ram, flags=DMA_READ)
        _, view, writable = server.device.regions[0]
        assert view is not None
        assert view.readonly
        assert not writable
        client.dma_map(PAGE, PAGE, fd=ram, flags=DMA_READ | DMA_WRITE)
        assert not view_of(server, PAGE).readonly


def test_memory_without_a_descriptor_has_no_view(server: Server) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0xFEB0_0000, PAGE)
        assert server.device.regions[0xFEB0_0000] == (PAGE, None, True)
        client.dma_unmap(0xFEB0_0000, PAGE)
        assert not server.device.regions
    assert server.context.counters.dma_unusable == 0


def test_a_view_outlives_unmap_and_client(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0, SIZE, fd=ram)
        view = view_of(server, 0)[PAGE : 2 * PAGE]
        client.dma_unmap(0, SIZE)
        view[:3] = b"old"
        assert os.pread(ram, 3, PAGE) == b"old"
    server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
    assert bytes(view[:3]) == b"old"


def test_memory_is_given_back_when_the_last_view_goes(server: Server, ram: int) -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:ram" in line for line in maps)

    with VfuClient(server.path) as client:
        client.dma_map(0, SIZE, fd=ram)
        part = view_of(server, 0)[:10]
        assert mappings() == 2  # libvfio-user's and ours
        client.dma_unmap(0, SIZE)
        assert mappings() == 1
        del part
        gc.collect()
        assert mappings() == 0


def test_the_same_memory_goes_and_comes_as_during_boot(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        for _ in range(60):
            client.dma_map(0, SIZE // 2, fd=ram)
            client.dma_map(1 << 32, SIZE // 2, fd=ram, offset=SIZE // 2)
            client.dma_unmap(0, SIZE // 2)
            client.dma_unmap(1 << 32, SIZE // 2)
    assert server.context.counters.dma_maps == 120
    assert server.context.counters.dma_unmaps == 120


def test_unmap_of_unknown_is_an_error_reply(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0, SIZE, fd=ram)
        for iova, length in ((PAGE, PAGE), (0, PAGE), (SIZE, PAGE), (0, 0)):
            with pytest.raises(VfioError):
                client.dma_unmap(iova, length)
        assert server.device.regions
        assert client.read_u32(1, 0) == 0


def test_overlap_is_an_error_reply_and_the_first_stays(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(PAGE, 4 * PAGE, fd=ram)
        for iova, length in ((0, 2 * PAGE), (2 * PAGE, PAGE), (4 * PAGE, 4 * PAGE), (0, 16 * PAGE)):
            with pytest.raises(VfioError):
                client.dma_map(iova, length, fd=ram)
        assert list(server.device.regions) == [PAGE]
        client.dma_map(5 * PAGE, PAGE, fd=ram)


def test_the_same_region_again_is_no_news(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0, PAGE, fd=ram)
        client.dma_map(0, PAGE, fd=ram)
        assert server.context.counters.dma_maps == 1
        client.dma_unmap(0, PAGE)
        with pytest.raises(VfioError):
            client.dma_unmap(0, PAGE)


def test_unmap_all(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0, PAGE, fd=ram)
        client.dma_map(PAGE, PAGE)
        client.dma_unmap(0, 0, flags=vfu_client.UNMAP_ALL)
        assert not server.device.regions
        client.dma_map(0, PAGE, fd=ram)


def test_many_regions(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        for index in range(100):
            client.dma_map(index << 32, PAGE, fd=ram, offset=index * PAGE)
        view_of(server, 99 << 32)[:2] = b"ok"
    assert os.pread(ram, 2, 99 * PAGE) == b"ok"


def test_a_file_shorter_than_the_region_has_no_view(server: Server, ram: int) -> None:
    with VfuClient(server.path) as client:
        client.dma_map(0, 2 * SIZE, fd=ram)
        assert server.device.regions[0] == (2 * SIZE, None, True)
        client.dma_map(1 << 40, SIZE, fd=ram, offset=PAGE)
        assert server.device.regions[1 << 40][1] is None
    assert server.context.counters.dma_unusable == 2
    assert "cannot be mapped" in server.events_logged("vfu.dma_unusable")[0]["why"]


@pytest.mark.parametrize(
    "make", [lambda: os.eventfd(0), lambda: os.open("/dev/null", os.O_RDWR), lambda: os.pipe()[0]]
)
def test_descriptors_that_are_not_memory(server: Server, make: Callable[[], int]) -> None:
    fd = make()
    with VfuClient(server.path) as client:
        try:
            client.dma_map(0, PAGE, fd=fd)
        except VfioError:
            pass
        else:
            assert server.device.regions[0][1] is None
        assert client.read_u32(1, 0) == 0
    os.close(fd)


@pytest.mark.parametrize(
    ("iova", "length"), [(0, 0), ((1 << 64) - PAGE, 2 * PAGE), (0, 1 << 63), (PAGE, (1 << 64) - 1)]
)
def test_ranges_that_are_none(server: Server, ram: int, iova: int, length: int) -> None:
    with VfuClient(server.path) as client:
        for fd in (ram, None):
            try:
                client.dma_map(iova, length, fd=fd)
            except (VfioError, ConnectionError):
                break
    with VfuClient(server.path) as client:
        assert client.read_u32(1, 0) == 0


def test_a_region_the_model_refuses_is_not_unmapped_there(server: Server, ram: int) -> None:
    server.device.refuse_maps = True
    with VfuClient(server.path) as client:
        client.dma_map(0, PAGE, fd=ram)
        client.dma_unmap(0, PAGE)
        assert client.read_u32(1, 0) == 0
    assert server.events_logged("vfu.dma_map_refused")


@pytest.mark.parametrize("shared", [True, False])
def test_ram_that_the_client_maps_privately_is_named(server: Server, shared: bool) -> None:
    program = (
        f"import mmap, os, sys; sys.path.insert(0, {os.path.dirname(vfu_client.__file__)!r})\n"
        "import vfu_client\n"
        f"fd = os.memfd_create('ram'); os.ftruncate(fd, {SIZE})\n"
        f"ram = mmap.mmap(fd, {SIZE}, flags=mmap.{'MAP_SHARED' if shared else 'MAP_PRIVATE'})\n"
        f"client = vfu_client.VfuClient({server.path!r})\n"
        f"client.dma_map(0, {SIZE}, fd=fd); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert (server.device.regions[0][1] is not None) == shared
        process.kill()
    logged = server.events_logged("vfu.dma_unusable")
    assert bool(logged) != shared
    assert shared or "memory-backend-memfd,share=on" in logged[0]["why"]


def test_huge_pages(server: Server) -> None:
    huge = 2 << 20
    try:
        fd = os.memfd_create("huge", os.MFD_HUGETLB)
        os.ftruncate(fd, 2 * huge)
        mmap.mmap(fd, huge).close()
    except OSError:
        pytest.skip("no huge pages reserved (sysctl vm.nr_hugepages)")
    with VfuClient(server.path) as client:
        client.dma_map(0, huge // 2, fd=fd, offset=huge + huge // 4)
        view = view_of(server, 0)
        assert len(view) == huge // 2
        view[:4] = b"huge"
    with mmap.mmap(fd, huge, offset=huge) as page:
        assert page[huge // 4 : huge // 4 + 4] == b"huge"
    os.close(fd)
