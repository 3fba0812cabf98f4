"""The contract of an element iterator, the table that finds the one for a node, the watch point.

Rule 1. `next_chunk` returns between 1 and `limit` elements, or None at the end; after None always
        None. What is at hand is returned rather than waited for.
Rule 2. An element that fails raises when its turn comes: those before it were returned by earlier
        calls, and the next call goes on after it.
Rule 3. A state says where the next element comes from, as a small JSON value in terms of the
        plan's normal form, never of what is in memory, of chunk sizes or of threads. Each chunk
        knows the state before each of its elements (`Chunk.state_at`); `get_state` is the state
        after all that was returned or raised. Both are cheap.
Rule 4. `set_state` with any state of an iterator of the same plan, on a fresh or a used iterator,
        continues with the same rest; right after it `get_state` returns an equal state.
Rule 5. Where `reads_ahead_freely` is False, each element costs a call of a user's function: such
        an input is asked for exactly what is needed, and computes exactly what it is asked for.
        `singles` is the cheap way to ask for one.
Rule 6. What escapes that is no `Exception` (KeyboardInterrupt, SystemExit) may leave an iterator
        anywhere. Whoever goes on afterwards builds it again from the last state.
Rule 7. Single elements are the same stream: `singles` gives the next ones, each made when it is
        asked for. They may end at any element, or before the first: ask again. Until they have
        ended or raised, nothing but `set_state` and `close` is asked of their iterator. A step need
        not write `singles`; one that does so has the same elements, errors and states in it.
Rule 8. One thread uses an iterator at a time, not always the same one. Only `close` may come from
        another while one waits for an element: the wait ends then.
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
    "MOST_FAILURES",
    "ElementIterator",
    "Singles",
    "State",
    "Watched",
    "make_iterator",
    "position_of",
]

State: TypeAlias = Any
"""A JSON value: None, bool, int, str, list, dict."""

Singles: TypeAlias = tuple[Iterator[Any], States]
"""Elements that are made one by one, and the state of the stream before each of them."""

END: Any = type("End", (), {"__doc__": "What stands for an element when no more come."})()

MOST_FAILURES = 1000
"""Failures in a row of skips after which an input is taken to fail for ever."""


class ElementIterator(ABC):
    """Yields a plan's elements, chunk by chunk."""

    @property
    def reads_ahead_freely(self) -> bool:
        """Whether asking for more than is needed calls no function of the user's.

        It may change with each read: a step that opens datasets learns it from them. So it is
        looked at before each read where it matters, and never kept.
        """
        return True

    gives_rows: bool = False
    """Whether elements are best asked for one by one (`singles`): each costs a user's call.

    Like `reads_ahead_freely` it may change with each read. It only saves time."""

    @property
    def at_hand(self) -> int:
        """How many elements to ask for, where reading ahead is not free: about so many are made.

        `next_chunk` waits for none of them but the first.
        """
        return 1

    @property
    def arrived(self) -> int:
        """How many of the next elements are in memory, as views of one piece; 0: nobody knows.

        To ask for fewer of them at once saves nothing.
        """
        return 0

    @property
    def is_ready(self) -> bool:
        """Whether `next_chunk` returns, or raises, without a wait. False: nobody knows."""
        return False

    @abstractmethod
    def next_chunk(self, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements, or None at the end."""

    def singles(self) -> Singles | None:
        """Return the next elements, each made when it is asked for; None at the end."""
        chunk = self.next_chunk(1)
        return None if chunk is None else (iter(chunk.rows()), chunk.states)

    @abstractmethod
    def get_state(self) -> State:
        """Return where the next element comes from."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Go to where `state` was taken."""

    def skip(self, count: int) -> int:
        """Pass over up to `count` elements; return how many there were.

        Elements that fail count as none, as they did when they were first passed. A step that is
        one-to-one passes over its input instead, and calls nothing.
        """
        passed = failed = 0
        while passed < count:
            try:
                chunk = self.next_chunk(count - passed)
            except Exception:
                failed += 1
                if failed > MOST_FAILURES + count:
                    raise
                continue
            if chunk is None:
                break
            passed += chunk.size
        return passed

    def seek(self, position: int) -> None:
        """Make element number `position` the next one. Only in the index part of a plan."""
        raise TypeError(f"{type(self).__name__} is no part of an index stream")

    def close(self) -> None:  # noqa: B027 - most iterators hold nothing
        """Release threads and files, of the inputs too. May be called twice."""


def position_of(state: State, count: int) -> int:
    """Return the number of an element, for an error: its position in the data, where that is known.

    Args:
        state: That of the stream before the element. Over one-to-one steps and filters it is a
            position of the index part, or that of a leaf whose units are dealt (`dealt`).
        count: The number where the state is none of these: what was counted by whoever asks.
    """
    if type(state) is int:
        return state
    if type(state) is dict and "dealt" in state:
        return int(state["at"])
    return count


class _Table:
    """Finds the function that makes the iterator of a node: the one registered for its class."""

    def __init__(self) -> None:
        self._makers = singledispatch(_refuse)

    @property
    def registry(self) -> Mapping[Any, Callable[..., Any]]:
        """Class of nodes -> what makes its iterator."""
        return self._makers.registry

    def register(self, kind: type[Node]) -> Callable[[_Maker], _Maker]:
        """Return a decorator for what makes the iterator of such a node."""

        def registered(maker: _Maker) -> _Maker:
            self._makers.register(kind, maker)
            return maker

        return registered

    def __call__(self, node: Node, context: Context) -> ElementIterator:
        """Return the iterator of `node`, and below it those of its inputs."""
        made: ElementIterator = context.watch(node, self._makers(node, context))
        return made


def _refuse(node: Node, context: Context) -> ElementIterator:
    raise NotImplementedError(f"no iterator is registered for {type(node).__name__}")


_Maker = TypeVar("_Maker", bound=Callable[..., ElementIterator])
make_iterator = _Table()


# --- The watch point: where statistics, tracing and faults for tests see every stage --------------
#
#     start(plan, watch=watch):  context.watch(node, iterator of node) -> what stands in its place
#
# Each iterator of a plan is made through `context.watch`, the steps of index parts and of nested
# datasets too. By default it stays what it is, so watching costs nothing where nobody watches.
#
# Rule 1. Nothing is measured inside a stage. Whoever measures returns a `Watched` of their own.
# Rule 2. What stands in a stage's place keeps the rules of `iterator`: it gives the same elements,
#         errors and states, and asks for no more than it is asked for.
# Rule 3. A stage is read on whichever thread its consumer reads on (`prefetch`, a threaded map or
#         interleave), one at a time, and nested datasets on several at once: what they count
#         together needs a lock. A stage that did not return in time is made, and watched, again.


class Watched(ElementIterator):
    """A stage as it is: to be derived from, by whoever looks at what passes.

    Elements pass by `next_chunk` or, where `gives_rows`, one by one by `singles`; `skip` passes
    over elements that nobody sees.

    Args:
        stage: The stage's iterator.
    """

    def __init__(self, stage: ElementIterator) -> None:
        self.stage = stage
        self.gives_rows = stage.gives_rows

    @property
    def reads_ahead_freely(self) -> bool:
        return self.stage.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return self.stage.at_hand

    def next_chunk(self, limit: int) -> Chunk | None:
        return self.stage.next_chunk(limit)

    def singles(self) -> Singles | None:
        return self.stage.singles()

    def get_state(self) -> State:
        return self.stage.get_state()

    def set_state(self, state: State) -> None:
        self.stage.set_state(state)

    def skip(self, count: int) -> int:
        return self.stage.skip(count)

    def seek(self, position: int) -> None:
        self.stage.seek(position)

    def close(self) -> None:
        self.stage.close()
