"""The queue of closures: which worker gets which, and what becomes of them. Events in, actions out.

Rule 1. First come, first served. A closure that has another one's value as an argument waits for
        it, and others pass. A worker has as many closures as asked for, or more if they are short.
Rule 2. A closure is done when its result is here, and servers have forgotten its keys (`Settling`).
Rule 3. A lost worker is fenced first; then its closures go back to the head, with their numbers.
        Those that ran count a loss, and fail when they have had too many.
Rule 4. With staleness s, closure k is held until every closure up to k - s - 1 is done; where there
        are rounds, until its round is open (`Rounds`).
Rule 5. The first error of a function is kept. What is queued is cancelled, what runs may write no
        more and is waited for; then the error is raised once, and all is as before.
Rule 6. Nothing waits for a worker that is not there: what it had is dealt to others, or is ready.

Time comes as an argument. Closures of one worker alone (`home`) make what it keeps for itself:
nobody waits for them, and their errors are those of whoever uses what they make.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.coordinator.closure import (
    CANCELLED,
    NEVER,
    Closure,
    Decided,
    Failure,
    How,
    Payload,
    Phase,
    Result,
    Round,
    Send,
    await_inputs,
    awaited,
    call_off,
    is_call_off,
    lost_too_often,
    took_too_long,
)
from headrace.coordinator.load import Load, Roster
from headrace.errors import CancelledError

__all__ = ["ClosureQueue", "Deadlines", "Ready", "Rounds", "Settling"]


class ClosureQueue:
    """Closures from `schedule` to their end.

    Args:
        in_flight: Closures that a worker has at a time, at least.
        threads: Closures that a worker runs at a time.
        staleness: Bound of Rule 4; None: none.
        round_size: How many closures make a round; None: there are no rounds.
        most_queued: Closures that may wait for a worker.
        settle_within: Seconds for which servers need not be told of an end while nobody waits.
    """

    def __init__(
        self,
        *,
        in_flight: int = 2,
        threads: int = 1,
        staleness: int | None = None,
        round_size: int | None = None,
        most_queued: int = 1 << 16,
        settle_within: float = 0.0,
    ) -> None:
        self._rounds = None if round_size is None else Rounds(round_size)
        self._most_queued = most_queued
        self.unsettled: dict[int, Closure] = {}
        """Closures that are not over, by number, but those of one worker alone."""
        self._next = 1
        self._next_private = -1
        self._ready = Ready(staleness, self._rounds)
        self._settling = Settling(settle_within if staleness is None else 0.0)
        self.loads = Roster(in_flight, threads)
        """What each worker has that is there."""
        #: What lost lives had, until they are fenced.
        self._fenced: dict[int, list[Closure]] = {}
        self._deadlines = Deadlines()
        self._decided = Decided()
        self.failure: Failure | None = None
        """The error that is to be raised, once `is_drained`."""
        self.low = 1
        """All closures below this number are over."""
        self.num_waiting = 0
        """Closures that no worker has."""
        self.finished = 0
        """How many are over: a sign of progress."""

    # --- what a caller asks ---------------------------------------------------------------------

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left of what was scheduled."""
        return not self.unsettled

    @property
    def has_room(self) -> bool:
        """Whether another closure may be scheduled."""
        return self.num_waiting < self._most_queued

    @property
    def last(self) -> int:
        """Number of the closure that was scheduled last."""
        return self._next - 1

    @property
    def first(self) -> int:
        """The first closure that has not ended; servers may still have keys of those before."""
        return self._settling.first(self.unsettled, self.last)

    def is_over(self, number: int) -> bool:
        """Whether all closures up to this one are."""
        return self.low > number

    def take_failure(self) -> Failure | None:
        """Return the error to raise, and go on as if nothing had been."""
        failure, self.failure = self.failure, None
        return failure

    # --- events: what users want ----------------------------------------------------------------

    def schedule(self, closure: Closure, now: float) -> int:
        """Take a closure; return its number. Not while there is a failure."""
        assert self.failure is None, "a failure is raised before anything is scheduled"
        closure.number, self._next = self._next, self._next + 1
        self.unsettled[closure.number] = closure
        self.num_waiting += 1
        error = await_inputs(closure)
        if error is not None:
            self._end_waiting(closure, error)
            if not is_call_off(error):
                self._keep(error, now)
        elif not closure.missing:
            self._ready.push(closure)
        return closure.number

    def end_round(self) -> int:
        """Have rounds end with what was scheduled, which is waited for; return the last number."""
        if self._rounds is not None:
            self._rounds.cut(self.last)
        self._settling.wait_for(self.last)
        return self.last

    def keep_at(self, worker: int, closure: Closure) -> None:
        """Take a closure for one worker alone, if it is there."""
        closure.number, self._next_private = self._next_private, self._next_private - 1
        closure.home = worker
        if (load := self.loads.of(worker)) is not None:
            closure.phase = Phase.READY
            load.private.append(closure)

    def cancel(self, closure: Closure, now: float) -> bool:
        """Call a closure off; its result is CancelledError at once. False: it has its result."""
        if closure.result.is_ready:
            return False
        error = CancelledError(CANCELLED)
        if closure.phase in (Phase.HELD, Phase.READY):
            self._end_waiting(closure, error)
        else:
            self._give_up(closure, error)
        self._follow(closure.result)
        return True

    # --- events: what workers do ----------------------------------------------------------------

    def worker_came(self, worker: int, session: int) -> None:
        """Take note of a worker, or of another life of one that was lost."""
        self.loads.add(worker, session)

    def worker_lost(self, worker: int) -> None:
        """Take note that a worker is lost, with all that it had."""
        if (load := self.loads.remove(worker)) is None:
            return
        for closure in load.running.values():
            closure.phase = Phase.FENCED if closure.home is None else Phase.OVER
        self._fenced[load.session] = [each for each in load.running.values() if each.home is None]
        self._decided.fences.append(load.session)

    def worker_leaves(self, worker: int) -> bool:
        """Send a worker nothing more; return whether it has nothing any more."""
        if (load := self.loads.of(worker)) is None:
            return True
        self._decided.calls_off += load.leave()
        return not load.running

    def returned(
        self,
        session: int,
        number: int,
        payload: Payload | None,
        error: Exception | None,
        *,
        wrote: bool,
        seconds: float,
        now: float,
        steps: Any = None,
    ) -> bool:
        """Take note of how a closure ended; False: nobody waits for that."""
        load = self.loads.living(session)
        closure = None if load is None else load.remove(number, now)
        if load is None or closure is None:
            return False
        load.took(seconds)
        closure.wrote = closure.wrote or wrote
        closure.phase = Phase.SETTLING
        self._tell(closure, payload, error, now)
        if closure.result.error is None:
            closure.steps = steps
        self._settle(closure)
        return True

    def called_off(self, session: int, number: int, *, is_dropped: bool, now: float) -> None:
        """Take note of whether a worker has let go of a closure that was called off."""
        load = self.loads.living(session)
        if load is None:
            return
        if not is_dropped:
            load.begins(number, now)
        elif (closure := load.remove(number, now)) is None:
            return
        elif closure.is_off or closure.home is not None:
            self._tell_off(closure)
            self._settle(closure)
        else:
            self._put_back(closure)

    # --- events: what servers do ----------------------------------------------------------------

    def fenced(self, session: int, now: float, error: Exception | None = None) -> None:
        """Take note that servers refuse the writes of a life; or that they could not be told."""
        for closure in self._fenced.pop(session, ()):
            closure.losses += closure.begun_at is not None
            # Even one that seemed to wait: the answer of the one before may have been lost.
            closure.wrote = True
            if closure.is_off:
                self._tell_off(closure)
            elif error is not None:
                self._tell(closure, None, error, now)
            elif closure.losses > closure.most_losses:
                self._tell(closure, None, lost_too_often(closure), now)
            else:
                self._put_back(closure)
                continue
            self._settle(closure)

    def settled(self, numbers: Iterable[int], now: float, error: Exception | None = None) -> None:
        """Take note that servers have forgotten keys; or that they could not be told."""
        for number in numbers:
            closure = self.unsettled.get(number)
            if closure is not None and closure.phase is Phase.SETTLING:
                self._finish(closure)
        if error is not None:
            self._keep(error, now)

    def pushed(self, now: float, error: Exception | None = None) -> None:
        """Take note that the mean of a round is on the servers; or that it could not be pushed."""
        for closure in () if self._rounds is None else self._rounds.pushed():
            self._forget(closure)
        if error is not None:
            self._keep(error, now)

    # --- what follows ---------------------------------------------------------------------------

    def decide(self, now: float) -> Decided:
        """Return what is to be done now, and when to look again."""
        self._expire(now)
        self._press(now)
        while self._rounds is not None and (complete := self._rounds.take()) is not None:
            if complete.steps:
                self._decided.round = complete
                break
            self.pushed(now)
        self._deal(now)
        decided, self._decided = self._decided, Decided()
        at_once = self.failure is not None
        decided.settles = self._settling.take(now, self.first, at_once=at_once)
        press_at = NEVER if self.failure is None else self.failure.look_at
        look_at = min(self._deadlines.first, self.loads.next_look(), press_at, self._settling.due)
        decided.wake_in = max(0.0, look_at - now)
        return decided

    def _deal(self, now: float) -> None:
        for load in self.loads:
            while load.private:
                self._send(load.private.popleft(), load, now)
        while (closure := self._ready.first(self.low)) is not None:
            if (chosen := self.loads.least_busy()) is None:
                return
            self._ready.pop()
            self.num_waiting -= 1
            self._send(closure, chosen, now)
        self._decided.calls_off += self.loads.recall(now)

    def _send(self, closure: Closure, load: Load, now: float) -> None:
        closure.phase = Phase.SENT
        closure.worker, closure.session, closure.is_recalled = load.worker, load.session, False
        closure.begun_at = None
        closure.attempt += 1
        load.send(closure, now)
        self._decided.sends.append(Send(closure, load.worker, load.session))
        if closure.timeout is not None:
            self._deadlines.add(closure, now)

    def _expire(self, now: float) -> None:
        for closure in self._deadlines.passed(now):
            error = took_too_long(closure)
            self._give_up(closure, error)
            self._follow(closure.result)
            self._keep(error, now)

    def _press(self, now: float) -> None:
        if self.failure is not None and now >= self.failure.look_at:
            self.failure.is_pressed = True
            for closure in [c for c in self.unsettled.values() if c.phase is Phase.SENT]:
                self._give_up(closure, CancelledError(CANCELLED))

    # --- one closure's way ----------------------------------------------------------------------

    def _put_back(self, closure: Closure) -> None:
        self.num_waiting += 1
        self._ready.push(closure)

    def _end_waiting(self, closure: Closure, error: Exception) -> None:
        """End a closure that no worker has."""
        self.num_waiting -= 1
        closure.result.tell(None, error)
        self._settle(closure)

    def _give_up(self, closure: Closure, error: Exception) -> None:
        """End a closure that a worker has, or had: its slot is free when the worker says so."""
        closure.is_off = True
        closure.wrote = True
        closure.result.tell(None, error)
        if closure.phase is Phase.SENT:
            self._decided.calls_off.append(call_off(closure, How.ABANDON))

    def _tell(
        self, closure: Closure, payload: Payload | None, error: Exception | None, now: float
    ) -> None:
        if closure.result.tell(payload, error):
            self._follow(closure.result)
            if error is not None and closure.home is None:
                self._keep(error, now)

    def _tell_off(self, closure: Closure) -> None:
        if closure.result.tell(None, CancelledError(CANCELLED)):
            self._follow(closure.result)

    def _follow(self, told: Result) -> None:
        """Go on with closures that waited for a result, and with those that waited for these."""
        for closure, error in awaited(told):
            if error is None:
                self._ready.push(closure)
            else:
                self._end_waiting(closure, error)

    def _keep(self, error: Exception, now: float) -> None:
        """Keep the error of a function: the first one calls off all else."""
        failure = self.failure
        if failure is not None:
            if not is_call_off(error):
                failure.others.append(error)
            return
        self.failure = failure = Failure(error, now)
        self.end_round()
        for closure in list(self.unsettled.values()):
            if closure.phase in (Phase.HELD, Phase.READY):
                self._end_waiting(closure, CancelledError(CANCELLED))
                failure.cancelled += 1
            elif closure.phase is Phase.FENCED:
                closure.is_off = True
            elif closure.phase is Phase.SENT and not closure.is_off:
                closure.is_off = True
                self._decided.calls_off.append(call_off(closure, How.REFUSE))

    def _settle(self, closure: Closure) -> None:
        if closure.home is not None:
            closure.phase = Phase.OVER
        elif self._rounds is not None:
            closure.phase = Phase.SETTLING
            self._rounds.end(closure)
        else:
            self._forget(closure)

    def _forget(self, closure: Closure) -> None:
        """Have servers forget a closure's keys, if there are any: then it is over."""
        closure.work, closure.inputs, closure.steps = None, (), None
        if closure.wrote:
            closure.phase = Phase.SETTLING
            self._settling.add(closure)
        else:
            self._finish(closure)

    def _finish(self, closure: Closure) -> None:
        closure.phase = Phase.OVER
        del self.unsettled[closure.number]
        self.finished += 1
        while self.low < self._next and self.low not in self.unsettled:
            self.low += 1


# --- closures that wait for a worker, in the order of their numbers, whenever they came -----------


class Ready:
    """A heap; closures that are not READY any more are passed over.

    Args:
        staleness: How many closures before one may not be over when it begins; None: any number.
        rounds: Says which may begin; None: all.
    """

    def __init__(self, staleness: int | None, rounds: Rounds | None) -> None:
        self._staleness = staleness
        self._rounds = rounds
        self._heap: list[tuple[int, Closure]] = []

    def push(self, closure: Closure) -> None:
        """Take a closure; its phase is READY as long as it waits here."""
        closure.phase = Phase.READY
        heapq.heappush(self._heap, (closure.number, closure))

    def first(self, low: int) -> Closure | None:
        """Return the one that comes next; None: there is none that may begin.

        Args:
            low: All closures below this number are over.
        """
        heap = self._heap
        while heap:
            closure = heap[0][1]
            if closure.phase is Phase.READY:
                return closure if self._may_begin(closure.number, low) else None
            heapq.heappop(heap)
        return None

    def _may_begin(self, number: int, low: int) -> bool:
        if self._staleness is not None and low < number - self._staleness:
            return False
        return self._rounds is None or self._rounds.may_begin(number)

    def pop(self) -> None:
        """Let go of the one that `first` returned."""
        heapq.heappop(self._heap)


# --- which closures have ended whose keys servers still have, and when servers are told. Pure -----

# Rule 1. While nobody waits for it, servers are told of several ends at a time: a request to each
#         of them costs more than a short function does.
# Rule 2. Somebody waits where `join` or `done` asked for numbers up to one (`wait_for`), and all of
#         those have ended. Where staleness is bounded, the next closure may wait: nothing is held
#         back.
# Rule 3. A closure that was called off may still write, and servers refuse that when they are told:
#         so they are told at once. So they are after an error, and of many ends.

_MOST = 256
"""Of so many ends servers are told at once: what they remember stays small."""


class Settling:
    """Numbers of closures that have ended, until servers are told.

    Args:
        within: Seconds after which servers are told in any case; 0: at once.
    """

    def __init__(self, within: float) -> None:
        self._within = within
        self._numbers: list[int] = []
        self._least = 0
        self._is_urgent = within <= 0
        self.due = NEVER
        """When servers are told in any case."""
        #: Rising: somebody waits until all closures up to each of these are over.
        self._awaited: deque[int] = deque()
        self._first = 1

    def wait_for(self, number: int) -> None:
        """Take note that somebody waits until all closures up to this one are over."""
        if not self._awaited or number > self._awaited[-1]:
            self._awaited.append(number)

    def add(self, closure: Closure) -> None:
        """Have servers told of a closure, sooner or later."""
        number = closure.number
        self._least = min(self._least, number) if self._numbers else number
        self._numbers.append(number)
        self._is_urgent = self._is_urgent or closure.is_off

    def first(self, unsettled: Mapping[int, Closure], last: int) -> int:
        """Return the first closure that has not ended, of those up to `last`; `last` + 1: all have.

        Args:
            unsettled: Closures that are not over. What has ended never runs again.
            last: The number that was scheduled last.
        """
        first = self._first
        while first <= last:
            closure = unsettled.get(first)
            if closure is not None and closure.phase is not Phase.SETTLING:
                break
            first += 1
        self._first = first
        return first

    def take(self, now: float, first: int, *, at_once: bool) -> list[int]:
        """Return what servers are to be told now.

        Args:
            now: In seconds.
            first: The first closure that has not ended.
            at_once: Whether somebody waits for all there is.
        """
        if not self._numbers:
            return []
        if self.due == NEVER:
            self.due = now + self._within
        while self._awaited and self._awaited[0] < min(first, self._least):
            self._awaited.popleft()  # all of those have ended, and servers know
        if not (
            at_once
            or self._is_urgent
            or (self._awaited and self._awaited[0] < first)
            or now >= self.due
            or len(self._numbers) >= _MOST
        ):
            return []
        numbers, self._numbers = self._numbers, []
        self.due, self._is_urgent = NEVER, self._within <= 0
        return numbers


# --- when closures with a timeout have run for too long -------------------------------------------


class Deadlines:
    """Attempts that are under way, by the time at which they have to be looked at."""

    def __init__(self) -> None:
        #: When, which closure, and which attempt at it.
        self._heap: list[tuple[float, int, int, Closure]] = []

    @property
    def first(self) -> float:
        """When to look next."""
        return self._heap[0][0] if self._heap else NEVER

    def add(self, closure: Closure, now: float) -> None:
        """Watch an attempt that was sent just now."""
        assert closure.timeout is not None
        entry = (now + closure.timeout, closure.number, closure.attempt, closure)
        heapq.heappush(self._heap, entry)

    def passed(self, now: float) -> list[Closure]:
        """Return closures that have run for too long.

        Time in which a closure waited for a thread of its worker does not count.
        """
        found: list[Closure] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, attempt, closure = heapq.heappop(self._heap)
            if closure.phase is not Phase.SENT or closure.attempt != attempt or closure.is_off:
                continue
            assert closure.timeout is not None
            until = closure.timeout + (now if closure.begun_at is None else closure.begun_at)
            if until <= now:
                found.append(closure)
            else:
                heapq.heappush(self._heap, (until, number, attempt, closure))
        return found


# --- which closures make a round, and when it is complete. Pure -----------------------------------

#     closures 1 2 3 | 4 5 6 | 7            rounds of 3; the last one is cut by `join`
#
# Rule 1. A closure may begin when its round is open: the round before is complete, and its mean is
#         on the servers.
# Rule 2. A round has `size` numbers in a row, or fewer where it was cut: it is complete when all of
#         them have ended, however they ended.


class Rounds:
    """Rounds of closures, one after another.

    Args:
        size: How many closures make one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        #: The round that is open has the numbers from here to `_last`.
        self._first = 1
        #: Where rounds are cut: numbers of closures that end one.
        self._cuts: set[int] = set()
        #: Closures that have ended, in this round and later ones.
        self._ended: dict[int, Closure] = {}
        #: All numbers below this one have ended.
        self._next = 1
        #: Those of a round whose mean is on its way to the servers; none: there is no such round.
        self._pushing: list[Closure] = []

    @property
    def _last(self) -> int:
        """The last number of the open round."""
        return min([self._first + self._size - 1, *self._cuts])

    def may_begin(self, number: int) -> bool:
        """Whether a closure may be sent to a worker."""
        return number <= self._last and not self._pushing

    def cut(self, last: int) -> None:
        """End the round that has this number with it; the next number begins another."""
        if last >= self._first:
            self._cuts.add(last)

    def end(self, closure: Closure) -> None:
        """Take note that a closure has ended, or never will be sent."""
        self._ended[closure.number] = closure
        while self._next in self._ended:
            self._next += 1

    def take(self) -> Round | None:
        """Return the round that is complete, once; None: there is none. See `pushed`."""
        last = self._last
        if self._pushing or self._next <= last:
            return None
        closures = [self._ended.pop(number) for number in range(self._first, last + 1)]
        self._pushing = closures
        steps = [each.steps for each in closures if each.steps is not None]
        # The round is written with the keys of its last closure.
        closures[-1].wrote |= bool(steps)
        return Round(last, steps)

    def pushed(self) -> list[Closure]:
        """Take note that the mean of that round is on the servers: return its closures."""
        closures, self._pushing = self._pushing, []
        self._first = self._last + 1
        self._cuts = {each for each in self._cuts if each >= self._first}
        return closures
