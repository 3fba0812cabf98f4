"""What each consumer reads of a stream in order: a reader in, elements and places out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.service.modes.ordered.ordered_readers import (
    ConsumerConfig,
    ConsumerReader,
    FullStreamReader,
)


class Listed:
    """Reads elements of one row each; a place is the number of the next one."""

    def __init__(self, elements: int, start: int = 0) -> None:
        self._elements, self._next = elements, start

    def place(self, number: int) -> dict[str, Any]:
        return {"at": number}

    def read(self, limit: int) -> Chunk | None:
        first = self._next
        self._next = min(first + limit, self._elements)
        rows = [np.array([number]) for number in range(first, self._next)]
        return Chunk.of_rows(rows, lambda index: self.place(first + index)) if rows else None

    def get_position(self) -> dict[str, Any]:
        return self.place(self._next)

    def close(self) -> None: ...


def read(reader: FullStreamReader, limit: int) -> tuple[list[list[int]], list[Any]]:
    """Return the remaining elements, and the place before each chunk and at the end."""
    rows: list[list[int]] = []
    places = [reader.get_position()]
    while (chunk := reader.read(limit)) is not None:
        assert chunk.state_at(chunk.size) == reader.get_position()
        rows += [row.tolist() for row in chunk.rows()]
        places.append(reader.get_position())
    return rows, places


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize(
    ("remainder", "index", "rest"),
    [
        ("drop", 0, []),
        ("pad", 0, [[6]]),
        ("pad", 2, [[]]),
        ("end_together", 0, [[6]]),
        ("end_together", 1, [[7]]),
    ],
)
def test_each_round_has_an_element_for_each_and_a_place_at_its_end(
    remainder: str, index: int, rest: list[list[int]], limit: int
) -> None:
    turn = ConsumerConfig(index, 3, remainder)
    whole = [[index], [3 + index], *rest]
    rows, places = read(FullStreamReader(Listed(8, 0), turn), limit)
    assert rows == whole
    assert places[-1] == {"at": 8 if rest else 6}
    for place in places:
        left, _ = read(FullStreamReader(Listed(8, place["at"]), turn), limit)
        assert left == whole[math.ceil(place["at"] / 3) :]


class PartOfAJob(Listed):
    def place(self, number: int) -> dict[str, Any]:
        return {"splits": {"split": number, "ordinal": 0}, "seed": 9}


class PartsOfAJob:
    """Source of the parts of range(7), in a job whose seed is 9."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, plan: object, is_named: bool) -> PartsOfAJob:
        return self

    def with_seed(self, seed: int) -> PartsOfAJob:
        self.seeds.append(seed)
        return self

    def open(self, *args: object, **options: object) -> Listed:
        return PartOfAJob(3 if len(self.seeds) == 1 else 1)


def test_the_seed_of_the_job_is_that_of_places_and_of_the_last_elements() -> None:
    parts: Any = PartsOfAJob()
    plan = hr.Dataset.range(7).plan
    reader = ConsumerReader(parts, ConsumerConfig(0, 2, "pad"), plan, None, epoch=(0,), seed=1)
    assert reader.read(3) is not None
    assert reader.get_position()["seed"] == 9
    assert reader.read(3) is not None
    assert reader.read(3) is None
    assert parts.seeds == [1, 9]
