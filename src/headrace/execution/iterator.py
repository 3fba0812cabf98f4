"""The contract of an element iterator, and the table that finds the one for a node.

Rule 1. `next_chunk` returns between 1 and `limit` elements, or None at the end; after None always
        None. What is at hand is returned rather than waited for.
Rule 2. An element that fails raises when its turn comes: those before it were returned by earlier
        calls, and the next call goes on behind it.
Rule 3. `get_state` says where the next element comes from, as a small JSON value in terms of the
        input's position, never of what is in memory. It is called for every chunk: it is cheap.
Rule 4. `set_state` with any state of an iterator of the same plan continues with the same rest,
        whatever the chunk limits, thread counts or machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import singledispatch
from typing import Any, TypeAlias

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.plan.node import Node

__all__ = ["ElementIterator", "State", "make_iterator"]

State: TypeAlias = Any
"""A JSON value: None, bool, int, str, list, dict."""


class ElementIterator(ABC):
    """Yields a plan's elements, chunk by chunk."""

    @abstractmethod
    def next_chunk(self, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements, or None at the end."""

    @abstractmethod
    def get_state(self) -> State:
        """Return where the next element comes from."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Go to where `state` was taken."""

    def close(self) -> None:  # noqa: B027 - most iterators hold nothing
        """Release threads and files, of the inputs too. May be called twice."""


@singledispatch
def make_iterator(node: Node, context: Context) -> ElementIterator:
    """Return the iterator of `node`, and below it those of its inputs."""
    raise NotImplementedError(f"no iterator is registered for {type(node).__name__}")
