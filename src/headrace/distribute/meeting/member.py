"""A worker's end of the meetings: it comes, waits, repeats, warns, and gives up.

Rule 1. Meetings are numbered in the order in which this worker comes to them. All workers come to
        the same ones in the same order; so no two threads of one worker may come at once.
Rule 2. What is brought is kept until its result is here, and sent again after a connection was
        lost. The place answers a repeat as it did the first time.
Rule 3. A wait of ten seconds says in the log who is missing. After `timeout` seconds it ends, for
        all workers, with an UnavailableError that names them.
Rule 4. An interruption (Ctrl-C) at any instruction leaves a meeting that was come to, or none. What
        was under way then is sent again, since its answer may have been taken off the channel.
Rule 5. Once a session is over, every later wait raises the same. It is heard of at once, also by a
        worker that is busy elsewhere: so it knows why when the first worker is gone, too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from headrace.distribute.meeting.hall import Brought
from headrace.distribute.meeting.messages import (
    Again,
    Contribute,
    Failed,
    Lack,
    Lacking,
    Leave,
    Listen,
    Result,
    decode,
    encode,
    error_of,
)
from headrace.errors import FailedPreconditionError, HeadraceError, UnavailableError
from headrace.transport.channel import Buffer, Channel, Reply
from headrace.waiting import WaitWarnings

__all__ = [
    "End",
    "Member",
]

_log = logging.getLogger(__name__)

_SLACK_SECONDS = 1.0
"""What a wait may take longer than it was asked to; more is a pause of this process."""
_ANSWER_SECONDS = 5.0
"""How long the place may take to say who is missing,"""
_WORD_SECONDS = 1.0
"""and after how long it is said that it does not."""
_REFUSED_AT_MOST = 2
"""Connections in a row that are refused before the first worker counts as gone."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
"""Seconds between attempts to reach a first worker that is not there yet."""
_SMALL_BYTES = 64 << 10
"""A result that is kept after it was taken: one with a flag, or a spec."""
_NOTHING_TAKEN = -1, Brought()


class Member:
    """One worker of a session, until `end.close()`.

    Args:
        channel: Leads to the place.
        rank: Of this worker.
        names: Of all, by rank, for errors and the log.
        timeout: Seconds that others are waited for.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        names: Sequence[str],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._names = tuple(names)
        self._timeout = timeout
        self._clock = clock
        self._incarnation = secrets.token_hex(8)
        #: What ends it, and lives on when it is dropped.
        self.end = End(channel, rank, self._incarnation)
        #: Held by whoever reads or changes what follows: by `result` for as long as it waits, so
        #: what another thread asks (`look`, `forget`) waits for it too.
        self._lock = self.end.lock
        #: The number of the next meeting.
        self._next = 0
        #: How often something was brought.
        self._attempts = 0
        #: What was brought to meetings without a result so far, and its buffers; in their order.
        self._brought: dict[int, tuple[dict[str, Any], Sequence[Buffer]]] = {}
        #: Results that nobody has taken, and those that nobody wants.
        self._results: dict[int, Brought | HeadraceError] = {}
        self._unwanted: set[int] = set()
        #: The last one that was taken, and its meeting, if it was a flag or little more.
        self._taken: tuple[int, Brought | HeadraceError] = _NOTHING_TAKEN
        #: What is under way, by ticket: the meeting; None: a question who is missing.
        self._tickets: dict[int, int | None] = {}
        #: The ticket under which it hears of the session's end, whatever it waits for.
        self._listens: int | None = None
        #: Meetings to be asked about again, and when.
        self._later: dict[int, float] = {}
        self._refused, self._delay = 0, _FIRST_DELAY
        #: Why the first worker was not reached last.
        self._loss: UnavailableError | None = None
        self._failure: HeadraceError | None = None
        #: Who has waited for how long, for the log.
        self._waiting = ""
        #: Whether something is being sent or heard; found so at the beginning, it was interrupted.
        self._is_at_work = False

    def come(
        self,
        what: str,
        kind: str,
        flag: bool = False,
        arrays: Sequence[NDArray[Any]] = (),
        *,
        again: bool = False,
    ) -> int:
        """Come to the next meeting, without waiting; return its number for `result`.

        Args:
            what: What it is about, in words. All workers must say the same.
            kind: How the values that are brought become one (`hall`).
            flag: What this worker brings.
            arrays: What it brings, too. They must not change until the result is here.
            again: Whether an interrupted call may have come there already, which then counts: no
                two meetings in a row are about this.
        """
        heads, buffers = encode(arrays)
        said = {"what": what, "kind": kind, "flag": flag, "arrays": heads}
        with self._lock:
            self._check()
            self._begin_work()
            last = self._brought.get(self._next - 1) if again else None
            if last is not None and last[0]["what"] == what:
                self._is_at_work = False
                return self._next - 1
            number = self._next
            # No call between these two, where an interruption could part them.
            self._brought[number] = said, buffers
            self._next = number + 1
            self._send(number)
            self._is_at_work = False
            return number

    def result(self, number: int, timeout: float | None = None) -> Brought:
        """Wait for what came of a meeting; it can be taken once.

        The last one can be taken again, by whoever was interrupted then, if it is small.

        Args:
            number: What `come` returned.
            timeout: Seconds to wait if they are less than those of this member.

        Raises:
            UnavailableError: A worker is missing; it is named.
            FailedPreconditionError: The workers do not do the same.
            InvalidArgumentError: What they brought does not fit together.
        """
        with self._lock:
            self._begin_work()
            longest = min(self._timeout, math.inf if timeout is None else timeout)
            waited, warnings, ends, speaks = 0.0, WaitWarnings(), math.inf, math.inf
            while number not in self._results and number != self._taken[0]:
                self._check()
                if warnings.is_due(waited):
                    speaks = waited + self._look_around(number, waited)
                if None not in self._tickets.values():
                    speaks = math.inf
                elif waited >= speaks:
                    speaks = math.inf
                    self._say([f"{self._names[0]} does not answer"])
                if waited >= longest and ends == math.inf:
                    ends = waited + self._give_up(number, waited)
                if waited >= ends:
                    self._fail(self._silent(number, waited))
                    continue
                begun = self._clock()
                limit = ends if waited >= longest else longest
                asked = min(warnings.due_after, limit, speaks) - waited
                self._receive(begun + asked)
                # Time in which this process did not run is no waiting.
                waited += min(self._clock() - begun, asked + _SLACK_SECONDS)
            found = self._results.get(number, self._taken[1])
            arrays = found.arrays if isinstance(found, Brought) else ()
            is_small = sum(array.nbytes for array in arrays) <= _SMALL_BYTES
            self._taken = (number, found) if is_small else _NOTHING_TAKEN
            self._results.pop(number, None)
            self._is_at_work = False
        if isinstance(found, HeadraceError):
            raise found
        return found

    def meet(
        self,
        what: str,
        kind: str,
        flag: bool = False,
        arrays: Sequence[NDArray[Any]] = (),
        timeout: float | None = None,
    ) -> Brought:
        """Come to the next meeting, and wait for what comes of it; see `come` and `result`."""
        return self.result(self.come(what, kind, flag, arrays), timeout)

    def look(self) -> None:
        """Take what has come, without waiting: for one that waits for something else.

        Raises:
            HeadraceError: The session is over, for this reason.
        """
        with self._lock:
            self._begin_work()
            self._receive(self._clock())
            self._is_at_work = False
            self._check()

    def forget(self, numbers: Sequence[int]) -> None:
        """Take note that nobody will ask for these results."""
        with self._lock:
            for number in numbers:
                if self._results.pop(number, None) is None and number in self._brought:
                    self._unwanted.add(number)

    # --- sending ------------------------------------------------------------------------------

    def _begin_work(self) -> None:
        """Take note that something is done; after an interruption, ask for all answers again."""
        if self._is_at_work:
            for number in self._results.keys() & self._brought.keys():
                del self._brought[number]
            self._ask_again()
        self._is_at_work = True

    def _ask_again(self) -> None:
        self._forget_under_way()
        for number in self._brought:
            self._send(number)

    def _forget_under_way(self) -> None:
        self._tickets.clear()
        self._later.clear()
        self._listens = None

    def _send(self, number: int) -> None:
        said, buffers = self._brought[number]
        self._attempts += 1
        message = Contribute(
            hall=self.end.hall,
            rank=self._rank,
            incarnation=self._incarnation,
            number=number,
            done=next(iter(self._brought)),
            attempt=self._attempts,
            **said,
        )
        self._tickets[self._channel.send(message, buffers)] = number

    def _receive(self, until: float) -> None:
        """Take one answer, or do what is due, until a time at the latest."""
        now = self._clock()
        for number in [each for each, at in self._later.items() if at <= now]:
            del self._later[number]
            self._send(number)
        until = min([until, *self._later.values()])
        try:
            reply = self._channel.receive(max(0.0, until - now))
        except UnavailableError as error:
            self._lost(error)
        except HeadraceError as error:
            self._fail(error)
        else:
            if reply is not None:
                self._hear(reply)

    def _lost(self, error: UnavailableError) -> None:
        """Repeat what was under way; the first worker is gone where nobody listens any more."""
        self._forget_under_way()
        self._loss = error
        self._refused += error.refused
        wait = 0.0
        if not self.end.hall:  # it may not have started
            wait, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY)
        elif self._refused >= _REFUSED_AT_MOST:
            self._fail(
                UnavailableError(
                    f"{self._names[0]}, where the workers meet, is gone: its process ended "
                    f"({error}). No worker goes on without the others: start all again, and go on "
                    "from a state that was saved"
                )
            )
        self._later = dict.fromkeys(self._brought, self._clock() + wait)

    # --- hearing ------------------------------------------------------------------------------

    def _hear(self, reply: Reply) -> None:
        self._refused, self._loss = 0, None
        number = self._tickets.pop(reply.request_id, None)
        message = reply.message
        if isinstance(message, Failed) and reply.request_id == self._listens:
            self._fail(error_of(message))
            return
        if isinstance(message, Lacking):
            self._say(message.words)
            if not message.words:  # the first worker was interrupted as it answered
                self._ask_again()
        elif isinstance(message, Again):
            if number is not None:
                self._later[number] = self._clock() + message.seconds
        elif isinstance(message, Exception):
            error = message if isinstance(message, HeadraceError) else HeadraceError(str(message))
            self._fail(error)
        elif number is not None:
            assert isinstance(message, Result | Failed)
            self._take(number, message, reply.buffers)

    def _take(self, number: int, message: Result | Failed, buffers: Sequence[Buffer]) -> None:
        if number not in self._brought:
            return
        found: Brought | HeadraceError
        if isinstance(message, Result):
            self.end.hall = message.hall
            if self._listens is None:
                listen = Listen(hall=message.hall, rank=self._rank, incarnation=self._incarnation)
                self._listens = self._channel.send(listen)
            found = Brought(message.flag, decode(message.arrays, buffers))
        else:
            error = error_of(message)
            found = error
            if message.is_for_good:
                self._fail(error)
        if number not in self._unwanted:
            self._results[number] = found
        del self._brought[number]
        self._unwanted.discard(number)

    # --- waiting too long ---------------------------------------------------------------------

    def _look_around(self, number: int, waited: float) -> float:
        """Ask who is missing, for the log; return how long the answer may take."""
        self._waiting = f"{self._names[self._rank]} has waited for {waited:.0f} s"
        if self._loss is not None:
            self._say([f"{self._names[0]} cannot be reached ({self._loss})"])
            return math.inf
        if None in self._tickets.values():
            return 0.0
        self._ask_who(number, waited, gives_up=False)
        return _WORD_SECONDS

    def _say(self, words: Sequence[str]) -> None:
        if words and self._waiting:
            _log.warning("%s, of %g, for: %s", self._waiting, self._timeout, "; ".join(words))

    def _give_up(self, number: int, waited: float) -> float:
        """Have the session ended; return how long that may take."""
        self._waiting = ""
        if self._loss is not None:
            return 0.0
        self._ask_who(number, waited, gives_up=True)
        return _ANSWER_SECONDS

    def _ask_who(self, number: int, waited: float, gives_up: bool) -> None:
        question = Lack(
            hall=self.end.hall,
            rank=self._rank,
            incarnation=self._incarnation,
            number=number,
            waited=waited,
            gives_up=gives_up,
        )
        self._tickets[self._channel.send(question)] = None

    def _silent(self, number: int, waited: float) -> HeadraceError:
        what = self._brought[number][0]["what"]
        why = f" ({self._loss})" if self._loss is not None else ""
        return UnavailableError(
            f"{self._names[0]}, where the workers meet, did not answer for {waited:.0f} s{why}, "
            f"while {self._names[self._rank]} waits at {what}: is it running, and is this its "
            "address?"
        )

    def _fail(self, error: HeadraceError) -> None:
        if self._failure is None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            # A copy: the traceback of one that is raised again would grow.
            raise type(self._failure)(str(self._failure))
        if self.end.is_closed:
            raise FailedPreconditionError(
                "this strategy was closed: make another one, on all workers"
            )


# --- How a worker leaves: what lives on when its member is dropped --------------------------------

_LOCK_SECONDS = 1.0


class End:
    """Leaves: what waits hears it.

    Args:
        channel: Leads to the place.
        rank: Of the worker.
        incarnation: Of its member.
    """

    def __init__(self, channel: Channel, rank: int, incarnation: str) -> None:
        self._channel, self._rank, self._incarnation = channel, rank, incarnation
        #: Which hall it is, once that is known.
        self.hall = ""
        #: Held by whoever uses the channel. Who has it may take it again: a finalizer calls
        #: `close`, in the middle of anything.
        self.lock = threading.RLock()
        self.is_closed = False

    def close(self) -> None:
        """Leave; the others are told if they wait. May be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        # A thread that waits may have the lock, and the program is to end all the same.
        if not self.lock.acquire(timeout=_LOCK_SECONDS):
            return
        try:
            # Where nobody is there any more, there is nobody to be told.
            with contextlib.suppress(HeadraceError, OSError):
                self._channel.send(
                    Leave(hall=self.hall, rank=self._rank, incarnation=self._incarnation)
                )
            self._channel.close()
        finally:
            self.lock.release()
