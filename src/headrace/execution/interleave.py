"""The interleave iterator: datasets that a function opens, several read in turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, runtime_checkable

from headrace.element.chunk import Chunk
from headrace.errors import UserFunctionError
from headrace.execution.context import Context
from headrace.execution.intake import Intake, skip
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.pace import Pace
from headrace.execution.user_function import caller, user_error
from headrace.plan.combining import Interleave
from headrace.plan.node import Node

__all__ = ["InterleaveIterator"]


@runtime_checkable
class _HasPlan(Protocol):
    """What a user's function returns to name a dataset: anything with a plan."""

    @property
    def plan(self) -> Node: ...


class _Slot:
    """One open dataset of an interleave, read ahead by a thread if there is a pool."""

    def __init__(self, origin: State, number: int, iterator: ElementIterator, least: int) -> None:
        self.origin = origin  # place of the outer element
        self.number = number  # of the outer element
        self.iterator = iterator
        self.pace = Pace(least=least)
        self.before: State = None  # of the iterator, before what is in hand
        self.rows: list[Any] = []  # in hand ...
        self.offset = 0  # ... of which these were taken
        self.pending: Future[Chunk | None] | None = None
        self.pending_before: State = None
        self.has_ended = False

    @property
    def in_hand(self) -> int:
        return len(self.rows) - self.offset

    @property
    def is_ready(self) -> bool:
        """Whether it can be taken from, or is known to have ended, without waiting."""
        return self.in_hand > 0 or self.has_ended or self.pending is None or self.pending.done()

    def read_ahead(self, pool: ThreadPoolExecutor) -> None:
        if self.pending is None and not self.has_ended:
            self.pending_before = self.iterator.get_state()
            self.pending = pool.submit(self.pace.next_chunk, self.iterator)

    def fill(self) -> bool:
        """Have at least one element in hand; return False at the end."""
        while not self.in_hand and not self.has_ended:
            if self.pending is not None:
                pending, self.pending = self.pending, None
                self.before = self.pending_before
                chunk = pending.result()
            else:
                self.before = self.iterator.get_state()
                chunk = self.pace.next_chunk(self.iterator)
            if chunk is None:
                self.has_ended = True
                self.iterator.close()
            else:
                self.rows, self.offset = chunk.rows(), 0
        return self.in_hand > 0

    def take(self, count: int) -> list[Any]:
        start = self.offset
        self.offset = min(start + count, len(self.rows))
        return self.rows[start : self.offset]

    def get_state(self) -> State:
        if self.has_ended:
            return None
        if self.in_hand:
            inner, passed = self.before, self.offset
        elif self.pending is not None:
            inner, passed = self.pending_before, 0
        else:
            inner, passed = self.iterator.get_state(), 0
        return {"origin": self.origin, "number": self.number, "inner": inner, "skip": passed}

    def close(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
            wait_for([self.pending])
            self.pending = None
        self.iterator.close()


@make_iterator.register(Interleave)
class InterleaveIterator(ElementIterator):
    """Reads the datasets that a function returns for its input's elements, several in turn.

    When a dataset ends, its place in the cycle is taken by that of the next outer element.
    """

    def __init__(self, node: Interleave, context: Context) -> None:
        self._node = node
        self._call: Callable[[Any], Any] = caller(node.fn)
        self._context = context
        self._intake = Intake(make_iterator(node.input, context.below(0)))
        self._threads = (
            0 if node.num_parallel_calls is None else context.threads(node.num_parallel_calls)
        )
        self._is_ordered = context.is_ordered(node.deterministic)
        self._pool: ThreadPoolExecutor | None = None
        self._slots: list[_Slot | None] = [None] * node.cycle_length
        self._begin()

    def _begin(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._slots = [None] * self._node.cycle_length
        self._current = 0  # the slot whose turn it is
        self._taken = 0  # of its block
        self._opened = 0  # outer elements so far
        self._outer_has_ended = False
        self._failure: Exception | None = None  # to raise once what came before it was returned

    def next_chunk(self, limit: int) -> Chunk | None:
        if len(self._slots) == 1 and not self._threads:
            return self._next_flat(limit)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        rows: list[Any] = []
        while len(rows) < limit:
            try:
                slot = self._turn()
            except Exception as failure:
                if not rows:
                    raise
                self._failure = failure
                break
            if slot is None:
                break
            self._take_block(slot, rows, limit)
        return Chunk.of_rows(rows) if rows else None

    def _take_block(self, slot: _Slot, rows: list[Any], limit: int) -> None:
        block = self._node.block_length
        if block == 1 and self._take_rounds(rows, limit):
            return
        taken = slot.take(min(block - self._taken, limit - len(rows)))
        rows += taken
        self._taken += len(taken)
        if self._taken == block:
            self._advance()

    def _take_rounds(self, rows: list[Any], limit: int) -> bool:
        """Take whole rounds of one element a slot at once; False if no whole round is in hand."""
        slots = self._slots
        if any(slot is None or slot.has_ended for slot in slots):
            return False
        order = [slots[(self._current + i) % len(slots)] for i in range(len(slots))]
        rounds = min(
            min(slot.in_hand for slot in order if slot is not None),
            (limit - len(rows)) // len(slots),
        )
        if rounds < 2:
            return False
        mixed: list[Any] = [None] * (rounds * len(slots))
        for i, slot in enumerate(order):
            assert slot is not None
            mixed[i :: len(slots)] = slot.take(rounds)
        rows += mixed
        return True

    def _advance(self) -> None:
        self._current = (self._current + 1) % len(self._slots)
        self._taken = 0

    def _turn(self) -> _Slot | None:
        """Return the slot to take from next, with an element in hand; None: all have ended."""
        idle = 0
        while idle <= len(self._slots):
            slot = self._slots[self._current]
            if slot is None and not self._outer_has_ended:
                slot = self._open()
            if self._threads:
                self._read_ahead()
                if slot is not None and not self._is_ordered and not slot.is_ready:
                    self._find_ready()
                    slot = self._slots[self._current]
            if slot is not None and slot.fill():
                return slot
            if slot is not None:
                self._slots[self._current] = None
                idle = 0
            else:
                idle += 1
            self._advance()
        return None

    def _read_ahead(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="headrace-interleave")
        for i, slot in enumerate(self._slots):
            if slot is None and not self._outer_has_ended:
                if i != self._current and not self._is_next_to_open(i):
                    continue
                slot = self._open(i)
            if slot is not None and not slot.in_hand:
                slot.read_ahead(self._pool)

    def _is_next_to_open(self, place: int) -> bool:
        """Whether no empty slot comes between the current one and this: the order of opening."""
        at = self._current
        while at != place:
            if self._slots[at] is None:
                return False
            at = (at + 1) % len(self._slots)
        # Only before the first round are all slots empty at once; then they open in turn.
        return self._opened < len(self._slots)

    def _find_ready(self) -> None:
        """Make a slot that need not be waited for the current one; wait if there is none."""
        size = len(self._slots)
        for i in range(1, size):
            slot = self._slots[(self._current + i) % size]
            if slot is not None and slot.is_ready:
                self._current, self._taken = (self._current + i) % size, 0
                return

    def _open(self, place: int | None = None) -> _Slot | None:
        """Open the dataset of the next outer element in a slot (the current one)."""
        origin = self._intake.get_state()
        outer = self._intake.take(1)
        if outer is None:
            self._outer_has_ended = True
            return None
        number = self._opened
        self._opened += 1
        iterator = self._iterator_of(outer.rows()[0], number)
        slot = _Slot(origin, number, iterator, least=self._node.block_length)
        self._slots[self._current if place is None else place] = slot
        return slot

    def _iterator_of(self, element: Any, number: int) -> ElementIterator:
        node = self._node
        stage = "flat_map" if node.cycle_length == 1 else "interleave"
        place = f"{stage} ({node.location})" if node.location else stage
        try:
            inner = self._call(element)
        except Exception as error:
            raise user_error(error, node.fn, place, number) from error
        if not isinstance(inner, _HasPlan):
            raise UserFunctionError(
                f"the function of {place} must return a Dataset, but returned "
                f"{type(inner).__name__} for element {number}",
                position=number,
                original_type="TypeError",
            )
        # Sources that a function opens are read whole, and are new for each outer element.
        inner_context = self._context.below(1).in_pass(number)
        return make_iterator(inner.plan, inner_context)

    def _next_flat(self, limit: int) -> Chunk | None:
        """A cycle of one, on this thread: chunks pass as they are, columns too."""
        while True:
            slot = self._slots[0]
            if slot is None:
                slot = None if self._outer_has_ended else self._open()
                if slot is None:
                    return None
            if slot.in_hand:  # after a restore
                return Chunk.of_rows(slot.take(limit))
            chunk = slot.iterator.next_chunk(limit)
            if chunk is not None:
                return chunk
            slot.close()
            self._slots[0] = None

    # --- state --------------------------------------------------------------------------------

    def get_state(self) -> State:
        return {
            "input": self._intake.get_state(),
            "slots": [None if slot is None else slot.get_state() for slot in self._slots],
            "numbers": self._opened,
            "current": self._current,
            "taken": self._taken,
            "ended": self._outer_has_ended,
        }

    def set_state(self, state: State) -> None:
        self._begin()
        for i, saved in enumerate(state["slots"]):
            if saved is None:
                continue
            self._intake.set_state(saved["origin"])
            self._opened = saved["number"]
            slot = self._open(i)
            if slot is None:
                raise RuntimeError("the input of an interleave is shorter than when it was saved")
            slot.iterator.set_state(saved["inner"])
            skip(slot.iterator, saved["skip"])
        self._intake.set_state(state["input"])
        self._opened = state["numbers"]
        self._current, self._taken = state["current"], state["taken"]
        self._outer_has_ended = state["ended"]

    def close(self) -> None:
        self._begin()
        self._outer_has_ended = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._intake.close()
