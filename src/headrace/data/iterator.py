"""The iterator that a user sees: one element at a time, with a state that can be saved."""

from __future__ import annotations

import hashlib
from types import TracebackType
from typing import Any, Self

from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, OutOfRangeError
from headrace.execution.build import draw_seed, start
from headrace.execution.iterator import ElementIterator
from headrace.execution.pace import Pace
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.traverse import has_free_order, outline
from headrace.rewrites.optimize import optimize

__all__ = ["DatasetIterator"]

_VERSION = 1


class DatasetIterator:
    """Yields the elements of a dataset, once.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not for several threads at once.
    """

    def __init__(self, plan: Node, epoch: int, element_spec: Any = None) -> None:
        self._plan = plan
        self._epoch = epoch
        self._seed = draw_seed()
        self._element_spec = element_spec
        self._iterator: ElementIterator | None = None
        self._is_closed = False
        # A state within a chunk means "skip so many of what comes": that needs a fixed order.
        self._pace = Pace(most=1) if has_free_order(plan, Options()) else Pace()
        self._rows: list[Any] = []
        self._offset = 0
        self._before: Any = None  # state of `_iterator` before the rows in hand

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        offset = self._offset
        if offset < len(self._rows):
            self._offset = offset + 1
            return self._rows[offset]
        return self._refill()

    def _refill(self) -> Any:
        if self._is_closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._start()
        self._before = self._iterator.get_state()
        # Let go of the rows in hand first: their memory serves for the next ones.
        self._rows, self._offset = [], 0
        chunk = self._pace.next_chunk(self._iterator)
        if chunk is None:
            self._iterator.close()
            raise StopIteration
        self._rows, self._offset = chunk.rows(), 1
        return self._rows[0]

    def _start(self) -> ElementIterator:
        return start(optimize(self._plan), seed=self._seed, epoch=self._epoch)

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none; a StopIteration, too.
        """
        try:
            return next(self)
        except OutOfRangeError:
            raise
        except StopIteration:
            raise OutOfRangeError("the dataset has no more elements") from None

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements."""
        return self._element_spec()

    def get_state(self) -> dict[str, Any]:
        """Return where the next element comes from: a JSON value of a few hundred bytes.

        `set_state` on an iterator of the same dataset, in this process or another, continues with
        the same elements.
        """
        if self._iterator is None:
            inner, passed = None, 0
        elif self._offset < len(self._rows):
            inner, passed = self._before, self._offset
        else:
            inner, passed = self._iterator.get_state(), 0
        return {
            "version": _VERSION,
            "plan": _digest(self._plan),
            "seed": self._seed,
            "epoch": self._epoch,
            "skip": passed,
            "at": inner,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            FailedPreconditionError: The state is of another dataset or another version.
        """
        if not isinstance(state, dict) or "version" not in state:
            raise TypeError(f"`state` must be a value of `get_state`, but got {state!r:.80}")
        if state["version"] != _VERSION:
            raise FailedPreconditionError(
                f"the state has version {state['version']!r}, this Headrace reads {_VERSION}"
            )
        if state["plan"] != _digest(self._plan):
            raise FailedPreconditionError(
                "the state was taken from a dataset with other steps; restore it into the dataset "
                f"that it was taken from. This one is:\n{outline(self._plan)}"
            )
        self.close()
        self._is_closed = False
        self._seed, self._epoch = state["seed"], state["epoch"]
        self._rows, self._offset = [], 0
        if state["at"] is None and not state["skip"]:
            return
        self._iterator = self._start()
        self._iterator.set_state(state["at"])
        for _ in range(state["skip"]):
            next(self, None)

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the iterator is at its end then. May be called twice."""
        self._is_closed = True
        self._rows, self._offset = [], 0
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that ended early leaves the iterator to the garbage collector.
        if getattr(self, "_iterator", None) is not None:
            self.close()


def _digest(plan: Node) -> str:
    """Return a short name of the plan's steps, without where they were written."""
    steps = [line.split("  # ")[0] for line in outline(plan).splitlines()]
    kinds = "\n".join(step.split("(")[0] for step in steps)
    return hashlib.blake2b(kinds.encode(), digest_size=8).hexdigest()
