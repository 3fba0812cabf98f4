"""Iterator with scripted output for the worker's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator

SECONDS = 40.0


class ScriptedIterator(ElementIterator):
    """Yields chunks and raises errors from a list; its state counts one split per element."""

    def __init__(self, steps: list[list[int] | BaseException]) -> None:
        self._steps = steps
        self._yielded = 0
        self.closed = False

    def next_chunk(self, limit: int) -> Chunk | None:
        if not self._steps:
            return None
        step = self._steps[0]
        if isinstance(step, BaseException):
            self._steps.pop(0)
            raise step
        values, rest = step[:limit], step[limit:]
        self._steps[:1] = [rest] if rest else []
        self._yielded += len(values)
        chunk = Chunk.of_columns(np.array(values), len(values))
        before = self._yielded - len(values)
        return chunk.with_states(lambda index: {"assigned": before + index})

    def get_state(self) -> Any:
        return {"assigned": self._yielded}

    def set_state(self, state: Any) -> None:
        raise AssertionError("a task never restores a state")

    def close(self) -> None:
        self.closed = True
