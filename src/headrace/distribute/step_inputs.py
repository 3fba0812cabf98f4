"""Inputs of a worker's replicas, one step at a time.

    SingleReplicaInput   one replica: elements unchanged
    RoundRobinInput      one dataset whose elements the replicas receive in turn
    PerReplicaInput      a dataset for each replica

`batch_inputs` has the inputs that split global batches into pieces.

Rule 1. Every element that is read is delivered. In an incomplete last step the remaining replicas
        get no rows.
Rule 2. A state holds the position of each dataset, and the number of rows used of the batch there.
        It does not depend on the number of replicas, so another number may resume from it.
Rule 3. After an error of an element, the next step resumes after that element.
Rule 4. An interruption (Ctrl-C) at any instruction loses nothing. Python handles signals at calls
        and in loops: so elements are stored with no call after they are read, and dropped with no
        call before the step is returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from headrace.data.iterator import DatasetIterator
from headrace.data.saved_state import IteratorPosition
from headrace.element.structure import Structure, describe_component, flatten, unflatten
from headrace.element.transpose import transpose
from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = [
    "HeldElementReader",
    "PerReplicaInput",
    "RoundRobinInput",
    "SingleReplicaInput",
    "StepColumns",
    "StepInput",
    "count_rows",
    "input_states",
    "not_batched_error",
]

StepColumns: TypeAlias = tuple[Structure, list[list[Any]]]
"""Step for the local replicas: the structure, and for each leaf the replicas' values."""


class StepInput(ABC):
    """Input of a worker that gives each local replica its rows of each step."""

    @abstractmethod
    def next_step(self) -> StepColumns | None:
        """Return the next step, or None at the end and after it."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return the position of the next step, as a JSON value."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Move to the state of an input of the same datasets."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and files. Idempotent."""


class HeldElementReader:
    """Reads elements, and holds the one that is being processed.

    Args:
        elements: Iterator over the elements.
        keeps_position: Whether the position of the last element is needed even after it is
            dropped.
        check_order: Raises if another reading may return other elements after a position, so
            that no state may lie within an element.
    """

    def __init__(
        self,
        elements: DatasetIterator,
        keeps_position: bool = False,
        check_order: Callable[[], None] | None = None,
    ) -> None:
        self._elements = elements
        self._keeps_position = keeps_position
        self._check_order = check_order
        #: The held element; () if none.
        self.held: tuple[()] | tuple[Any] = ()
        #: Position before the last element, if remembered. It becomes a state only on request: for
        #: a job that several clients share, that is a request to all of them.
        self.position: IteratorPosition | None = None
        #: Rows of the next element that were used before the state was taken.
        self.rows_to_skip: int = 0

    def hold(self) -> bool:
        """Read an element if none is held; return whether one is held now."""
        if self.held:
            return True
        position = (
            self._elements.get_position() if self._keeps_position or self.rows_to_skip else None
        )
        try:
            for element in self._elements:
                self.held, self.position = (element,), position if self._keeps_position else None
                return True
        except Exception:
            if (
                position
                and self.rows_to_skip
                and self._elements.get_position().state != position.state
            ):
                self.rows_to_skip = 0  # the element is lost, and all rows of the next one are used
            raise
        return False

    def get_state(self) -> dict[str, Any]:
        """Return the state at the held element, or at the next one.

        Raises:
            FailedPreconditionError: If the position of the held element was not remembered.
        """
        if not self.held:
            return self._elements.get_state()
        if self.position is None:
            _refuse_state_within_step()
        return self._elements.state_at(self.position)

    def state_at(self, position: IteratorPosition | None) -> dict[str, Any]:
        """Return the state at an element that was partly used.

        Raises:
            FailedPreconditionError: If its position was not remembered, or another reading may
                return another element there.
        """
        if position is None:
            _refuse_state_within_step()
        if self._check_order is not None:
            self._check_order()
        return self._elements.state_at(position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a state."""
        self._elements.set_state(state)
        self.held = ()

    def close(self) -> None:
        """Release threads and files. Idempotent."""
        self.held = ()
        self._elements.close()


class SingleReplicaInput(StepInput):
    """Passes elements unchanged to a single replica."""

    def __init__(self, elements: DatasetIterator) -> None:
        self._reader = HeldElementReader(elements)

    def next_step(self) -> StepColumns | None:
        reader = self._reader
        while reader.hold():
            leaves, structure = flatten(*reader.held)
            start = reader.rows_to_skip
            step: StepColumns | None = None
            if not start:
                step = structure, [[leaf] for leaf in leaves]
            elif start < count_rows(leaves, structure):  # a partly used batch
                step = structure, [[leaf[start:]] for leaf in leaves]
            reader.rows_to_skip, reader.held = 0, ()
            if step is not None:
                return step
        return None

    def get_state(self) -> dict[str, Any]:
        return {"inputs": [self._reader.get_state()], "rows": self._reader.rows_to_skip}

    def set_state(self, state: dict[str, Any]) -> None:
        (input_state,) = input_states(state, 1)
        self._reader.set_state(input_state)
        self._reader.rows_to_skip = state["rows"]

    def close(self) -> None:
        self._reader.close()


class RoundRobinInput(StepInput):
    """Distributes the elements of one dataset to the replicas in turn."""

    def __init__(self, elements: DatasetIterator, num_local: int) -> None:
        self._elements = elements
        self._num_local = num_local
        self._taken: list[Any] = []

    def next_step(self) -> StepColumns | None:
        taken = self._taken  # elements of a step that failed or was interrupted
        while len(taken) < self._num_local:
            for element in self._elements:
                taken.append(element)
                break
            else:
                break
        if not taken:
            return None
        step = _fill_missing(taken, self._num_local)
        self._taken = []
        return step

    def get_state(self) -> dict[str, Any]:
        if self._taken:
            _refuse_state_within_step()
        return {"inputs": [self._elements.get_state()], "rows": 0}

    def set_state(self, state: dict[str, Any]) -> None:
        (input_state,) = input_states(state, 1)
        _check_no_partial_step(state)
        self._elements.set_state(input_state)
        self._taken = []

    def close(self) -> None:
        self._taken = []
        self._elements.close()


class PerReplicaInput(StepInput):
    """Reads a dataset for each replica; ends when all have ended."""

    def __init__(self, elements: Sequence[DatasetIterator]) -> None:
        self._elements = elements
        self._taken: dict[int, Any] = {}

    def next_step(self) -> StepColumns | None:
        taken = self._taken
        for replica, elements in enumerate(self._elements):
            if replica not in taken:
                for element in elements:
                    taken[replica] = element
                    break
        if not taken:
            return None
        present = next(iter(taken.values()))
        empty = _without_rows(present) if len(taken) < len(self._elements) else None
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
        states = input_states(state, len(self._elements))
        _check_no_partial_step(state)
        for elements, input_state in zip(self._elements, states, strict=True):
            elements.set_state(input_state)
        self._taken = {}

    def close(self) -> None:
        self._taken = {}
        for elements in self._elements:
            elements.close()


def _without_rows(element: Any) -> Any:
    """Return an element of the same structure without rows; scalars become 0 or empty."""
    leaves, structure = flatten(element)
    return unflatten(structure, [_empty_leaf(leaf) for leaf in leaves])


def _fill_missing(taken: list[Any], count: int) -> StepColumns:
    structure, columns = transpose(taken)
    missing = count - len(taken)
    if missing:
        columns = [[*column, *[_empty_leaf(column[0])] * missing] for column in columns]
    return structure, columns


def _empty_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        return leaf[:0]
    return type(leaf)() if isinstance(leaf, bytes | str) else np.zeros((), leaf.dtype)[()]


def count_rows(leaves: list[Any], structure: Structure) -> int:
    """Return the number of rows of a batch.

    Raises:
        InvalidArgumentError: If a leaf is a scalar, or leaves have different numbers of rows.
    """
    rows = -1
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, np.ndarray):
            raise InvalidArgumentError(not_batched_error(structure.paths[index], "a scalar"))
        if rows < 0:
            rows = len(leaf)
        elif len(leaf) != rows:
            raise InvalidArgumentError(
                "each component must have the same batch size, but "
                f"{describe_component(structure.paths[0])} has {rows} rows and "
                f"{describe_component(structure.paths[index])} has {len(leaf)}; the first axis "
                "of each component is the batch: add that axis to a component without rows with "
                "map()"
            )
    return max(rows, 0)


def not_batched_error(path: str, description: str) -> str:
    """Return the error message for a dataset whose elements are not batches."""
    return (
        f"{describe_component(path)} is {description}, so it has no rows to divide among "
        "replicas: call the `batch` method on the dataset, with the global batch size, before "
        "you distribute it"
    )


def input_states(state: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the states of `count` datasets.

    Raises:
        FailedPreconditionError: If the state holds another number of datasets.
    """
    inputs: list[dict[str, Any]] = state["inputs"]
    if len(inputs) != count:
        raise FailedPreconditionError(
            f"the state holds the positions of {len(inputs)} datasets, one per replica, but "
            f"expected {count}; restore it with {len(inputs)} replicas"
        )
    return inputs


def _refuse_state_within_step() -> NoReturn:
    """Raise for a state requested when a step was read in part and not delivered."""
    raise FailedPreconditionError(
        "the last step failed or was interrupted after some replicas had received their "
        "elements; save the state after the next step"
    )


def _check_no_partial_step(state: dict[str, Any]) -> None:
    if state["rows"]:
        raise FailedPreconditionError(
            "the state was saved in the middle of a batch; restore it into a dataset that is "
            "distributed in the same way (distribute_dataset)"
        )
