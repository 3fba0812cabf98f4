"""Shaping of rounds: shares the rows of a round's batches among consumers.

Coordinated reads shape rounds on the worker (`RoundShaper`), ordered consumers in the client
(`modes.ordered.ordered_readers`).

    cost_fn         redistributes the rows of a round's batches, so that consumers have equally many
                    rows at similar costs (`balance`)
    remainder       handling of batches at the end that are too few for a round:
      "drop"          they are dropped
      "pad"           consumers without a batch receive one without rows
      "end_together"  their rows are shared evenly

Rule. A failed element keeps its position, and its round is not changed. An error of a cost
function, or of a round with incompatible batches, is raised once for each consumer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.structure import Element as Value
from headrace.element.structure import describe_component, flatten, unflatten
from headrace.errors import InvalidArgumentError
from headrace.execution.iterator import ElementIterator, State
from headrace.plan.user_function import UserFunction
from headrace.service.modes.coordinated_reads.balance import balance_rows

__all__ = ["RoundShaper", "RowBalancer", "redistribute_rows", "shape_round", "share_remainder"]


class RoundShaper(ElementIterator):
    """Yields the elements of another iterator, round by round.

    Args:
        input: The input iterator.
        consumers: Number of elements in a round.
        remainder: One of `config.REMAINDERS`.
        cost_fn: Returns the cost of a row; None leaves batches unchanged.
        count_begun: Returns how many splits were started in the input.
    """

    can_read_ahead = False

    def __init__(
        self,
        input: ElementIterator,
        consumers: int,
        *,
        remainder: str = "drop",
        cost_fn: UserFunction | None = None,
        count_begun: Callable[[], int] = lambda: 0,
    ) -> None:
        self._input = input
        self._consumers = consumers
        self._remainder = remainder
        self._balancer = None if cost_fn is None else RowBalancer(cost_fn)
        self._count_begun = count_begun
        #: Rest of the current round: elements, and errors in place of elements.
        self._round: list[Any] = []
        #: States before and after that round.
        self._state: State = input.get_state()
        self._next_state: State = self._state
        self._has_ended = False

    @property
    def num_started(self) -> int:
        """Number of started splits."""
        return self._count_begun()

    def next_chunk(self, limit: int) -> Chunk | None:
        if not self._round:
            self._read_round()
        if not self._round:
            return None
        first = self._round.pop(0)
        if not self._round:
            # Splits count with the last element of the round, because before it the round is
            # incomplete.
            self._state = self._next_state
        if isinstance(first, Exception):
            raise first.with_traceback(None)
        state = self._state
        return Chunk.of_rows([first], lambda index: state)

    def _read_round(self) -> None:
        elements: list[Any] = []
        while len(elements) < self._consumers and not self._has_ended:
            try:
                chunk = self._input.next_chunk(self._consumers - len(elements))
            except Exception as error:
                elements.append(error)
                continue
            if chunk is None:
                self._has_ended = True
            else:
                elements += chunk.rows()
        self._round = self._shape(elements) if elements else []
        self._next_state = self._input.get_state()

    def _shape(self, elements: list[Any]) -> list[Any]:
        if any(isinstance(each, Exception) for each in elements):
            return elements
        try:
            return shape_round(elements, self._consumers, self._remainder, self._balancer)
        except Exception as error:
            return [error] * self._consumers

    def get_state(self) -> State:
        return self._state

    def set_state(self, state: State) -> None:
        self._input.set_state(state)
        self._round, self._has_ended = [], False
        self._state = self._next_state = state

    def close(self) -> None:
        self._round = []
        self._input.close()


class RowBalancer:
    """Redistributes the rows of a round's batches at similar costs.

    Args:
        cost_fn: Returns the cost of a row.
        numbers_by_round: Whether errors give the number of a row in its round, instead of the
            number of rows before it.
    """

    def __init__(self, cost_fn: UserFunction, *, numbers_by_round: bool = False) -> None:
        self._cost_fn = cost_fn
        self._numbers_by_round = numbers_by_round
        self._row_count = 0

    def redistribute(self, batches: list[Value], consumers: int) -> list[Value]:
        """Return one batch per consumer, with equally many rows.

        Raises:
            InvalidArgumentError: If they are not batches of rows of equal shape.
            UserFunctionError: If the cost function fails, or returns no valid cost.
        """
        return redistribute_rows(batches, balance_rows(self._costs(batches), consumers))

    def _costs(self, batches: list[Value]) -> list[float]:
        if self._numbers_by_round:
            self._row_count = 0
        costs: list[float] = []
        for batch in batches:
            leaves, structure = flatten(batch)
            _check_rows(leaves, structure.paths)
            for number in range(len(leaves[0])):
                row = unflatten(structure, [leaf[number] for leaf in leaves])
                try:
                    costs.append(_check_cost(self._cost_fn(row)))
                except BaseException as error:
                    raise self._cost_fn.wrap_error(error, self._row_count, row) from error
                self._row_count += 1
        return costs


def shape_round(
    batches: list[Value], consumers: int, remainder: str, balancer: RowBalancer | None
) -> list[Value]:
    """Return one batch per consumer, or fewer if too few for a round are dropped.

    Args:
        batches: Batches of a round; fewer than `consumers` at the end.
        consumers: Number of consumers.
        remainder: One of `config.REMAINDERS`.
        balancer: Redistributes the rows; None leaves the batches of a full round unchanged.

    Raises:
        InvalidArgumentError: If rows are exchanged, but do not have equal shapes.
        UserFunctionError: If the cost function fails.
    """
    is_short = len(batches) < consumers
    if balancer is not None and not (is_short and remainder in ("pad", "drop")):
        return balancer.redistribute(batches, consumers)
    return share_remainder(batches, consumers, remainder) if is_short else batches


def share_remainder(batches: list[Value], consumers: int, remainder: str) -> list[Value]:
    """Return one batch per consumer from batches that are too few for a round.

    If the remainder is dropped, the batches are returned unchanged.

    Raises:
        InvalidArgumentError: If they are not batches of rows of equal shape.
    """
    if remainder == "drop":
        return batches
    if remainder == "pad":
        return batches + [redistribute_rows(batches[:1], [[]])[0]] * (consumers - len(batches))
    return redistribute_rows(batches, np.array_split(np.arange(_count_rows(batches)), consumers))


def redistribute_rows(
    batches: Sequence[Value], rows_by_consumer: Sequence[Sequence[int] | Any]
) -> list[Value]:
    """Return new batches from rows that are numbered over all the given batches.

    Raises:
        InvalidArgumentError: If they are not batches of rows of equal shape.
    """
    leaves, structure = flatten(batches[0])
    columns: list[list[Any]] = [[] for _ in leaves]
    for batch in batches:
        leaves, other_structure = flatten(batch)
        if other_structure != structure:
            raise InvalidArgumentError(
                "all batches of a round must have the same structure, so that their rows can be "
                f"redistributed; got {structure} and {other_structure}"
            )
        _check_rows(leaves, structure.paths)
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    pools = [
        _concatenate(column, path) for column, path in zip(columns, structure.paths, strict=True)
    ]
    indices = [np.asarray(share, dtype=np.intp) for share in rows_by_consumer]
    return [unflatten(structure, [pool[rows] for pool in pools]) for rows in indices]


def _count_rows(batches: Sequence[Value]) -> int:
    total = 0
    for batch in batches:
        leaves, structure = flatten(batch)
        _check_rows(leaves, structure.paths)
        total += len(leaves[0])
    return total


def _check_rows(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Reject batches without rows, or with different numbers of rows per component."""
    rows = None
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            raise InvalidArgumentError(
                "remainder='pad', remainder='end_together' and `cost_fn` require batches, but "
                f"{describe_component(path)} is a single {type(leaf).__name__} without rows. Put "
                "`batch` before `distribute`"
            )
        if rows is not None and len(leaf) != rows:
            raise InvalidArgumentError(
                "all components of a batch must have the same number of rows, but "
                f"{describe_component(path)} has {len(leaf)} and another component has {rows}"
            )
        rows = len(leaf)
    if rows is None:
        raise InvalidArgumentError(
            "remainder='pad', remainder='end_together' and `cost_fn` require batches with at least "
            "one component"
        )


def _concatenate(parts: list[np.ndarray[Any, Any]], path: str) -> np.ndarray[Any, Any]:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise InvalidArgumentError(
            f"rows of {describe_component(path)} have different shapes in the batches of one round "
            f"({', '.join(map(str, sorted(shapes)))}), so they cannot be redistributed: pad them "
            "to one shape with `padded_batch(..., padded_shapes=...)` or "
            "`bucket_by_sequence_length(..., pad_to_bucket_boundary=True)`"
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_cost(cost: Any) -> float:
    number = float(cost)
    if not (number >= 0.0 and math.isfinite(number)):
        raise ValueError(f"`cost_fn` must return a finite number of at least 0; got {cost!r}")
    return number
