"""Iterator of batches of limited cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.pad import Padding
from headrace.element.structure import Element
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.held_input import HeldElement, HeldInput, join_metadata
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.replayable_input import decode_gaps, encode_gaps
from headrace.plan.packing import BatchByCost
from headrace.plan.user_function import UserFunction, step_name

__all__ = ["CostBatchIterator"]


@make_iterator.register(BatchByCost)
class CostBatchIterator(ElementIterator):
    """Collects elements until the next one would exceed the cost limit.

    That element is not taken, so that a state after a batch holds no elements. Its cost is computed
    again after a restore.
    """

    def __init__(self, node: BatchByCost, context: Context) -> None:
        self._node = node
        self._step = step_name(node)
        self._cost_of = UserFunction(node.cost_fn, self._step, context.contain_exits)
        self._padding = Padding(node.padded_shapes, node.padding_values)
        self._input = HeldInput(
            make_iterator(node.input, context), context, self._step, self._held_ordinals
        )
        self._reset()

    def _reset(self) -> None:
        self._held: list[HeldElement] = []
        self._cost: int | float = 0  # of held elements: the largest or the sum
        self._next_cost: int | float | None = None  # of the next element, if computed

    @property
    def can_read_ahead(self) -> bool:
        return False

    def _held_ordinals(self) -> Iterable[int]:
        return [element.ordinal for element in self._held]

    def next_chunk(self, limit: int) -> Chunk | None:
        before = self._make_state()
        while self._input.read():
            cost = self._next_cost
            if cost is None:
                cost = self._next_cost = self._compute_cost()
            if self._held and self._total(cost, 1) > self._node.max_cost:
                break
            self._cost = max(self._cost, cost) if self._node.count_padding else self._cost + cost
            self._held.append(self._input.take(self._input.row))
            self._next_cost = None
            if self._total(0, 0) >= self._node.max_cost:
                break
        else:
            if not self._held or self._node.drop_remainder:
                self._reset()
                return None
        held = self._held
        self._held, self._cost = [], 0
        try:
            batch = self._padding.stack([element.value for element in held])
        except InvalidElementError as error:
            raise InvalidElementError(f"{self._step} cannot pad: {error}") from error
        after = self._make_state()
        return Chunk.of_rows(
            [batch], lambda index: after() if index else before(), join_metadata(held)
        )

    def _total(self, cost: int | float, count: int) -> int | float:
        """Return the cost of a batch of the held elements and `count` others of this cost."""
        if self._node.count_padding:
            return max(self._cost, cost) * (len(self._held) + count)
        return self._cost + cost * count

    def _compute_cost(self) -> int | float:
        """Return the cost of the next element; drop the element if that fails."""
        row = self._input.row
        try:
            if self._node.cost_fn is len and type(row) is dict:
                raise InvalidElementError(
                    "`cost_fn` is len, but the length of a dict is its number of components; use "
                    f"lambda x: len(x[{next(iter(row), '...')!r}])"
                )
            cost = _check_cost(self._cost_of(row))
            if cost > self._node.max_cost:
                raise InvalidElementError(
                    f"the element alone has cost {cost}, which exceeds "
                    f"max_cost={self._node.max_cost}; increase `max_cost`, or truncate or filter "
                    "such elements before"
                )
        except BaseException as error:
            failure = self._cost_of.wrap_error(error, self._input.error_position, row)
        else:
            return cost
        self._input.drop()
        raise failure

    # --- state ----------------------------------------------------------------------------------

    def _make_state(self) -> Callable[[], State]:
        ordinals, cost = [element.ordinal for element in self._held], self._cost
        position = self._input.position()
        return lambda: {
            "held": encode_gaps(ordinals, position.first),
            "cost": cost,
            **position.to_json(),
        }

    def get_state(self) -> State:
        return self._make_state()()

    def set_state(self, state: State) -> None:
        self._reset()
        ordinals = decode_gaps(state["held"], state["first_ordinal"])
        elements = self._input.restore(state, ordinals)
        self._held = [elements[ordinal] for ordinal in ordinals]
        self._cost = state["cost"]

    def close(self) -> None:
        self._reset()
        self._input.close()


def _check_cost(cost: Element) -> int | float:
    value: Any = (
        cost.item() if isinstance(cost, np.generic | np.ndarray) and cost.ndim == 0 else cost
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidElementError(
            f"`cost_fn` must return a number, but returned {type(cost).__name__}"
        )
    if not 0 <= value < math.inf:
        raise InvalidElementError(f"`cost_fn` must return a cost of at least 0, but got {value}")
    return value
