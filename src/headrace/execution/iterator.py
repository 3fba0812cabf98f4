"""The interface of element iterators, their registry by node type, the instrumentation hook.

Rule 1. `next_chunk` returns between 1 and `limit` elements, or None at the end; after None always
        None. Buffered elements are returned without waiting for more.
Rule 2. An element that fails raises its error in turn: elements before it were returned by earlier
        calls, and the next call continues after it.
Rule 3. A state is a small JSON value that identifies the next element in terms of the plan's
        canonical form, independent of buffers, chunk sizes and threads. Each chunk knows the state
        before each of its elements (`Chunk.state_at`); `get_state` is the state after everything
        returned or raised. Both are cheap.
Rule 4. `set_state` with any state of an iterator of the same plan, on a fresh or a used iterator,
        continues with the same elements; right after it `get_state` returns an equal state.
Rule 5. If `can_read_ahead` is False, each element costs a call of a user's function: consumers
        request exactly what they need, and the input computes exactly that. `lazy_rows` is the
        cheap way to ask for single elements. A step that opens datasets opens several in one
        `next_chunk` only if the consumer needs all elements (`next_needed_chunk`).
Rule 6. A BaseException that is no `Exception` (KeyboardInterrupt, SystemExit) may leave an iterator
        at any position. To continue, build it again from the last state.
Rule 7. `lazy_rows` returns elements of the same stream, each made when it is requested. They may
        end at any element, or before the first: call it again. Until they have ended or raised,
        only `set_state` and `close` of the iterator may be called. Implementing `lazy_rows` is
        optional; an implementation has the same elements, errors and states.
Rule 8. One thread uses an iterator at a time, not always the same one. Only `close` may be called
        from another thread during a wait for an element; it ends the wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import singledispatch
from typing import Any, TypeAlias, TypeVar

from headrace.element.chunk import Chunk, States
from headrace.execution.context import Context
from headrace.plan.node import Node

__all__ = [
    "END",
    "MAX_FAILURES",
    "ElementIterator",
    "InstrumentedIterator",
    "LazyRows",
    "State",
    "element_position",
    "make_iterator",
]

State: TypeAlias = Any
"""A JSON value: None, bool, int, str, list, dict."""

LazyRows: TypeAlias = tuple[Iterator[Any], States]
"""An iterator of elements made one by one, and the states before each of them."""

END: Any = type("End", (), {"__doc__": "Marks the end of the elements."})()

MAX_FAILURES = 1000
"""Failures, beyond one per element to skip, after which an input is assumed to fail forever."""


class ElementIterator(ABC):
    """Yields a plan's elements, chunk by chunk."""

    @property
    def can_read_ahead(self) -> bool:
        """Whether reading more elements than needed calls no user function.

        It may change with each read, because a step that opens datasets learns it from them. So
        check it before each read, and never cache it.
        """
        return True

    has_lazy_rows: bool = False
    """Whether elements are best read one by one (`lazy_rows`), because each costs a user's call.

    Like `can_read_ahead` it may change with each read. It only saves time.
    """

    is_small: bool = False
    """Whether reading all elements costs about as much as reading one (`Source.is_small`)."""

    @property
    def preferred_limit(self) -> int:
        """Preferred read size if reading ahead is not free: about the number computed at once.

        `next_chunk` waits only for the first of them.
        """
        return 1

    @property
    def available_elements(self) -> int:
        """Number of next elements that are in memory, as views of one array; 0 if unknown.

        Reading fewer of them at once saves nothing.
        """
        return 0

    @property
    def is_ready(self) -> bool:
        """Whether `next_chunk` returns or raises without waiting; False if unknown."""
        return False

    @abstractmethod
    def next_chunk(self, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements, or None at the end."""

    def next_needed_chunk(self, count: int) -> Chunk | None:
        """Return 1 to `count` elements, or None at the end, for a consumer that needs them all.

        The elements are those of `next_chunk`, but a step may call functions for all of them.
        """
        return self.next_chunk(count)

    def lazy_rows(self) -> LazyRows | None:
        """Return the next elements, each made when it is requested; None at the end."""
        chunk = self.next_chunk(1)
        return None if chunk is None else (iter(chunk.rows()), chunk.states)

    @abstractmethod
    def get_state(self) -> State:
        """Return the state before the next element."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Restore a state."""

    def skip(self, count: int) -> int:
        """Skip up to `count` elements; return how many were skipped.

        Failed elements are not counted, as when they were first read. A one-to-one step skips in
        its input instead, without calls.
        """
        num_skipped = num_failed = 0
        while num_skipped < count:
            try:
                chunk = self.next_chunk(count - num_skipped)
            except Exception:
                num_failed += 1
                if num_failed > MAX_FAILURES + count:
                    raise
                continue
            if chunk is None:
                break
            num_skipped += chunk.size
        return num_skipped

    def seek(self, position: int) -> None:
        """Make element number `position` the next one. Only for index plans."""
        raise TypeError(f"{type(self).__name__} cannot seek: it is not part of an index plan")

    def close(self) -> None:  # noqa: B027 - most iterators hold nothing
        """Release threads and files, including those of the inputs. Idempotent."""


def element_position(state: State, count: int) -> int:
    """Return the position of an element for an error message: its index in the data, if known.

    Args:
        state: State before the element. Above one-to-one steps and filters it is a position of the
            index plan, or the state of a leaf with assigned splits.
        count: Result for any other state: the number of elements that the caller has counted.
    """
    if type(state) is int:
        return state
    if type(state) is dict and "assigned" in state:
        return int(state["position"])
    return count


class _IteratorRegistry:
    """Registry of functions that make iterators, by node class."""

    def __init__(self) -> None:
        self._makers = singledispatch(_reject_node)

    @property
    def registry(self) -> Mapping[Any, Callable[..., Any]]:
        """Maps node classes to functions that make their iterators."""
        return self._makers.registry

    def register(self, kind: type[Node]) -> Callable[[_Maker], _Maker]:
        """Return a decorator that registers the iterator of a node class."""

        def decorate(maker: _Maker) -> _Maker:
            self._makers.register(kind, maker)
            return maker

        return decorate

    def __call__(self, node: Node, context: Context) -> ElementIterator:
        """Return the iterator of `node`, including those of its inputs."""
        iterator: ElementIterator = context.instrument(node, self._makers(node, context))
        return iterator


def _reject_node(node: Node, context: Context) -> ElementIterator:
    raise NotImplementedError(f"no iterator is registered for {type(node).__name__}")


_Maker = TypeVar("_Maker", bound=Callable[..., ElementIterator])
make_iterator = _IteratorRegistry()


# --- Instrumentation: statistics, tracing and test faults for every step --------------------------
#
#     build_iterator(plan, instrument=instrument): instrument(node, iterator) -> replacement
#
# Each iterator of a plan passes through `Context.instrument`, including the steps of index plans
# and of nested datasets. By default it is not replaced, so instrumentation costs nothing if unused.
#
# Rule 1. Steps contain no measurements. To measure, return a subclass of `InstrumentedIterator`.
# Rule 2. A replacement follows the rules of `ElementIterator`: it has the same elements, errors and
#         states, and reads only what its consumer requests.
# Rule 3. A step runs on the thread on which its consumer reads (`prefetch`, parallel map or
#         interleave), one at a time, and nested datasets run on several threads at once: shared
#         counters need a lock. A step that was abandoned by its consumer is made and instrumented
#         again.


class InstrumentedIterator(ElementIterator):
    """Forwards to a step's iterator; base class of instrumentation.

    Elements pass through `next_chunk`, also those of `next_needed_chunk`, or, with `has_lazy_rows`,
    one by one through `lazy_rows`; `skip` skips elements that are not visible here.

    Args:
        iterator: Iterator of the step.
    """

    def __init__(self, iterator: ElementIterator) -> None:
        self.iterator = iterator
        self.has_lazy_rows: bool = iterator.has_lazy_rows
        self.is_small: bool = iterator.is_small

    @property
    def can_read_ahead(self) -> bool:
        return self.iterator.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self.iterator.preferred_limit

    @property
    def available_elements(self) -> int:
        return self.iterator.available_elements

    @property
    def is_ready(self) -> bool:
        return self.iterator.is_ready

    def next_chunk(self, limit: int) -> Chunk | None:
        return self.iterator.next_chunk(limit)

    def lazy_rows(self) -> LazyRows | None:
        return self.iterator.lazy_rows()

    def get_state(self) -> State:
        return self.iterator.get_state()

    def set_state(self, state: State) -> None:
        self.iterator.set_state(state)

    def skip(self, count: int) -> int:
        return self.iterator.skip(count)

    def seek(self, position: int) -> None:
        self.iterator.seek(position)

    def close(self) -> None:
        self.iterator.close()
