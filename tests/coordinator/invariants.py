"""What holds of a queue of closures at any moment."""

from __future__ import annotations

from collections import Counter

from headrace.coordinator.closure import Phase
from headrace.coordinator.closure_queue import ClosureQueue


def check(queue: ClosureQueue, staleness: int | None = None) -> None:
    """Raise AssertionError if the queue contradicts itself."""
    unsettled = queue.unsettled
    assert all(number >= queue.low for number in unsettled)
    assert queue.low == queue.last + 1 or queue.low in unsettled
    places: Counter[int] = Counter()
    for load in queue.loads:
        for closure in load.running.values():
            assert closure.phase is Phase.SENT
            assert (closure.worker, closure.session) == (load.worker, load.session)
            if closure.home is None:
                places[closure.number] += 1
                assert staleness is None or queue.low >= closure.number - staleness
            else:
                assert closure.home == load.worker
        begun = [each for each in load.running.values() if each.begun_at is not None]
        assert len(begun) >= min(load.threads, len(load.running))
    for closures in queue._fenced.values():
        for closure in closures:
            assert closure.phase is Phase.FENCED
            places[closure.number] += 1
    heap = [closure for _, closure in queue._ready._heap if closure.phase is Phase.READY]
    assert len({id(each) for each in heap}) == len(heap)
    for closure in heap:
        places[closure.number] += 1
    waiting = 0
    for number, closure in unsettled.items():
        assert closure.number == number
        assert closure.home is None
        if closure.phase in (Phase.HELD, Phase.SETTLING):
            assert places[number] == 0
            places[number] += 1
        waiting += closure.phase in (Phase.HELD, Phase.READY)
        if closure.phase in (Phase.HELD, Phase.READY):
            assert not closure.result.is_ready
        if closure.phase is Phase.HELD:
            assert closure.missing > 0
        if closure.phase is Phase.SETTLING:
            assert closure.result.is_ready
    assert places == Counter(dict.fromkeys(unsettled, 1))
    assert waiting == queue.num_waiting
    if queue.failure is not None:
        assert not heap
    _check_settling(queue, staleness)


def _check_settling(queue: ClosureQueue, staleness: int | None) -> None:
    """Servers are told of ends a little later where nobody waits for it, and only there."""
    settling = queue._settling
    assert all(number >= queue.first for number in unended(queue))
    for number in settling._numbers:
        assert queue.unsettled[number].phase is Phase.SETTLING
        assert not queue.unsettled[number].is_off
    if settling._numbers:
        assert staleness is None
        assert queue.failure is None
        least = min(settling._numbers)
        assert not any(least <= number < queue.first for number in settling._awaited)


def unended(queue: ClosureQueue) -> list[int]:
    """Return the numbers of closures that have not ended."""
    return [number for number, each in queue.unsettled.items() if each.phase is not Phase.SETTLING]
