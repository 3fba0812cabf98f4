"""What an intake has in hand, and what was put back into it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.element.chunk import Chunk
from headrace.execution.intake import Intake
from headrace.execution.places import of_positions

from .contract import ListIterator


class Placed(ListIterator):
    """Yields chunks whose elements know the numbers of their places."""

    def next_chunk(self, limit: int) -> Chunk | None:
        start = self.at
        chunk = super().next_chunk(limit)
        return chunk and chunk.with_places(of_positions(start, chunk.size))


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_an_element_that_is_put_back_keeps_its_place(taken: int) -> None:
    """The first of a chunk, one in its middle, its last."""
    intake = Intake(Placed([np.int64(number) for number in range(10, 13)]))
    intake.look(3)
    for _ in range(taken):
        before = intake.later_state()
        row = intake.next_row()

    intake.put_back(row, before)

    assert intake.get_state() == taken - 1
    chunk = intake.take(1)
    assert chunk is not None
    assert (chunk.rows(), chunk.state_at(0), chunk.state_at(1)) == ([row], taken - 1, taken)
    assert chunk.places is not None
    assert chunk.places.tolist() == of_positions(taken - 1, 1).tolist()
    rest = [] if taken == 3 else intake.take(3).rows()
    assert rest == list(range(10 + taken, 13))
