"""The queue of closures: which worker gets which, and what becomes of them. Events in, actions out.

Rule 1. First come, first served. A closure that has another one's value as an argument waits for
        it, and others pass. A worker has as many closures as asked for, or more if they are short.
Rule 2. A closure is done when its result is here, and servers have forgotten its keys (`settling`).
Rule 3. A lost worker is fenced first; then its closures go back to the head, with their numbers.
        Those that ran count a loss, and fail when they have had too many.
Rule 4. With staleness s, closure k is held until every closure up to k - s - 1 is done; where there
        are rounds, until its round is open (`rounds`).
Rule 5. The first error of a function is kept. What is queued is cancelled, what runs may write no
        more and is waited for; then the error is raised once, and all is as before.
Rule 6. Nothing waits for a worker that is not there: what it had is dealt to others, or is ready.

Time comes as an argument. Closures of one worker alone (`home`) make what it keeps for itself:
nobody waits for them, and their errors are those of whoever uses what they make.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.coordinator.closure import Closure, Payload, Phase, Result
from headrace.coordinator.deadlines import Deadlines
from headrace.coordinator.decided import NEVER, Decided, How, Send, call_off
from headrace.coordinator.failure import (
    CANCELLED,
    Failure,
    is_call_off,
    lost_too_often,
    took_too_long,
)
from headrace.coordinator.inputs import await_inputs, awaited
from headrace.coordinator.load import Load
from headrace.coordinator.ready import Ready
from headrace.coordinator.roster import Roster
from headrace.coordinator.rounds import Rounds
from headrace.coordinator.settling import Settling
from headrace.errors import CancelledError

__all__ = ["ClosureQueue"]


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
        self.loads = self._roster = Roster(in_flight, threads)
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
        if (load := self._roster.of(worker)) is not None:
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
        self._roster.add(worker, session)

    def worker_lost(self, worker: int) -> None:
        """Take note that a worker is lost, with all that it had."""
        if (load := self._roster.remove(worker)) is None:
            return
        for closure in load.running.values():
            closure.phase = Phase.FENCED if closure.home is None else Phase.OVER
        self._fenced[load.session] = [each for each in load.running.values() if each.home is None]
        self._decided.fences.append(load.session)

    def worker_leaves(self, worker: int) -> bool:
        """Send a worker nothing more; return whether it has nothing any more."""
        if (load := self._roster.of(worker)) is None:
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
        load = self._roster.living(session)
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
        load = self._roster.living(session)
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
        look_at = min(self._deadlines.first, self._roster.next_look(), press_at, self._settling.due)
        decided.wake_in = max(0.0, look_at - now)
        return decided

    def _deal(self, now: float) -> None:
        for load in self._roster:
            while load.private:
                self._send(load.private.popleft(), load, now)
        while (closure := self._ready.first(self.low)) is not None:
            if (chosen := self._roster.least_busy()) is None:
                return
            self._ready.pop()
            self.num_waiting -= 1
            self._send(closure, chosen, now)
        self._decided.calls_off += self._roster.recall(now)

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
