"""Indices repeated in each epoch: several short epochs form one chunk."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.execution.elements import RepeatedIndicesIterator
from headrace.plan.elements import Indices


def numbers_of(
    steps: RepeatedIndicesIterator, limits: random.Random, most: int
) -> list[tuple[int, Any]]:
    """Return numbers, each with the state before it."""
    found: list[tuple[int, Any]] = []
    while len(found) < most:
        chunk = steps.next_chunk(limits.choice((1, 2, 7, 30, 100)))
        if chunk is None:
            break
        found += [(int(row), chunk.state_at(i)) for i, row in enumerate(chunk.rows())]
        assert chunk.state_at(chunk.size) == steps.get_state()
    return found[:most]


@pytest.mark.parametrize("size", [1, 2, 5, 16, 60])
@pytest.mark.parametrize("count", [None, 0, 1, 3, 40])
@pytest.mark.parametrize("start", [0, 11])
def test_repeated_indices_continue_from_any_state_or_position(
    size: int, count: int | None, start: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    node = Indices(size=size, start=start)
    most = 300
    wanted = [start + position % size for position in range(most)][
        : None if count is None else count * size
    ]
    found = numbers_of(RepeatedIndicesIterator(node, count), chance, most)
    assert [number for number, _ in found] == wanted
    for position in chance.sample(range(len(found)), min(len(found), 40)):
        state = found[position][1]
        other = RepeatedIndicesIterator(node, count)
        numbers_of(other, chance, chance.randrange(20))
        other.set_state(state)
        assert other.get_state() == state
        rest = numbers_of(other, chance, most - position)
        assert [number for number, _ in rest][: len(wanted) - position] == wanted[position:]
        other.seek(position)
        rest = numbers_of(other, chance, most - position)
        assert [number for number, _ in rest][: len(wanted) - position] == wanted[position:]


def test_short_epochs_share_a_chunk_and_long_epochs_end_their_chunk() -> None:
    short = RepeatedIndicesIterator(Indices(size=4), None).next_chunk(100)
    assert short is not None
    assert short.size == 100
    long = RepeatedIndicesIterator(Indices(size=60), None).next_chunk(100)
    assert long is not None
    assert long.size == 60, "in order, a source may read them at once"


def test_states_equal_those_of_separate_epochs() -> None:
    ahead = [
        state
        for _, state in numbers_of(RepeatedIndicesIterator(Indices(size=3), 2), random.Random(1), 9)
    ]
    assert ahead[:3] == [{"epoch": 0, "input": at} for at in range(3)]
    assert ahead[3] in ({"epoch": 0, "input": 3}, {"epoch": 1, "input": 0})
    assert ahead[4:] == [{"epoch": 1, "input": at} for at in (1, 2)]


class Counted(hr.IndexedSource):
    """Five numbers; one cannot be fetched, and its error contains the number requested."""

    size = 5
    element_spec = hr.ArraySpec((), np.int64)

    def __init__(self) -> None:
        self.asked: list[int] = []

    def gather(self, indices: np.ndarray[Any, Any]) -> Any:
        self.asked += np.ravel(indices).tolist()
        if np.any(indices == 3):
            raise ValueError("three")
        return indices * 10

    def fingerprint(self) -> str:
        return "counted"


def test_a_failing_element_fails_alone_in_each_epoch() -> None:
    got: list[Any] = []
    iterator = iter(hr.Dataset.from_source(Counted()).repeat(3))
    while len(got) < 15:
        try:
            got.append(int(next(iterator)))
        except ValueError:
            got.append("three")
    assert got == [0, 10, 20, "three", 40] * 3
    assert next(iterator, None) is None
