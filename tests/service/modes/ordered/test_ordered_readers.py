"""Readers of ordered consumers: a reader in, elements and positions out."""

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


class ListReader:
    """Reads elements of one row each; a position is the number of the next element."""

    def __init__(self, elements: int, start: int = 0) -> None:
        self._elements, self._next = elements, start

    def position(self, number: int) -> dict[str, Any]:
        return {"index": number}

    def read(self, limit: int) -> Chunk | None:
        first = self._next
        self._next = min(first + limit, self._elements)
        rows = [np.array([number]) for number in range(first, self._next)]
        return Chunk.of_rows(rows, lambda index: self.position(first + index)) if rows else None

    def get_position(self) -> dict[str, Any]:
        return self.position(self._next)

    def close(self) -> None: ...


def read(reader: FullStreamReader, limit: int) -> tuple[list[list[int]], list[Any]]:
    """Return the remaining elements, and the positions before each chunk and at the end."""
    rows: list[list[int]] = []
    positions = [reader.get_position()]
    while (chunk := reader.read(limit)) is not None:
        assert chunk.state_at(chunk.size) == reader.get_position()
        rows += [row.tolist() for row in chunk.rows()]
        positions.append(reader.get_position())
    return rows, positions


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize(
    ("remainder", "index", "remainder_elements"),
    [
        ("drop", 0, []),
        ("pad", 0, [[6]]),
        ("pad", 2, [[]]),
        ("end_together", 0, [[6]]),
        ("end_together", 1, [[7]]),
    ],
)
def test_each_round_yields_one_element_and_a_position_after_it(
    remainder: str, index: int, remainder_elements: list[list[int]], limit: int
) -> None:
    consumer = ConsumerConfig(index, 3, remainder)
    expected = [[index], [3 + index], *remainder_elements]
    rows, positions = read(FullStreamReader(ListReader(8, 0), consumer), limit)
    assert rows == expected
    assert positions[-1] == {"index": 8 if remainder_elements else 6}
    for position in positions:
        remaining, _ = read(FullStreamReader(ListReader(8, position["index"]), consumer), limit)
        assert remaining == expected[math.ceil(position["index"] / 3) :]


class JobReader(ListReader):
    def position(self, number: int) -> dict[str, Any]:
        return {"splits": {"split": number, "ordinal": 0}, "seed": 9}


class JobSource:
    """Source of the derived plans of range(7), in a job whose seed is 9."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, plan: object, is_named: bool) -> JobSource:
        return self

    def with_seed(self, seed: int) -> JobSource:
        self.seeds.append(seed)
        return self

    def open(self, *args: object, **options: object) -> ListReader:
        return JobReader(3 if len(self.seeds) == 1 else 1)


def test_the_seed_of_the_job_is_used_for_positions_and_the_remainder() -> None:
    source: Any = JobSource()
    plan = hr.Dataset.range(7).plan
    reader = ConsumerReader(source, ConsumerConfig(0, 2, "pad"), plan, None, epoch=(0,), seed=1)
    assert reader.read(3) is not None
    assert reader.get_position()["seed"] == 9
    assert reader.read(3) is not None
    assert reader.read(3) is None
    assert source.seeds == [1, 9]
