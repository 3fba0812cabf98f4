"""What an interleave has open: its outer input, and a dataset in each slot."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from headrace.element.chunk import States
from headrace.element.places import numbers_in
from headrace.errors import DataLossError, UserFunctionError
from headrace.execution.context import Context, meets_others
from headrace.execution.inner import Inner, Opened, Readers
from headrace.execution.intake import Intake, Pace
from headrace.execution.interleave_order import VACANT, OuterPlace, Standing
from headrace.execution.iterator import State, make_iterator
from headrace.execution.places import Places
from headrace.plan.combining import Interleave
from headrace.plan.node import Node
from headrace.plan.units import Units
from headrace.plan.user_function import UserFunction

__all__ = [
    "OpenDatasets",
    "OpensNext",
    "Outer",
]

# --- The outer input: its elements, one by one, and the datasets opened for them ------------------

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


# --- The datasets that are open: one in each slot, and those that are opened ahead ----------------


class OpenDatasets:
    """Opens datasets, has them read ahead where there are threads, and closes them.

    Args:
        node: The step.
        context: That of the step.
        step: Its name, for errors.
        outer: What opens the next one; None: the step's function.
    """

    def __init__(
        self,
        node: Interleave | Units,
        context: Context,
        step: str,
        outer: OpensNext | None = None,
    ) -> None:
        if outer is None:
            assert isinstance(node, Interleave)
            outer = Outer(node, context, step)
        self._outer: OpensNext = outer
        self._step = step
        self._cycle = node.cycle_length
        calls = node.num_parallel_calls if isinstance(node, Interleave) else None
        self.threads = 0 if calls is None else context.threads(calls)
        self._readers: Readers | None = None
        self.slots: list[Inner | None] = []
        #: Opened, and in no slot yet: the next ones first.
        self._ahead: deque[Opened] = deque()
        self.begin()

    def begin(self) -> None:
        """Close all datasets, and have all slots empty."""
        self._drop()
        self._was_free = False  # reading ahead in the dataset that ended last
        self.slots = [None] * self._cycle
        self.in_hand = [0] * self._cycle
        """Elements that can be taken from each slot, or VACANT."""
        self.has_ended = False
        """Whether the input has, and this was found out in a turn."""

    @property
    def reads_ahead_freely(self) -> bool:
        """Whether reading ahead is free in all that are open."""
        open_ones = [slot for slot in self.slots if slot is not None]
        if not open_ones:
            return self._was_free  # the next ones are taken to be like the last
        return all(slot.iterator.reads_ahead_freely for slot in open_ones)

    @property
    def number(self) -> int:
        """How many slots have a dataset."""
        return sum([slot is not None for slot in self.slots])

    # --- opening --------------------------------------------------------------------------------

    @property
    def has_ahead(self) -> bool:
        """Whether it is known what the next outer element gives."""
        return len(self._ahead) > 0

    @property
    def opens_at_once(self) -> bool:
        """Whether a slot can be filled without a call, a wait or an error."""
        return self.has_ahead and self._ahead[0].error is None

    def open(self, slot: int) -> bool:
        """Put the next dataset into an empty slot; False: there is none."""
        opened = self._ahead.popleft() if self._ahead else self._next()
        if opened.is_end:
            self.has_ended = True
            self._set_in_hand()
            return False
        if opened.error is not None:
            raise opened.error
        assert opened.inner is not None
        self.slots[slot] = opened.inner
        if self.threads:
            self.open_ahead()
        self._set_in_hand()
        return True

    def _next(self) -> Opened:
        opened = self._outer.next()
        self._read_together()
        return opened

    def _read_together(self) -> None:
        """Read on threads datasets that wait for each other: in turn they would never meet."""
        if self._outer.meets_others and not self.threads:
            self.threads = self._cycle

    def open_ahead(self) -> None:
        """Open datasets for the slots that are empty, and one more, and have them all read."""
        readers = self._readers
        if readers is None:
            readers = self._readers = Readers(self.threads)
        wanted = 1 + self._cycle - self.number
        while len(self._ahead) < wanted and not self.has_ended:
            if self._ahead and self._ahead[-1].is_end:
                break
            self._ahead.append(self._next())
            inner = self._ahead[-1].inner
            if inner is not None:
                readers.read(inner)

    def vacate(self, slot: int) -> None:
        """Close the dataset in a slot, which has ended."""
        inner = self.slots[slot]
        assert inner is not None
        self._was_free = inner.iterator.reads_ahead_freely
        inner.close()
        self.slots[slot] = None
        self._set_in_hand()

    def _set_in_hand(self) -> None:
        """Note what is in hand in each slot, after one of them changed."""
        empty = VACANT if self.has_ended else 0
        self.in_hand = [empty if slot is None else slot.in_hand for slot in self.slots]

    # --- with threads ---------------------------------------------------------------------------

    def receive(self, inner: Inner) -> bool:
        """Have in hand what a thread reads of a dataset, and more read; False: it has ended."""
        assert self._readers is not None
        self._readers.wait_for(inner, self._step)
        has_more = inner.receive()
        if has_more:
            self._readers.read(inner)
        return has_more

    def wait_for_any(self) -> None:
        """Wait until something was read of one of the datasets in the slots."""
        assert self._readers is not None
        open_ones = [slot for slot in self.slots if slot is not None]
        self._readers.wait_for_any(open_ones, self._step)

    # --- state ----------------------------------------------------------------------------------

    def outer_place(self) -> OuterPlace:
        """Return where the input stands, apart from what was opened ahead."""
        if self._ahead:
            first = self._ahead[0]
            return first.origin, first.number, self.has_ended
        return (*self._outer.place(), self.has_ended)

    def standing(self) -> Standing:
        """Return where all slots and the input stand."""
        slots = [None if slot is None else (slot, slot.states, slot.index) for slot in self.slots]
        return slots, self.outer_place()

    def set_state(self, state: State) -> None:
        """Open again what was open in this state, each dataset at its place."""
        self.begin()
        for slot, saved in enumerate(state["slots"]):
            if saved is None:
                continue
            inner = self._outer.open_at(saved["origin"], saved["number"])
            inner.set_state(saved["inner"])
            self.slots[slot] = inner
        self._read_together()
        self._outer.set_state(state["input"], state["numbers"])
        self.has_ended = state["ended"]
        self._set_in_hand()
        if self.threads:
            self._readers = Readers(self.threads)
            for open_one in filter(None, self.slots):
                self._readers.read(open_one)

    def _drop(self) -> None:
        """Close all datasets that are open."""
        inners = [slot for slot in self.slots if slot is not None]
        inners += [opened.inner for opened in self._ahead if opened.inner is not None]
        if self._readers is not None:
            self._readers.close(inners, self._step)
        else:
            for inner in inners:
                inner.close()
        # At last: an interruption before this closes them once more.
        self._readers, self.slots, self._ahead = None, [], deque()

    def close(self) -> None:
        """Close the datasets and the input; there are no more then."""
        self.begin()
        self.has_ended = True
        self._set_in_hand()
        self._outer.close()
