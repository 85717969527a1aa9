"""Guest memory: regions that never overlap, views across them, page directories, and pages that go and come back."""

import struct

import pytest
from guest import PAGE, GuestRam, PageDir
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.errors import BadGuestAddress
from pvrdma_server.guest_memory import (
    MAX_PDIR_PAGES,
    MAX_REGIONS,
    GuestMemory,
    GuestPages,
    walk_pdir_untrusted,
)


def ram_view(length: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * length)


def memory_of(ram: GuestRam) -> GuestMemory:
    memory = GuestMemory()
    memory.add_region(ram.iova, ram.size, ram.view, writable=True)
    return memory


@pytest.fixture
def ram() -> GuestRam:
    return GuestRam(8 << 20)


# --- regions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iova", "length"),
    [(0x2000, 0x1000), (0x1000, 0x3000), (0x3000, 0x4000), (0x0, 0x9000), (0x2000, 0x2000)],
)
def test_overlap_is_refused(iova: int, length: int) -> None:
    memory = GuestMemory()
    memory.add_region(0x2000, 0x2000, ram_view(0x2000), writable=True)
    with pytest.raises(BadGuestAddress, match="overlaps"):
        memory.add_region(iova, length, ram_view(length), writable=True)
    assert len(memory.regions) == 1


def test_neighbours_do_not_overlap() -> None:
    memory = GuestMemory()
    for iova in (0x3000, 0x1000, 0x2000):
        memory.add_region(iova, 0x1000, ram_view(0x1000), writable=True)
    assert [region.iova for region in memory.regions] == [0x1000, 0x2000, 0x3000]


@pytest.mark.parametrize("length", [0, -1, 1 << 64])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(BadGuestAddress):
        GuestMemory().add_region(0x1000, length, None, writable=True)


def test_the_last_page_of_the_address_space_is_a_region() -> None:
    memory = GuestMemory()
    memory.add_region((1 << 64) - PAGE, PAGE, ram_view(PAGE, 7), writable=True)
    assert memory.views_untrusted((1 << 64) - 1, 1) == [memoryview(b"\7")]
    with pytest.raises(BadGuestAddress):
        memory.views_untrusted((1 << 64) - 1, 2)


def test_regions_without_end_are_refused() -> None:
    memory = GuestMemory()
    for number in range(MAX_REGIONS):
        memory.add_region(number * PAGE, PAGE, None, writable=True)
    with pytest.raises(BadGuestAddress, match="more than"):
        memory.add_region(MAX_REGIONS * PAGE, PAGE, None, writable=True)


def test_only_the_exact_region_is_removed() -> None:
    memory = GuestMemory()
    memory.add_region(0x2000, 0x2000, ram_view(0x2000), writable=True)
    assert not memory.remove_region(0x2000, 0x1000)
    assert not memory.remove_region(0x3000, 0x1000)
    assert not memory.remove_region(0x0, 0x1000)
    assert memory.remove_region(0x2000, 0x2000)
    assert not memory.remove_region(0x2000, 0x2000)


# --- views ---------------------------------------------------------------------------------------------------------


def test_a_view_across_regions_is_in_parts_and_in_order() -> None:
    memory = GuestMemory()
    memory.add_region(0x2000, 0x1000, ram_view(0x1000, 2), writable=True)
    memory.add_region(0x1000, 0x1000, ram_view(0x1000, 1), writable=True)
    parts = memory.views_untrusted(0x1FFE, 4, writable=True)
    assert [bytes(part) for part in parts] == [b"\1\1", b"\2\2"]


def test_a_hole_in_the_middle_is_found() -> None:
    memory = GuestMemory()
    memory.add_region(0x1000, 0x1000, ram_view(0x1000), writable=True)
    memory.add_region(0x3000, 0x1000, ram_view(0x1000), writable=True)
    with pytest.raises(BadGuestAddress, match="nothing is mapped at 0x2000"):
        memory.views_untrusted(0x1800, 0x2000)


def test_read_only_memory_is_read_only() -> None:
    memory = GuestMemory()
    memory.add_region(0x1000, 0x1000, ram_view(0x1000).toreadonly(), writable=False)
    assert len(memory.views_untrusted(0x1000, 16)[0]) == 16
    with pytest.raises(BadGuestAddress, match="read-only"):
        memory.views_untrusted(0x1000, 16, writable=True)
    with pytest.raises(BadGuestAddress, match="read-only"):
        memory.page_untrusted(0x1000)


def test_a_region_without_a_descriptor_is_not_ram() -> None:
    memory = GuestMemory()
    memory.add_region(0x1000, 0x1000, None, writable=True)
    with pytest.raises(BadGuestAddress, match="not RAM"):
        memory.views_untrusted(0x1000, 1)


@pytest.mark.parametrize("address", [0x1001, 0x1800, 0x1FFF])
def test_a_page_is_aligned(address: int) -> None:
    memory = GuestMemory()
    memory.add_region(0x1000, 0x2000, ram_view(0x2000), writable=True)
    with pytest.raises(BadGuestAddress, match="aligned"):
        memory.page_untrusted(address)


def test_a_page_that_two_regions_share_is_no_page() -> None:
    memory = GuestMemory()
    memory.add_region(0x1000, 0x800, ram_view(0x800), writable=True)
    memory.add_region(0x1800, 0x1800, ram_view(0x1800), writable=True)
    with pytest.raises(BadGuestAddress):
        memory.page_untrusted(0x1000)
    with pytest.raises(BadGuestAddress):
        GuestPages(memory, [0x1000], writable=True)


@given(
    st.lists(
        st.tuples(st.integers(0, 15), st.integers(1, 4), st.booleans()), min_size=1, max_size=20
    ),
    st.integers(0, 18 * PAGE),
    st.integers(0, 4 * PAGE),
)
def test_views_agree_with_a_page_map(
    regions: list[tuple[int, int, bool]], address: int, length: int
) -> None:
    """Against a model: a dict from page to its fill byte."""
    memory = GuestMemory()
    model: dict[int, int] = {}
    for number, (first, count, is_ram) in enumerate(regions):
        pages = range(first, first + count)
        view = ram_view(count * PAGE, number + 1) if is_ram else None
        try:
            memory.add_region(first * PAGE, count * PAGE, view, writable=True)
        except BadGuestAddress:
            assert any(page in model for page in pages)
        else:
            assert not any(page in model for page in pages)
            model.update(dict.fromkeys(pages, number + 1 if is_ram else 0))
    touched = range(address // PAGE, -(-(address + length) // PAGE)) if length else range(0)
    if all(model.get(page) for page in touched):
        data = b"".join(memory.views_untrusted(address, length))
        assert data == bytes(model[at // PAGE] for at in range(address, address + length))
    else:
        with pytest.raises(BadGuestAddress):
            memory.views_untrusted(address, length)


# --- page directories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("npages", [1, 2, 511, 512, 513, 1024])
def test_a_directory_lists_its_pages_in_order(ram: GuestRam, npages: int) -> None:
    directory = PageDir.alloc(ram, npages)
    found = walk_pdir_untrusted(memory_of(ram), directory.dir_dma, npages)
    assert found == directory.pages


@pytest.mark.parametrize("npages", [0, -1, MAX_PDIR_PAGES + 1, 0xFFFF_FFFF])
def test_no_pages_and_too_many_are_refused(ram: GuestRam, npages: int) -> None:
    directory = PageDir.alloc(ram, 1)
    with pytest.raises(BadGuestAddress):
        walk_pdir_untrusted(memory_of(ram), directory.dir_dma, npages)


def test_more_pages_than_tables_are_refused(ram: GuestRam) -> None:
    directory = PageDir.alloc(ram, 512)
    with pytest.raises(BadGuestAddress, match="empty page directory entry"):
        walk_pdir_untrusted(memory_of(ram), directory.dir_dma, 513)


@pytest.mark.parametrize("address", [0, 8, 0x1234_5678_9000, (1 << 64) - PAGE])
def test_a_directory_that_is_nowhere_is_refused(ram: GuestRam, address: int) -> None:
    with pytest.raises(BadGuestAddress):
        walk_pdir_untrusted(memory_of(ram), address, 1)


@pytest.mark.parametrize("table", [0, 1, 0x1001, 0x7FFF_FFFF_F000])
def test_a_table_that_is_nowhere_is_refused(ram: GuestRam, table: int) -> None:
    directory = PageDir.alloc(ram, 1)
    ram.write(directory.dir_dma, struct.pack("<Q", table))
    with pytest.raises(BadGuestAddress):
        walk_pdir_untrusted(memory_of(ram), directory.dir_dma, 1)


@pytest.mark.parametrize("page", [0, 1, 0x1001, 0x7FFF_FFFF_F000])
@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_page_that_is_nowhere_is_refused(ram: GuestRam, page: int, index: int) -> None:
    memory = memory_of(ram)
    directory = PageDir.alloc(ram, 7)
    directory.set_entry(index, page)
    with pytest.raises(BadGuestAddress):
        GuestPages(memory, walk_pdir_untrusted(memory, directory.dir_dma, 7), writable=True)


def test_a_directory_that_names_itself_ends(ram: GuestRam) -> None:
    """Entries are numbers, nothing follows them: a loop is a list of the same page."""
    (page,) = ram.alloc(1)
    ram.write(page, struct.pack("<512Q", *[page] * 512))
    found = walk_pdir_untrusted(memory_of(ram), page, MAX_PDIR_PAGES)
    assert found == [page] * MAX_PDIR_PAGES


# --- pages as one space --------------------------------------------------------------------------------------------


def test_neighbouring_pages_become_one_run(ram: GuestRam) -> None:
    base = ram.alloc_contiguous(4)
    addresses = [base, base + PAGE, base + 3 * PAGE, base + 2 * PAGE]
    pages = GuestPages(memory_of(ram), addresses, writable=True)
    assert pages.runs == ((base, 2 * PAGE), (base + 3 * PAGE, PAGE), (base + 2 * PAGE, PAGE))
    assert pages.page_addresses == addresses
    assert pages.length_bytes == 4 * PAGE


@given(st.integers(0, 6 * PAGE), st.integers(0, 6 * PAGE), st.permutations(range(5)))
def test_the_linear_space_is_the_pages_in_order(offset: int, length: int, order: list[int]) -> None:
    ram = bytearray(b"".join(bytes([n + 1]) * PAGE for n in range(5)))
    memory = GuestMemory()
    memory.add_region(PAGE, 2 * PAGE, memoryview(ram)[: 2 * PAGE], writable=True)
    memory.add_region(3 * PAGE, 3 * PAGE, memoryview(ram)[2 * PAGE :], writable=True)
    pages = GuestPages(memory, [(n + 1) * PAGE for n in order], writable=True)
    if offset + length > 5 * PAGE:
        with pytest.raises(BadGuestAddress, match="outside"):
            pages.views_untrusted(offset, length)
        return
    data = b"".join(pages.views_untrusted(offset, length))
    assert data == b"".join(bytes([n + 1]) * PAGE for n in order)[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, 2 * PAGE), (PAGE, 1)])
def test_outside_the_pages_is_refused(ram: GuestRam, offset: int, length: int) -> None:
    pages = GuestPages(memory_of(ram), ram.alloc(1), writable=True)
    with pytest.raises(BadGuestAddress, match="outside"):
        pages.views_untrusted(offset, length)


def test_pages_live_through_unmap_and_map(ram: GuestRam) -> None:
    memory = memory_of(ram)
    addresses = ram.alloc(3)
    pages = GuestPages(memory, addresses, writable=True)
    pages.page_untrusted(1)[:4] = b"abcd"
    before = pages.generation
    assert memory.remove_region(ram.iova, ram.size)
    with pytest.raises(BadGuestAddress, match="nothing is mapped"):
        pages.page_untrusted(1)
    memory.add_region(ram.iova, ram.size, ram.view, writable=True)
    assert bytes(pages.page_untrusted(1)[:4]) == b"abcd"
    assert pages.generation > before


def test_pages_follow_memory_that_comes_back_elsewhere(ram: GuestRam) -> None:
    """The same guest addresses, other host memory: nobody may write to the old one."""
    memory = memory_of(ram)
    pages = GuestPages(memory, [ram.iova], writable=True)
    pages.page_untrusted(0)[:3] = b"old"
    memory.clear()
    other = ram_view(ram.size)
    memory.add_region(ram.iova, ram.size, other, writable=True)
    pages.page_untrusted(0)[:3] = b"new"
    assert ram.read(ram.iova, 3) == b"old"
    assert bytes(other[:3]) == b"new"


def test_pages_come_back_in_other_regions(ram: GuestRam) -> None:
    memory = memory_of(ram)
    base = ram.alloc_contiguous(2)
    pages = GuestPages(memory, [base, base + PAGE], writable=True)
    memory.clear()
    split = base + PAGE - ram.iova
    memory.add_region(ram.iova, split, ram.view[:split], writable=True)
    with pytest.raises(BadGuestAddress):
        pages.views_untrusted(0, 1)  # half of it is not enough
    memory.add_region(base + PAGE, ram.size - split, ram.view[split:], writable=True)
    assert [len(view) for view in pages.views_untrusted(PAGE - 2, 4)] == [2, 2]


def test_unmapping_elsewhere_leaves_views_alone(ram: GuestRam) -> None:
    memory = memory_of(ram)
    memory.add_region(1 << 40, PAGE, ram_view(PAGE), writable=True)
    pages = GuestPages(memory, ram.alloc(1), writable=True)
    before = pages.generation
    memory.remove_region(1 << 40, PAGE)
    assert pages.generation == before


def test_memory_that_comes_back_read_only_is_refused(ram: GuestRam) -> None:
    memory = memory_of(ram)
    pages = GuestPages(memory, ram.alloc(1), writable=True)
    memory.clear()
    memory.add_region(ram.iova, ram.size, ram.view.toreadonly(), writable=False)
    with pytest.raises(BadGuestAddress, match="read-only"):
        pages.page_untrusted(0)


def test_forgotten_pages_are_not_kept(ram: GuestRam) -> None:
    """Who drops a `GuestPages` is done with it: memory keeps weak references only."""
    memory = memory_of(ram)
    for _ in range(3):
        GuestPages(memory, ram.alloc(1), writable=True)
    assert len(memory._users) == 0
