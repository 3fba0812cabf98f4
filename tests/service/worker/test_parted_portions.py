"""A portion of which a part was put while units were waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.element.chunk import Chunk
from headrace.service.worker.producer import Producer
from tests.service.worker.listed import SECONDS, Listed
from tests.service.worker.test_producer import Collected


def test_a_wait_for_units_says_nothing_of_how_fast_portions_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("headrace.service.worker.producer.time", clock)
    asked: list[int] = []
    waited_at: list[int] = []

    class Waits(Listed):
        def next_chunk(self, limit: int) -> Chunk | None:
            asked.append(limit)
            # In the middle of a portion, of which a part is in hand.
            if not waited_at and limit < max(asked) == 8:
                waited_at.append(len(asked))
                producer.hand_over()
                now[0] += 10.0
            return super().next_chunk(limit)

    outlet = Collected()
    iterator = Waits([[2 * pair, 2 * pair + 1] for pair in range(30)])
    producer = Producer("task-1", lambda *_: iterator, outlet, counts_units=False)
    producer.start()
    assert outlet.ended.wait(SECONDS)
    producer.join(SECONDS)
    [place] = waited_at
    assert asked[place] == 8  # the next portion may hold as much as the one that was parted
    assert [row for rows in outlet.elements() for row in rows] == list(range(60))
