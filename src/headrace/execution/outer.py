"""The outer input of an interleave: its elements, one by one, and the datasets opened for them."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.element.chunk import States
from headrace.element.places import numbers_in
from headrace.errors import DataLossError, UserFunctionError
from headrace.execution.context import Context
from headrace.execution.inner import Inner, Opened
from headrace.execution.intake import Intake
from headrace.execution.iteration import meets_others
from headrace.execution.iterator import State, make_iterator
from headrace.execution.pace import Pace
from headrace.execution.places import Places
from headrace.plan.combining import Interleave
from headrace.plan.node import Node
from headrace.plan.user_function import UserFunction

__all__ = ["OpensNext", "Outer"]

_SLOT_BYTES = 1 << 18
_ALL_BYTES = 16 << 20
"""What is read ahead of each dataset, and of all that are open: about so much."""


class OpensNext(Protocol):
    """Opens datasets, one by one, for the slots of an interleave."""

    meets_others: bool
    """Whether a dataset was opened whose elements wait for those of other datasets."""

    def next(self) -> Opened:
        """Open the next dataset."""

    def open_at(self, origin: State, number: int) -> Inner:
        """Open number `number`, whose place is `origin`, again."""

    def place(self) -> tuple[States, int]:
        """Return the place of the next one, and its number."""

    def set_state(self, state: State, number: int) -> None:
        """Go to a place, that of number `number`."""

    def close(self) -> None:
        """Let go of what it reads."""


class Outer:
    """Opens the datasets of an interleave.

    Args:
        node: The step.
        context: That of the step.
        step: Its name, for errors.
    """

    def __init__(self, node: Interleave, context: Context, step: str) -> None:
        self._node = node
        self._context = context
        self._step = step
        self._function = UserFunction(node.fn, step, context.contain_exits)
        self._intake = Intake(make_iterator(node.input, context.with_places(True)))
        #: The place after all that was opened; None: ask the input.
        self._after: States | None = None
        self._count = 0  # elements that were opened
        self.meets_others = False

    def next(self) -> Opened:
        """Open the dataset of the next element."""
        intake = self._intake
        before, number = self.place()
        try:
            chunk = intake.look_ahead(1)
        except Exception as error:
            self._after = _always(intake.get_state())
            return Opened(before, number, error=error)
        if chunk is None:
            self._after = _always(intake.get_state())
            return Opened(before, number, is_end=True)
        states, index = chunk.states, intake.offset
        row, place = chunk.rows()[index], chunk.places_of(slice(index, index + 1))
        intake.use(1)
        self._count = number + 1
        self._after = lambda after: states(index + 1 + after)
        origin = states if not index else lambda after: states(index + after)
        try:
            return Opened(origin, number, inner=self._open(row, place, origin, number))
        except Exception as error:
            return Opened(origin, number, error=error)

    def open_at(self, origin: State, number: int) -> Inner:
        """Open the dataset of element `number`, whose place is `origin`."""
        self._intake.set_state(origin)
        chunk = self._intake.take(1)
        if chunk is None:
            raise DataLossError(
                f"the input of {self._step} is shorter than when the state was saved; restore it "
                "with the same data"
            )
        return self._open(chunk.rows()[0], chunk.places, _always(origin), number)

    def _open(self, row: Any, place: Places | None, origin: States, number: int) -> Inner:
        assert place is not None
        function = self._function
        try:
            dataset = function(row)
        except BaseException as error:
            raise function.blame(error, number, row) from error
        plan = getattr(dataset, "plan", None)
        if not isinstance(plan, Node):
            raise UserFunctionError(
                f"the function of {self._step} must return a Dataset, but returned "
                f"{type(dataset).__name__} for element {number}",
                position=number,
                original_type="TypeError",
            )
        if self._node.cycle_length > 1 and not self.meets_others:
            self.meets_others = meets_others(plan)
        numbers = numbers_in(place)
        assert numbers is not None
        nested = self._context.nested(self._node.number or 0, int(numbers[0]))
        iterator = self._context.build(plan, nested)
        # What all slots hold together is bounded.
        most_bytes = min(_SLOT_BYTES, _ALL_BYTES // self._node.cycle_length)
        pace = Pace(least=self._node.block_length, most_bytes=most_bytes)
        return Inner(origin, number, iterator, pace, place)

    def place(self) -> tuple[States, int]:
        """Return the place of the next element, and its number."""
        return self._after or _always(self._intake.get_state()), self._count

    def set_state(self, state: State, number: int) -> None:
        """Go to a place, that of element `number`."""
        self._intake.set_state(state)
        self._after = None
        self._count = number

    def close(self) -> None:
        """Close the input."""
        self._intake.close()


def _always(state: State) -> States:
    return lambda index: state
