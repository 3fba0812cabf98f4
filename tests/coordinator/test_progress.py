"""Progress of an epoch of a shared dataset, whose elements are used in any order."""

from __future__ import annotations

import json
import random

import pytest

from headrace.coordinator.shared_dataset import EpochProgress


def read(progress: EpochProgress, elements: list[int], count: int) -> list[tuple[int, int]]:
    """Read elements; the position of the reader is the number of its next element."""
    found = []
    for _ in range(count):
        if progress.wants_position:
            progress.record_position(len(elements))
        number = progress.record_read()
        elements.append(len(elements))
        if number is not None:
            found.append((number, elements[-1]))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_exactly_the_unused_elements_are_delivered_again(seed: int):
    rng = random.Random(seed)
    used: set[int] = set()
    progress, start = EpochProgress(3), 0
    for _ in range(6):
        elements = list(range(start))
        under_way: list[tuple[int, int]] = []
        for _ in range(rng.randrange(40)):
            under_way += read(progress, elements, rng.randrange(20))
            if rng.random() < 0.3:
                progress.get_state()
            rng.shuffle(under_way)
            for _ in range(rng.randrange(1 + len(under_way))):
                number, element = under_way.pop()
                assert element not in used
                progress.mark_used([number])
                used.add(element)
        place, ranges = json.loads(json.dumps(progress.get_state()))
        assert place <= min(set(range(2000)) - used)
        progress, start = EpochProgress(3, ranges), place
        progress.record_position(place)
    left = [element for _, element in read(progress, list(range(start)), 2000 - start)]
    assert sorted([*left, *used]) == list(range(2000))


def test_positions_are_recorded_once_then_regularly_after_the_first_state():
    progress = EpochProgress(0)
    elements: list[int] = []
    progress.mark_used([number for number, _ in read(progress, elements, 1000)])
    assert progress.get_state() == (0, [[0, 1000]])
    progress.mark_used([number for number, _ in read(progress, elements, 100)])
    assert progress.get_state() == (1064, [[0, 36]])
