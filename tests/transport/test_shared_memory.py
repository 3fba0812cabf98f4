from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.transport.arena import Arena
from headrace.transport.free_list import FreeList
from headrace.transport.mappings import SegmentMappings
from headrace.transport.shared_memory import (
    BufferLocation,
    MemoryReport,
    ProcessIdentity,
    SegmentOffer,
    SharedMemoryOptions,
    current_process_identity,
)

PAGE = 4096
MIB = 1 << 20


class FreeListMachine(RuleBasedStateMachine):
    """Compares a free list with a simple byte map."""

    def __init__(self):
        super().__init__()
        self.free = FreeList(20 * PAGE + 5)
        self.pages = [None] * 20
        self.taken: dict[int, int] = {}

    @rule(size=st.integers(1, 8 * PAGE))
    def take(self, size):
        count = -(-size // PAGE)
        fits = [
            at
            for at in range(21 - count)
            if all(page is None for page in self.pages[at : at + count])
        ]
        start = self.free.allocate(size)
        assert start == (fits[0] * PAGE if fits else None), "first fit"
        if start is not None:
            self.taken[start] = count
            for page in range(fits[0], fits[0] + count):
                self.pages[page] = start

    @rule(data=st.data())
    def put_back(self, data):
        if not self.taken:
            return
        start = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[start]
        self.free.release(start)
        self.pages = [None if page == start else page for page in self.pages]

    @rule(start=st.integers(-1, 20 * PAGE))
    def put_back_what_was_not_taken(self, start):
        if start not in self.taken:
            with pytest.raises(KeyError):
                self.free.release(start)

    @invariant()
    def counts_agree(self):
        assert self.free.free_bytes == PAGE * sum(page is None for page in self.pages)


TestFreeList = FreeListMachine.TestCase


@given(st.lists(st.integers(1, 3 * PAGE), max_size=20), st.randoms(use_true_random=False))
def test_free_list_is_one_gap_after_all_releases(sizes, chance):
    free = FreeList(32 * PAGE)
    starts = [start for size in sizes if (start := free.allocate(size)) is not None]
    chance.shuffle(starts)
    for start in starts:
        free.release(start)
    assert free.allocate(32 * PAGE) == 0


@pytest.fixture
def identity() -> ProcessIdentity:
    identity = current_process_identity()
    if identity is None:
        pytest.fail("this system has no memfd or no /proc; the carrier falls back to sockets")
    return identity


@pytest.fixture
def arena(identity):
    arena = Arena(identity, SharedMemoryOptions(segment_bytes=MIB, total_bytes=2 * MIB))
    yield arena
    arena.close()


def place(arena: Arena, mappings: SegmentMappings, data: list[bytes]) -> BufferLocation:
    """Place buffers, and accept segments as they are offered."""
    placed = arena.write([memoryview(buffer) for buffer in data])
    if isinstance(placed, SegmentOffer):
        mappings.open_segment(placed)
        arena.apply_report(mappings.take_report())
        placed = arena.write([memoryview(buffer) for buffer in data])
    assert isinstance(placed, BufferLocation)
    arena.mark_sent(placed)
    return placed


def test_buffers_cross_aligned_and_writable(arena: Arena):
    mappings = SegmentMappings()
    data = [b"a" * 20_001, b"", b"b" * 63, b"c" * 50_000]
    views = mappings.view(place(arena, mappings, data))
    assert [bytes(view) for view in views] == data
    for view in views:
        assert not view.readonly
        if view.nbytes:
            assert np.frombuffer(view, np.uint8).ctypes.data % 64 == 0


def test_small_replies_use_the_socket(arena: Arena):
    assert arena.write([memoryview(bytes(1000))]) is None


def test_segment_is_unused_until_it_is_accepted(arena: Arena):
    buffer = [memoryview(bytes(50_000))]
    assert isinstance(arena.write(buffer), SegmentOffer)
    assert arena.write(buffer) is None


def test_refused_segment_disables_shared_memory(arena: Arena):
    buffer = [memoryview(bytes(50_000))]
    offer = arena.write(buffer)
    arena.apply_report(MemoryReport(refused=(offer.segment,)))
    assert arena.write(buffer) is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(offer.fd)


def test_offer_that_cannot_be_opened_is_refused():
    mappings = SegmentMappings()
    mappings.open_segment(SegmentOffer(1, os.getpid(), 999_999, 5, MIB))
    assert mappings.take_report() == MemoryReport(refused=(1,))


def test_another_file_with_the_same_number_is_refused(arena: Arena):
    offer = arena.write([memoryview(bytes(50_000))])
    mappings = SegmentMappings()
    mappings.open_segment(
        SegmentOffer(offer.segment, offer.pid, offer.fd, offer.inode + 1, offer.size)
    )
    assert mappings.take_report() == MemoryReport(refused=(offer.segment,))


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view,
        lambda view: view[5:10],
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.frombuffer(view, np.uint8)[3:][::2].reshape(-1, 1).T,
        lambda view: np.asarray(view)[7:],
        lambda view: memoryview(np.frombuffer(view, np.float32)),
    ],
    ids=["view", "slice", "array", "array-slices", "asarray", "view-of-array"],
)
def test_slot_is_held_by_arrays_made_from_its_views(arena: Arena, derive):
    mappings = SegmentMappings()
    kept = derive(mappings.view(place(arena, mappings, [b"x" * 40_000]))[0])
    gc.collect()
    assert mappings.take_report() is None
    assert arena.slots_in_use == 1
    del kept
    arena.apply_report(mappings.take_report())
    assert arena.slots_in_use == 0


def test_released_slots_are_reused(arena: Arena):
    mappings = SegmentMappings()
    offsets = set()
    for n in range(50):
        placement = place(arena, mappings, [bytes([n]) * 300_000])
        offsets.add((placement.segment, placement.offset))
        views = mappings.view(placement)
        assert bytes(views[0]) == bytes([n]) * 300_000
        del views
        arena.apply_report(mappings.take_report())
    assert len(offsets) == 1


def test_exhausted_memory_does_not_block(arena: Arena):
    mappings = SegmentMappings()
    buffers = [b"x" * 500_000]
    held = []
    for _ in range(3):
        held.append(mappings.view(place(arena, mappings, buffers)))
    for _ in range(10):
        placed = arena.write([memoryview(buffers[0])])
        if placed is None:
            break
        if isinstance(placed, BufferLocation):
            arena.mark_sent(placed)
            held.append(mappings.view(placed))
        else:
            mappings.open_segment(placed)
            arena.apply_report(mappings.take_report())
    assert placed is None
    assert len(held) == 4, "2 MiB hold four slots of half a MB"


def test_reply_larger_than_the_budget_uses_the_socket(arena: Arena):
    assert arena.write([memoryview(bytes(3 * MIB))]) is None


def test_views_outlive_both_ends(arena: Arena):
    mappings = SegmentMappings()
    views = mappings.view(place(arena, mappings, [b"x" * 40_000]))
    arena.close()
    arena.close()
    mappings.clear()
    assert bytes(views[0]) == b"x" * 40_000
    views[0][0] = 1
    assert arena.write([memoryview(bytes(50_000))]) is None


def test_releases_of_unknown_slots_are_ignored(arena: Arena):
    mappings = SegmentMappings()
    placement = place(arena, mappings, [b"x" * 40_000])
    arena.apply_report(MemoryReport(released=(1, placement.slot, placement.slot), accepted=(5,)))
    assert arena.slots_in_use == 0


def test_process_with_a_reused_pid_does_not_count_as_alive(
    identity: ProcessIdentity,
):
    assert identity.is_alive()
    assert identity.shares_memory_with(identity)
    other = ProcessIdentity(
        "another boot", identity.pid_namespace, identity.uid, identity.pid, identity.start_time + 1
    )
    assert not other.is_alive()
    assert not other.shares_memory_with(identity)


@pytest.mark.parametrize("name", ["segment_bytes", "total_bytes", "smallest_reply"])
def test_invalid_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        SharedMemoryOptions(**{name: 0})
