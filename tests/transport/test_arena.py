"""Tests of arenas with a shared budget, and of overdue segments."""

from __future__ import annotations

import gc
import mmap
import os

import pytest

from headrace import process_metrics
from headrace.testing import HeldResources, ManualClock
from headrace.transport.arena import Arena, ArenaBudget
from headrace.transport.copying import copy_memory
from headrace.transport.mappings import SegmentMappings
from headrace.transport.shared_memory import (
    BufferLocation,
    MemoryReport,
    ProcessIdentity,
    SegmentOffer,
    SharedMemoryOptions,
    current_process_identity,
)

MIB = 1 << 20
OPTIONS = SharedMemoryOptions(
    segment_bytes=MIB, total_bytes=2 * MIB, server_bytes=3 * MIB, lease_seconds=60
)


@pytest.fixture
def identity() -> ProcessIdentity:
    identity = current_process_identity()
    assert identity is not None
    return identity


def grow(arena: Arena, mappings: SegmentMappings) -> int:
    """Make the arena offer segments up to its budget; return their number."""
    offers = 0
    while (placed := arena.write([memoryview(bytes(MIB // 4))])) is not None:
        if isinstance(placed, BufferLocation):
            arena.mark_sent(placed)
        else:
            offers += 1
            mappings.open_segment(placed)
            arena.apply_report(mappings.take_report())
    return offers


def test_budget_is_reserved_and_released_in_whole_pages():
    budget = ArenaBudget(10 * 4096 + 5)
    assert budget.reserve(6 * 4096, 4096) == 6 * 4096
    assert budget.reserve(6 * 4096, 5 * 4096) == 0
    assert budget.reserve(6 * 4096, 4096) == 4 * 4096
    assert budget.reserve(4096, 4096) == 0
    budget.release(4 * 4096)
    assert budget.reserve(4096, 4096) == 4096


def test_all_arenas_of_a_server_share_one_budget(identity: ProcessIdentity):
    budget = ArenaBudget(OPTIONS.server_bytes)
    one, other = (Arena(identity, OPTIONS, budget) for _ in range(2))
    assert grow(one, SegmentMappings()) == 2, "as many as one channel may have"
    assert grow(other, SegmentMappings()) == 1, "what is left for the server"
    one.close()
    assert grow(other, SegmentMappings()) == 1
    other.close()
    assert budget.available == OPTIONS.server_bytes


def test_overdue_segment_is_abandoned_to_the_channel(identity: ProcessIdentity, clock: ManualClock):
    budget = ArenaBudget(OPTIONS.server_bytes)
    arena = Arena(identity, OPTIONS, budget, clock=clock)
    mappings = SegmentMappings()
    offer = arena.write([memoryview(bytes(50_000))])
    mappings.open_segment(offer)
    arena.apply_report(mappings.take_report())
    before = HeldResources.capture()
    placed = arena.write([memoryview(b"x" * 50_000)])
    views = mappings.view(placed)
    clock.advance(100)
    assert arena.retire_overdue() == (), "not before it was handed to the socket"
    arena.mark_sent(placed)
    assert arena.retire_overdue() == (offer.segment,)
    assert budget.available == OPTIONS.server_bytes
    mappings.close_segments([offer.segment])
    assert bytes(views[0]) == b"x" * 50_000
    del views
    gc.collect()
    assert not HeldResources.capture().describe_leaks(before)
    assert len(HeldResources.capture().mappings) == len(before.mappings) - 2
    arena.apply_report(mappings.take_report())
    assert arena.slots_in_use == 0
    assert isinstance(arena.write([memoryview(bytes(50_000))]), SegmentOffer), "and begins again"
    arena.close()


def test_segment_with_slots_released_in_time_is_kept(identity: ProcessIdentity, clock: ManualClock):
    arena = Arena(identity, OPTIONS, clock=clock)
    mappings = SegmentMappings()
    mappings.open_segment(arena.write([memoryview(bytes(50_000))]))
    arena.apply_report(mappings.take_report())
    for _ in range(5):
        placed = arena.write([memoryview(bytes(50_000))])
        arena.mark_sent(placed)
        clock.advance(50)
        assert arena.retire_overdue() == ()
        arena.apply_report(MemoryReport(released=(placed.slot,)))
    arena.close()


def test_segment_is_retired_only_after_its_unsent_replies(identity: ProcessIdentity):
    arena = Arena(identity, OPTIONS)
    mappings = SegmentMappings()
    mappings.open_segment(arena.write([memoryview(bytes(50_000))]))
    arena.apply_report(mappings.take_report())
    placed = arena.write([memoryview(bytes(50_000))])
    arena.close()
    assert arena.bytes_mapped == MIB
    arena.mark_sent(placed)
    assert arena.bytes_mapped == 0


def test_adjacent_buffers_are_copied_at_once(identity: ProcessIdentity, monkeypatch):
    arena, mappings = Arena(identity, OPTIONS), SegmentMappings()
    mappings.open_segment(arena.write([memoryview(bytes(50_000))]))
    arena.apply_report(mappings.take_report())
    copied = []

    def copy(to: int, source: int, size: int) -> None:
        copied.append(size)
        copy_memory(to, source, size)

    monkeypatch.setattr("headrace.transport.arena.copy_memory", copy)
    whole = memoryview(os.urandom(64_000))
    cuts = [(0, 16_000), (16_000, 32_000), (40_000, 40_000), (40_000, 40_100), (40_100, 64_000)]
    pieces = [whole[start:stop] for start, stop in cuts]
    placed = arena.write(pieces)
    assert [bytes(view) for view in mappings.view(placed)] == [bytes(piece) for piece in pieces]
    # At the other end each begins at a multiple of 64 bytes.
    assert copied == [32_000, 100, 23_900]
    arena.mark_sent(placed)
    arena.close()


def refused() -> float:
    return process_metrics.REGISTRY.get_sample_value("headrace_shared_memory_refused_total") or 0.0


def offered(fd: int) -> SegmentOffer:
    found = os.fstat(fd)
    return SegmentOffer(1, os.getpid(), fd, found.st_ino, found.st_size)


def test_file_that_is_not_a_segment_is_refused_unopened_and_counted(tmp_path):
    os.mkfifo(tmp_path / "fifo")  # To open one would wait for a writer.
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 4096)
    for path in (tmp_path / "fifo", secret):
        fd = os.open(path, os.O_RDWR)
        mappings, before = SegmentMappings(), refused()
        mappings.open_segment(offered(fd))
        assert mappings.take_report() == MemoryReport(refused=(1,))
        assert refused() == before + 1
        os.close(fd)


@pytest.mark.parametrize("name", ["headrace", "other"])
def test_unsealed_memfd_is_refused_and_counted(name: str):
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, mmap.PAGESIZE)
    mappings, before = SegmentMappings(), refused()
    mappings.open_segment(offered(fd))
    assert mappings.take_report() == MemoryReport(refused=(1,))
    assert refused() == before + 1
    os.close(fd)


def test_segment_cannot_be_truncated(identity: ProcessIdentity):
    arena = Arena(identity, OPTIONS)
    offer = arena.write([memoryview(bytes(50_000))])
    with pytest.raises(PermissionError):
        os.truncate(offer.fd, 0)
    arena.close()


def test_default_server_budget_is_2_gb_or_a_quarter_of_memory():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert SharedMemoryOptions().server_bytes == min(2 << 30, memory // 4)


@pytest.mark.parametrize(
    ("field", "value"), [("server_bytes", 0), ("lease_seconds", 0.0), ("lease_seconds", -1.0)]
)
def test_invalid_bounds_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        SharedMemoryOptions(**{field: value})
