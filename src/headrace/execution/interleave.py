"""The iterator of `interleave` and `flat_map`: datasets that a function opens, read in turn.

    input --function--> opened --turn--> slots --strips--> chunk

Whose turn it is, is arithmetic (`interleave_order`). A chunk ends where a dataset would have to be
opened, so no function is called before its element is asked for. With threads, datasets are
opened and read ahead, and come into the same slots in the same turns; so states are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.element.brief import Column
from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.inner import ClosedError, Inner
from headrace.execution.interleave_order import (
    Fill,
    Log,
    Strip,
    Turn,
    next_strip,
    state_of,
    taken_of,
    turn_after,
)
from headrace.execution.iterator import (
    MOST_FAILURES,
    ElementIterator,
    Singles,
    State,
    make_iterator,
)
from headrace.execution.open_datasets import OpenDatasets, OpensNext
from headrace.execution.places import Held, Strand, in_turns, mixed_chunk
from headrace.plan.combining import Interleave
from headrace.plan.units import Units
from headrace.plan.user_function import step_name

__all__ = ["InterleaveIterator"]


@make_iterator.register(Interleave)
class InterleaveIterator(ElementIterator):
    """Reads the datasets that a function returns for its input's elements, several in turn.

    When a dataset ends, its slot is taken by that of the next outer element.

    Args:
        node: The step.
        context: That of the step.
        outer: What opens datasets; None: the step's function, for its input.
    """

    def __init__(
        self, node: Interleave | Units, context: Context, outer: OpensNext | None = None
    ) -> None:
        kind = "flat_map" if node.cycle_length == 1 else None
        self._open = OpenDatasets(node, context, step_name(node, kind), outer)
        self._is_free = id(node) in context.free
        self._wants_places = context.wants_places
        self._names_units = context.names_units
        self._cycle = node.cycle_length
        # In a cycle of one all turns are alike.
        self._block = min(node.block_length, _NO_END) if self._cycle > 1 else 1
        self._begin()

    def _begin(self) -> None:
        self._turn = Turn(0, 0)
        #: An error to raise after what came before it, and the dataset that it came from.
        self._failure: tuple[Exception, Inner] | None = None

    @property
    def _threads(self) -> int:
        return self._open.threads

    @property
    def reads_ahead_freely(self) -> bool:
        return self._open.reads_ahead_freely

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        try:
            chunk = self._rows_at_once(limit) if self._cycle > 1 else None
            if chunk is None:
                chunk = self._next_chunk(limit)
        except ClosedError:  # by another thread
            return None
        inner = self._open.slots[self._turn.current] if chunk is not None else None
        self.gives_rows = inner is not None and inner.iterator.gives_rows and not self._threads
        return chunk

    def singles(self) -> Singles | None:
        if self._names_units or self._next_with_rows() is None:
            return super().singles()
        log = self._log()
        strip = self._strip_of_rows(_NO_END, log)
        if strip is None:
            return super().singles()
        log.take(strip, strip.size)
        return self._in_turns(strip), log.states()

    def _log(self) -> Log:
        return Log(self._open.standing(), self._turn, self._block)

    def _rows_at_once(self, limit: int) -> Chunk | None:
        """Return elements of datasets that give them one by one; None: they must be read."""
        if self._next_with_rows() is None:
            return None
        log, turns = self._log(), self._turns() if self._names_units else None
        rows: list[Any] = []
        while len(rows) < limit:
            strip = self._strip_of_rows(limit - len(rows), log, keeps_error=bool(rows))
            if strip is None:
                break
            before = len(rows)
            rows += self._in_turns(strip, keeps_error=True, is_first=not rows)
            log.take(strip, len(rows) - before)
        if not rows:
            return None
        return Chunk.of_rows(rows, log.states(), None if turns is None else turns(len(rows)))

    def _turns(self) -> Callable[[int], Column]:
        """Return what says of so many elements that come next, which units they are of.

        No dataset is opened before the last of them.
        """
        inners, (first, taken) = self._open.slots, self._turn
        start = (first - inners[:first].count(None)) * self._block + taken
        units = [inner.unit for inner in inners if inner is not None and inner.unit is not None]
        return lambda count: in_turns(units, self._block, start, count)

    def _strip_of_rows(self, limit: int, log: Log, *, keeps_error: bool = False) -> Strip | None:
        """Return the turns in which the next single elements come; None: they do not.

        Args:
            limit: The most elements.
            log: Where it is noted what is begun or has ended.
            keeps_error: Whether an error is left for the next call.
        """
        first, taken = self._turn
        inner = self._next_with_rows()
        if inner is None:
            return None
        rest = min(self._block - taken, limit) if self._cycle > 1 else limit
        if inner.rows is None:
            # It costs calls, so others are not begun before their turns.
            try:
                has_more = inner.begin_rows()
            except Exception as error:
                if keeps_error:
                    self._failure = error, inner
                    return None
                inner.pass_over_error()
                raise
            log.place(first, inner if has_more else None)
            if has_more:
                return Strip((first,), rest, 1)
            self._vacate(first)
            log.turn(self._turn)
            return None
        if taken or self._cycle == 1 or limit < 2 * self._block:
            return Strip((first,), rest, 1)
        slots, is_whole = [first], True
        for ahead in range(1, self._cycle):
            slot = (first + ahead) % self._cycle
            inner = self._open.slots[slot]
            if inner is None and self._open.has_ended:
                continue
            if inner is None or inner.rows is None or inner.held is not None:
                is_whole = False
                break
            slots.append(slot)
        turns = limit // self._block
        rounds = turns // len(slots) if is_whole else 1
        return Strip(tuple(slots[:turns]), self._block, max(rounds, 1))

    def _next_with_rows(self) -> Inner | None:
        """Return the dataset whose turn it is, if it may give elements one by one."""
        inner = self._open.slots[self._turn.current]
        if inner is None or self._failure is not None or not self._has_rows(inner):
            return None
        return inner

    def _has_rows(self, inner: Inner) -> bool:
        """Whether what comes next of a dataset may come one by one."""
        may = not (self._threads or self._wants_places)
        return may and inner.iterator.gives_rows and inner.held is None

    def _in_turns(
        self, strip: Strip, *, keeps_error: bool = False, is_first: bool = True
    ) -> Iterator[Any]:
        """Yield single elements as a strip says, until those of a dataset end.

        Args:
            strip: The turns.
            keeps_error: Whether an error after other elements is left for the next call.
            is_first: Whether none of these came before the strip.
        """
        inners = [inner for slot in strip.slots if (inner := self._open.slots[slot]) is not None]
        of_each = [inner.rows for inner in inners if inner.rows is not None]
        each, count = strip.each, 0
        try:
            for _ in range(strip.rounds):
                for rows in of_each:
                    stop = count + each
                    for row in rows:
                        count += 1
                        yield row
                        if count == stop:
                            break
                    else:
                        self._leave_turns(strip, inners, count).rows = None
                        return
        except Exception as error:
            inner = self._leave_turns(strip, inners, count)
            if not keeps_error or (is_first and not count):
                inner.pass_over_error()
                raise
            inner.rows, self._failure = None, (error, inner)
            return
        self._leave_turns(strip, inners, count)

    def _leave_turns(self, strip: Strip, inners: list[Inner], count: int) -> Inner:
        """Note that so many elements of a strip came; return the dataset whose turn it is."""
        for number, inner in enumerate(inners):
            inner.index += taken_of(strip, number, count)
        self._turn = turn_after(strip, count, self._turn, self._block, self._cycle)
        return inners[count // strip.each % len(inners)]

    def _next_chunk(self, limit: int) -> Chunk | None:
        if self._failure is not None:
            failure, inner = self._failure
            self._failure = None
            inner.pass_over_error()
            raise failure
        if self._cycle == 1 and not self._threads:
            return self._next_of_one(limit)
        open_ones = self._open
        log = Log(open_ones.standing(), self._turn, self._block)
        strands: list[Strand] = []
        size = 0
        was_free = open_ones.reads_ahead_freely
        if self._threads:
            open_ones.open_ahead()
        while size < limit:
            found = next_strip(open_ones.in_hand, self._turn, self._block, limit - size)
            if found is None:
                break
            if isinstance(found, Fill):
                if was_free and not open_ones.reads_ahead_freely:
                    # More may not have been meant, now that it costs calls.
                    if size:
                        break
                    limit = 1
                self._turn = _turn_at(found.slot, self._turn)
                log.turn(self._turn)
                if not self._have_in_hand(found.slot, size, limit - size, log):
                    break
                continue
            strands.append(self._take(found))
            log.take(found, found.size)
            size += found.size
            if self._cycle == 1:
                break  # chunks pass as they are
        return mixed_chunk(strands).with_states(log.states()) if size else None

    def _next_of_one(self, limit: int) -> Chunk | None:
        """Return elements of one dataset after the other: all turns are alike."""
        open_ones = self._open
        was_free = open_ones.reads_ahead_freely
        while True:
            inner = open_ones.slots[0]
            if inner is None:
                if open_ones.has_ended or not open_ones.open(0):
                    return None
                inner = open_ones.slots[0]
                assert inner is not None
            if inner.held is not None:
                break
            if was_free and not inner.iterator.reads_ahead_freely:
                limit = 1  # more may not have been meant, now that it costs calls
            try:
                more = inner.read(limit)
            except Exception:
                inner.pass_over_error()
                raise
            if more:
                break
            self._vacate(0)
        count = min(limit, inner.in_hand)
        states, start = inner.states, inner.index
        held, _ = inner.take(count)
        open_ones.in_hand[0] = inner.in_hand
        # The place of what is open, whatever is opened later.
        outer, turn, open_one = open_ones.outer_place(), self._turn, inner

        def states_at(index: int) -> State:
            return state_of(([(open_one, states, start + index)], outer), turn)

        chunk = held.chunk.slice(start, start + count)
        if held.unit is not None:
            chunk = chunk.with_places(in_turns([held.unit], 1, 0, count))
        return chunk.with_states(states_at)

    def _have_in_hand(self, slot: int, size: int, limit: int, log: Log) -> bool:
        """Open or read what the slot needs whose turn it is, or give the turn to another.

        Args:
            slot: It has nothing in hand.
            size: Elements that the chunk has already.
            limit: Elements that it may have still.
            log: Where it is noted.

        Returns:
            False: the chunk ends here, for more would have to be opened, waited for or raised, or
            comes otherwise.
        """
        inner = self._open.slots[slot]
        if inner is None:
            if size and not self._open.opens_at_once:
                return False
            if self._open.open(slot):
                log.place(slot, self._open.slots[slot])
            log.outer(self._open.outer_place())
            return True
        if self._threads and not inner.is_ready:
            if self._is_free and self._turn_to_ready(log):
                return True
            if size:
                return False
            if self._is_free:
                self._open.wait_for_any()
                return True
        if size and self._cycle > 1 and self._has_rows(inner) and max(self._open.in_hand) <= 0:
            return False  # the next chunk has them one by one, for a tenth of what reads cost
        try:
            has_more = self._fill(slot, inner, limit)
        except ClosedError:
            raise
        except Exception as failure:
            if size:
                self._failure = failure, inner
                return False
            inner.pass_over_error()
            raise
        log.place(slot, inner if has_more else None)
        log.turn(self._turn)
        return True

    def _take(self, strip: Strip) -> Strand:
        """Take a strip out of the slots' hands."""
        count = strip.each * strip.rounds
        parts: list[tuple[Held, int]] = []
        for slot in strip.slots:
            held_by = self._open.slots[slot]
            assert held_by is not None
            parts.append(held_by.take(count))
            self._open.in_hand[slot] -= count
        self._turn = turn_after(strip, strip.size, self._turn, self._block, self._cycle)
        return Strand(strip.each, strip.rounds, parts)

    def _fill(self, slot: int, inner: Inner, limit: int) -> bool:
        """Have something in hand in a slot whose turn it is; False: it has ended."""
        datasets = self._open
        if datasets.receive(inner) if self._threads else inner.read(*self._wish(inner, limit)):
            datasets.in_hand[slot] = inner.in_hand
            return True
        self._vacate(slot)
        return False

    def _vacate(self, slot: int) -> None:
        """Close the dataset in a slot, which has ended; its turn is over."""
        self._open.vacate(slot)
        self._turn = Turn((slot + 1) % self._cycle, 0)

    def _wish(self, inner: Inner, limit: int) -> tuple[int, bool]:
        """Return how many elements to ask a dataset for, and whether more are welcome."""
        if not inner.iterator.reads_ahead_freely:
            # No more than comes next.
            return (min(self._block - self._turn.taken, limit) if self._cycle > 1 else limit), False
        if self._cycle == 1:
            return limit, False
        # Its share of what is asked for; then all run out together, and are filled together.
        turns = -(-limit // self._block)
        return -(-turns // self._open.number) * self._block - self._turn.taken, True

    def _turn_to_ready(self, log: Log) -> bool:
        """Give the turn to the next slot that need not be waited for; False: there is none."""
        for ahead in range(self._cycle):
            slot = (self._turn.current + ahead) % self._cycle
            inner = self._open.slots[slot]
            if inner is None:
                is_ready = not self._open.has_ended and self._open.has_ahead
            else:
                is_ready = self._open.in_hand[slot] > 0 or inner.is_ready
            if is_ready:
                self._turn = _turn_at(slot, self._turn)
                log.turn(self._turn)
                return True
        return False

    def skip(self, count: int) -> int:
        """Pass over elements; where a dataset can pass over its own, no function is called."""
        passed = failed = 0
        while passed < count:
            try:
                step = self._skip_some(count - passed)
            except Exception:
                failed += 1
                if failed > MOST_FAILURES + count:
                    raise
                continue
            if step is None:
                break
            passed += step
        return passed

    def _skip_some(self, count: int) -> int | None:
        """Pass over up to `count` elements in one turn; None: all have ended."""
        if self._failure is not None:
            self._failure[1].pass_over_error()
            self._failure = None
        found = next_strip(self._open.in_hand, self._turn, self._block, count)
        if found is None:
            return None
        if isinstance(found, Strip):
            self._take(found)
            return found.size
        slot, self._turn = found.slot, _turn_at(found.slot, self._turn)
        inner = self._open.slots[slot]
        if inner is None:
            self._open.open(slot)
            return 0
        if self._threads or inner.iterator.reads_ahead_freely:
            try:
                self._fill(slot, inner, count)
            except Exception:
                inner.pass_over_error()
                raise
            return 0
        wish = self._wish(inner, count)[0]
        passed = inner.skip(wish)
        if passed:
            strip = Strip((slot,), passed, 1)
            self._turn = turn_after(strip, passed, self._turn, self._block, self._cycle)
        if passed < wish:
            self._vacate(slot)
        return passed

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        return state_of(self._open.standing(), self._turn)

    def set_state(self, state: State) -> None:
        self._begin()
        self._open.set_state(state)
        self._turn = Turn(state["current"], state["taken"])

    def close(self) -> None:
        self._begin()
        self._open.close()


_NO_END = 1 << 40
"""More elements than any dataset gives in a turn."""


def _turn_at(slot: int, turn: Turn) -> Turn:
    return turn if turn.current == slot else Turn(slot, 0)
