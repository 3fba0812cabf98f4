"""Where a worker's replicas get their rows from, step by step.

    Whole       one replica: elements as they are
    InTurn      one dataset whose elements the replicas take in turn
    Own         a dataset for each replica

Those of global batches, which are cut into pieces, are in `batch_feeds`.

Rule 1. What is read is given. Where not every replica has something, the others get no rows.
Rule 2. A state is the place of each dataset, and how many rows of the batch there are used. It does
        not say among how many replicas they were shared, so others go on from it.
Rule 3. After an error of an element the next step goes on after that element.
Rule 4. An interruption (Ctrl-C) at any instruction loses nothing. Python looks for signals at calls
        and in loops: so what is read is kept where no call lies between, and it is dropped where no
        call lies between that and the return of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from headrace.data.iterator import DatasetIterator
from headrace.data.saved_state import Mark
from headrace.element.structure import Structure, component, flatten, unflatten
from headrace.element.transpose import transpose
from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = [
    "Feed",
    "InTurn",
    "Own",
    "Reader",
    "Step",
    "Whole",
    "inputs_of",
    "no_batch",
    "rows_of",
]

Step: TypeAlias = tuple[Structure, list[list[Any]]]
"""What the replicas get: the structure, and for each leaf their values."""


class Feed(ABC):
    """Gives each replica of a worker its part of each step."""

    @abstractmethod
    def next_step(self) -> Step | None:
        """Return the next step, or None at the end, again and again."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return where the next step begins, as a JSON value."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where a feed of the same datasets stood."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and files. May be called twice."""


class Reader:
    """Reads elements, and holds the one that is at work.

    Args:
        elements: What reads them.
        remembers: Whether the place of the last one is needed, also when it is dropped.
        check_order: Raises where another reading would give other elements after a place, so that
            nobody can go on within one.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        remembers: bool = False,
        check_order: Callable[[], None] | None = None,
    ) -> None:
        self._elements = elements
        self._remembers = remembers
        self._check_order = check_order
        #: The element, if there is one; () drops it.
        self.held: tuple[()] | tuple[Any] = ()
        #: The place before the last one, where it is remembered. Its state is made when somebody
        #: asks: of a job that several clients share it is a question to all of them.
        self.place: Mark | None = None
        #: Rows of the next element that were used before the state was taken.
        self.skip = 0

    def hold(self) -> bool:
        """Read an element if none is held; return whether one is now."""
        if self.held:
            return True
        place = self._elements.mark() if self._remembers or self.skip else None
        try:
            for element in self._elements:
                self.held, self.place = (element,), place if self._remembers else None
                return True
        except Exception:
            if place and self.skip and self._elements.mark().state != place.state:
                self.skip = 0  # the element is lost, and all rows of the next one are wanted
            raise
        return False

    def get_state(self) -> dict[str, Any]:
        """Return the place of the element that is held, or of the next.

        Raises:
            FailedPreconditionError: One is held whose place was not remembered.
        """
        if not self.held:
            return self._elements.get_state()
        if self.place is None:
            _refuse_state_within_step()
        return self._elements.state_at(self.place)

    def state_at(self, place: Mark | None) -> dict[str, Any]:
        """Return the state of the place of an element of which a part was used.

        Raises:
            FailedPreconditionError: It was not remembered, or another element may come there.
        """
        if place is None:
            _refuse_state_within_step()
        if self._check_order is not None:
            self._check_order()
        return self._elements.state_at(place)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        self._elements.set_state(state)
        self.held = ()

    def close(self) -> None:
        """Release threads and files. May be called twice."""
        self.held = ()
        self._elements.close()


class Whole(Feed):
    """Passes elements on to one replica."""

    def __init__(self, elements: DatasetIterator) -> None:
        self._reader = Reader(elements)

    def next_step(self) -> Step | None:
        reader = self._reader
        while reader.hold():
            leaves, structure = flatten(*reader.held)
            start = reader.skip
            step: Step | None = None
            if not start:
                step = structure, [[leaf] for leaf in leaves]
            elif start < rows_of(leaves, structure):  # a batch that several replicas had begun
                step = structure, [[leaf[start:]] for leaf in leaves]
            reader.skip, reader.held = 0, ()
            if step is not None:
                return step
        return None

    def get_state(self) -> dict[str, Any]:
        return {"inputs": [self._reader.get_state()], "rows": self._reader.skip}

    def set_state(self, state: dict[str, Any]) -> None:
        (place,) = inputs_of(state, 1)
        self._reader.set_state(place)
        self._reader.skip = state["rows"]

    def close(self) -> None:
        self._reader.close()


class InTurn(Feed):
    """Has the replicas take the elements of one dataset in turn."""

    def __init__(self, elements: DatasetIterator, here: int) -> None:
        self._elements = elements
        self._here = here
        self._taken: list[Any] = []

    def next_step(self) -> Step | None:
        taken = self._taken  # what an error or an interruption left of the step before
        while len(taken) < self._here:
            for element in self._elements:
                taken.append(element)
                break
            else:
                break
        if not taken:
            return None
        step = _filled(taken, self._here)
        self._taken = []
        return step

    def get_state(self) -> dict[str, Any]:
        if self._taken:
            _refuse_state_within_step()
        return {"inputs": [self._elements.get_state()], "rows": 0}

    def set_state(self, state: dict[str, Any]) -> None:
        (place,) = inputs_of(state, 1)
        _check_no_rest(state)
        self._elements.set_state(place)
        self._taken = []

    def close(self) -> None:
        self._taken = []
        self._elements.close()


class Own(Feed):
    """Reads a dataset for each replica; it ends when all have ended."""

    def __init__(self, elements: Sequence[DatasetIterator]) -> None:
        self._elements = elements
        self._taken: dict[int, Any] = {}

    def next_step(self) -> Step | None:
        taken = self._taken
        for replica, elements in enumerate(self._elements):
            if replica not in taken:
                for element in elements:
                    taken[replica] = element
                    break
        if not taken:
            return None
        some = next(iter(taken.values()))
        empty = _without_rows(some) if len(taken) < len(self._elements) else None
        structure, columns = transpose(
            [taken.get(replica, empty) for replica in range(len(self._elements))]
        )
        self._taken = {}
        return structure, columns

    def get_state(self) -> dict[str, Any]:
        if self._taken:
            _refuse_state_within_step()
        return {"inputs": [each.get_state() for each in self._elements], "rows": 0}

    def set_state(self, state: dict[str, Any]) -> None:
        places = inputs_of(state, len(self._elements))
        _check_no_rest(state)
        for elements, place in zip(self._elements, places, strict=True):
            elements.set_state(place)
        self._taken = {}

    def close(self) -> None:
        self._taken = {}
        for elements in self._elements:
            elements.close()


def _without_rows(element: Any) -> Any:
    """Return an element like this one with no rows; scalars have none, and are 0 or empty."""
    leaves, structure = flatten(element)
    return unflatten(structure, [_no_rows(leaf) for leaf in leaves])


def _filled(taken: list[Any], count: int) -> Step:
    structure, columns = transpose(taken)
    missing = count - len(taken)
    if missing:
        columns = [[*column, *[_no_rows(column[0])] * missing] for column in columns]
    return structure, columns


def _no_rows(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        return leaf[:0]
    return type(leaf)() if isinstance(leaf, bytes | str) else np.zeros((), leaf.dtype)[()]


def rows_of(leaves: list[Any], structure: Structure) -> int:
    """Return how many rows a batch has.

    Raises:
        InvalidArgumentError: A leaf has none, or not as many as the first.
    """
    rows = -1
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, np.ndarray):
            raise InvalidArgumentError(no_batch(structure.paths[index], "a scalar"))
        if rows < 0:
            rows = len(leaf)
        elif len(leaf) != rows:
            raise InvalidArgumentError(
                "each component must have the same batch size, but "
                f"{component(structure.paths[0])} has {rows} rows and "
                f"{component(structure.paths[index])} has {len(leaf)}; the first axis of each is "
                "the batch: give what is no row an axis with map()"
            )
    return max(rows, 0)


def no_batch(path: str, what: str) -> str:
    """Return what is wrong with a dataset whose elements are no batches."""
    return (
        f"{component(path)} is {what}, so its rows cannot be shared by several replicas: call the "
        "`batch` method on the dataset, with the global batch size, before you distribute it"
    )


def inputs_of(state: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the places of so many datasets.

    Raises:
        FailedPreconditionError: The state has those of others.
    """
    inputs: list[dict[str, Any]] = state["inputs"]
    if len(inputs) != count:
        raise FailedPreconditionError(
            f"the state has the places of {len(inputs)} datasets, one for each replica, and here "
            f"are {count}; restore it on as many replicas"
        )
    return inputs


def _refuse_state_within_step() -> NoReturn:
    """Raise for a state that is asked for when part of a step was read, and it was not given."""
    raise FailedPreconditionError(
        "the last step failed, or was interrupted, when some of its replicas had their elements "
        "already; take the state after the next one"
    )


def _check_no_rest(state: dict[str, Any]) -> None:
    if state["rows"]:
        raise FailedPreconditionError(
            "the state was taken in the middle of a batch; restore it into a dataset that is "
            "distributed in the same way (distribute_dataset)"
        )
