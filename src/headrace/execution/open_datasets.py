"""The datasets that an interleave has open: one in each slot, and those that are opened ahead."""

from __future__ import annotations

from collections import deque

from headrace.execution.context import Context
from headrace.execution.inner import Inner, Opened, Readers
from headrace.execution.interleave_log import OuterPlace, Standing
from headrace.execution.interleave_order import VACANT
from headrace.execution.iterator import State
from headrace.execution.outer import OpensNext, Outer
from headrace.plan.combining import Interleave
from headrace.plan.units import Units

__all__ = ["OpenDatasets"]


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
