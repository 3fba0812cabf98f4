"""Invariants of the closure queue."""

from __future__ import annotations

from collections import Counter

from headrace.coordinator.closure import ClosurePhase
from headrace.coordinator.closure_queue import ClosureQueue


def check(queue: ClosureQueue, staleness: int | None = None) -> None:
    """Raise AssertionError if the queue is inconsistent."""
    unsettled = queue.unfinished
    assert all(number >= queue.low_watermark for number in unsettled)
    assert queue.low_watermark == queue.last_number + 1 or queue.low_watermark in unsettled
    occurrences: Counter[int] = Counter()
    for load in queue.worker_pool:
        for closure in load.in_flight.values():
            assert closure.phase is ClosurePhase.SENT
            assert (closure.worker, closure.session) == (load.worker, load.session)
            if closure.pinned_worker is None:
                occurrences[closure.number] += 1
                assert staleness is None or queue.low_watermark >= closure.number - staleness
            else:
                assert closure.pinned_worker == load.worker
        begun = [each for each in load.in_flight.values() if each.started_at is not None]
        assert len(begun) >= min(load.threads, len(load.in_flight))
    for closures in queue._awaiting_fence.values():
        for closure in closures:
            assert closure.phase is ClosurePhase.FENCING
            occurrences[closure.number] += 1
    heap = [closure for _, closure in queue._ready._heap if closure.phase is ClosurePhase.READY]
    assert len({id(each) for each in heap}) == len(heap)
    for closure in heap:
        occurrences[closure.number] += 1
    waiting = 0
    for number, closure in unsettled.items():
        assert closure.number == number
        assert closure.pinned_worker is None
        if closure.phase in (ClosurePhase.WAITING_FOR_INPUTS, ClosurePhase.COMPLETING):
            assert occurrences[number] == 0
            occurrences[number] += 1
        waiting += closure.phase in (ClosurePhase.WAITING_FOR_INPUTS, ClosurePhase.READY)
        if closure.phase in (ClosurePhase.WAITING_FOR_INPUTS, ClosurePhase.READY):
            assert not closure.result.is_ready
        if closure.phase is ClosurePhase.WAITING_FOR_INPUTS:
            assert closure.num_unready_inputs > 0
        if closure.phase is ClosurePhase.COMPLETING:
            assert closure.result.is_ready
    assert occurrences == Counter(dict.fromkeys(unsettled, 1))
    assert waiting == queue.num_waiting
    if queue.failure is not None:
        assert not heap
    _check_key_cleanup(queue, staleness)


def _check_key_cleanup(queue: ClosureQueue, staleness: int | None) -> None:
    """Key cleanup is delayed only if no caller waits for it."""
    settling = queue._key_cleanup
    assert all(number >= queue.first_unended for number in unended(queue))
    for number in settling._numbers:
        assert queue.unfinished[number].phase is ClosurePhase.COMPLETING
        assert not queue.unfinished[number].is_cancelled
    if settling._numbers:
        assert staleness is None
        assert queue.failure is None
        least = min(settling._numbers)
        assert not any(
            least <= number < queue.first_unended for number in settling._awaited_numbers
        )


def unended(queue: ClosureQueue) -> list[int]:
    """Return the numbers of closures that have not ended."""
    return [
        number
        for number, each in queue.unfinished.items()
        if each.phase is not ClosurePhase.COMPLETING
    ]
