"""The hall: numbered meetings of the workers of one session.

Rule 1. A meeting takes place when every worker has come. Its result is the same for all.
Rule 2. A contribution that comes again is answered again. A result is kept until every worker said
        that it has it; what comes for it after that is late, and nobody waits for the answer.
Rule 3. The session ends once, for one reason, for all: a worker that is missing was given up, or is
        gone for good, or the workers do not do the same. All that waits hears it, and so does
        whoever comes later.
Rule 4. The session begins with meeting 0. Before, workers come and go: one that was started again
        takes the place of the one before.
Rule 5. Later, a worker whose connection was lost may come back within `GRACE` seconds, as one that
        waits here does at once; one that is busy elsewhere does not notice, and counts as gone like
        one that was killed. That is looked at when somebody comes, so those who wait are asked to
        come again.

Workers are known by their ranks, and what they bring is nothing that the hall looks into. Times are
in seconds of any steady clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.collectives import ReduceOp, reduced
from headrace.errors import (
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
    UnavailableError,
)

__all__ = [
    "ALL",
    "ANY",
    "ERROR",
    "FIRST",
    "GRACE",
    "SUM",
    "Brought",
    "ComeAgain",
    "Contribution",
    "Due",
    "Hall",
    "Outcome",
    "combine",
]

GRACE = 0.5
"""Seconds after the loss of a connection in which a worker may be back."""


class Contribution(NamedTuple):
    """What a worker brings: what it thinks the meeting is about, and a value of some kind."""

    what: str
    kind: str
    value: Any


@dataclass(frozen=True)
class Outcome:
    """What came of a meeting."""

    value: Any


@dataclass(frozen=True)
class ComeAgain:
    """Ask again after so many seconds."""

    seconds: float


Answer: TypeAlias = Outcome | ComeAgain | HeadraceError


class Due(NamedTuple):
    """An answer that is due now, if that worker waits for it."""

    rank: int
    number: int
    answer: Answer


@dataclass
class _Worker:
    """What the hall knows of one."""

    incarnation: str = ""
    heard: float = 0.0
    at: str = ""
    done: int = 0
    gone_since: float | None = None
    has_left: bool = False


class Hall:
    """Says what is due to whom, whatever comes in.

    Args:
        names: Of the workers, by rank, as they are to be called in errors.
        combine: Returns the value that comes of a meeting, from its kind and the values brought, in
            the order of the ranks. It may raise a HeadraceError, which then is the result.
    """

    def __init__(self, names: Sequence[str], combine: Callable[[str, Sequence[Any]], Any]) -> None:
        self._names = tuple(names)
        self._combine = combine
        self._workers = [_Worker() for _ in names]
        #: Meetings that wait for somebody: number -> rank -> what it brought.
        self._open: dict[int, dict[int, Contribution]] = {}
        #: Meetings that took place, until all have what came of them.
        self._results: dict[int, Outcome | HeadraceError] = {}
        #: All below this number were forgotten.
        self._forgotten = 0
        #: Whether all workers were there at once.
        self.has_begun = False
        #: Why the session is over.
        self.failure: HeadraceError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every worker has left."""
        return all(worker.has_left for worker in self._workers)

    def has(self, rank: int, incarnation: str) -> bool:
        """Whether a worker is here, or was."""
        return self._workers[rank].incarnation == incarnation

    @property
    def kept(self) -> int:
        """How many results are kept."""
        return len(self._results)

    def contribute(
        self,
        rank: int,
        incarnation: str,
        number: int,
        done: int,
        contribution: Contribution,
        now: float,
    ) -> list[Due]:
        """Take a worker's contribution to a meeting.

        Args:
            rank: Whose.
            incarnation: Tells one process of that rank from the next.
            number: Of the meeting.
            done: The worker has the results of all meetings below this one.
            contribution: What it brings; of a repeat nothing is looked at.
            now: The time.
        """
        if self.failure is not None:
            return [Due(rank, number, self.failure)]
        if not self.has_begun and self._workers[rank].incarnation != incarnation:
            self._step_out(rank)
        worker = self._workers[rank]
        if worker.incarnation not in ("", incarnation) or worker.has_left:
            error = UnavailableError(
                f"{self._names[rank]} was started again while the others went on: workers that "
                "train together are all started together, and go on from a state that was saved"
            )
            return [*self._fail(error), Due(rank, number, error)]
        worker.incarnation, worker.heard, worker.gone_since = incarnation, now, None
        worker.done = max(worker.done, done)
        self._forget()
        if number in self._results:
            return [Due(rank, number, self._results[number])]
        if number < self._forgotten:
            return []
        meeting = self._open.setdefault(number, {})
        if rank not in meeting:
            meeting[rank] = contribution
            worker.at = contribution.what
            if (strange := self._differs(meeting, rank)) is not None:
                return self._fail(strange)
        if len(meeting) == len(self._names):
            return self._hold(number)
        return self._wait(rank, number, now)

    def gone(self, rank: int, now: float) -> list[Due]:
        """Take note that a worker's connection was lost."""
        worker = self._workers[rank]
        if self.failure is not None or worker.has_left:
            return []
        if not self.has_begun:
            self._step_out(rank)
            return []
        worker.gone_since = now
        return [
            Due(other, number, ComeAgain(GRACE))
            for number, meeting in self._open.items()
            if rank not in meeting
            for other in meeting
        ]

    def leave(self, rank: int, incarnation: str) -> list[Due]:
        """Take note that a worker comes to no further meeting."""
        worker = self._workers[rank]
        if worker.incarnation != incarnation:
            return []
        if not self.has_begun and self.failure is None:
            self._step_out(rank)
            return []
        worker.has_left = True
        if self.failure is None:
            for number, meeting in self._open.items():
                if rank not in meeting:
                    return self._fail(self._ended([rank], number))
                if meeting[rank].kind == ERROR:
                    return self._fail(self._failed_there(rank, meeting[rank]))
        self._forget()
        return []

    def lack(self, number: int, now: float) -> list[str]:
        """Return who is missing at a meeting, in words; nobody: it is over, or was not begun."""
        meeting = self._open.get(number)
        if not meeting or self.failure is not None:
            return []
        return [self._describe(rank, now) for rank in self._missing(meeting)]

    def give_up(self, number: int, waited: float, words: Sequence[str]) -> list[Due]:
        """End the session, since somebody has waited too long for those who are missing.

        Args:
            number: Of the meeting.
            waited: For how many seconds.
            words: Who is missing, as `lack` says; nobody: the session goes on.
        """
        if not words:
            return []
        what = next(iter(self._open[number].values())).what
        return self._fail(
            UnavailableError(
                f"{'; '.join(words)}: missing at {what}, which the others have waited for for "
                f"{waited:.0f} s. No worker goes on without the others: start all again, and go on "
                "from a state that was saved"
            )
        )

    # --- inside -------------------------------------------------------------------------------

    def _step_out(self, rank: int) -> None:
        """Forget that a worker was here, before the session has begun."""
        self._workers[rank] = _Worker()
        for meeting in self._open.values():
            meeting.pop(rank, None)

    def _missing(self, meeting: dict[int, Contribution]) -> list[int]:
        return [rank for rank in range(len(self._names)) if rank not in meeting]

    def _differs(self, meeting: dict[int, Contribution], rank: int) -> HeadraceError | None:
        mine = meeting[rank]
        for other, theirs in sorted(meeting.items()):
            if (theirs.what, theirs.kind) != (mine.what, mine.kind):
                for each, brought in ((other, theirs), (rank, mine)):
                    if brought.kind == ERROR:
                        return self._failed_there(each, brought)
                return FailedPreconditionError(
                    f"the workers do not do the same: {self._names[other]} is at {theirs.what}, "
                    f"and {self._names[rank]} is at {mine.what}; every worker must run the same "
                    "program, with the same steps in the same order"
                )
        return None

    def _failed_there(self, rank: int, contribution: Contribution) -> HeadraceError:
        text = b"".join(array.tobytes() for array in contribution.value.arrays).decode()
        return UnavailableError(
            f"{contribution.what} failed on {self._names[rank]}, and not on all workers: {text}. "
            "No worker goes on without the others: start all again, and go on from a state that "
            "was saved"
        )

    def _hold(self, number: int) -> list[Due]:
        meeting = self._open[number]
        values = [meeting[rank].value for rank in range(len(self._names))]
        result: Outcome | HeadraceError
        try:
            result = Outcome(self._combine(meeting[0].kind, values))
        except HeadraceError as error:
            result = error
        # In this order: an interruption between the two leaves a meeting that took place.
        self._results[number], self.has_begun = result, True
        del self._open[number]
        return [Due(rank, number, result) for rank in range(len(self._names))]

    def _wait(self, rank: int, number: int, now: float) -> list[Due]:
        """Return what is due to a worker whose meeting lacks others."""
        missing = self._missing(self._open[number])
        left = [each for each in missing if self._workers[each].has_left]
        if left:
            return self._fail(self._ended(left, number))
        since = {each: self._workers[each].gone_since for each in missing}
        away = {each: now - at for each, at in since.items() if at is not None}
        lost = [each for each, seconds in away.items() if seconds >= GRACE]
        if lost:
            return self._fail(self._ended(lost, number))
        if away:
            return [Due(rank, number, ComeAgain(GRACE - max(away.values())))]
        return []

    def _ended(self, ranks: Sequence[int], number: int) -> HeadraceError:
        who = ", ".join(self._names[rank] for rank in ranks)
        what = next(iter(self._open[number].values())).what
        how = "has left" if all(self._workers[rank].has_left for rank in ranks) else "is gone"
        return UnavailableError(
            f"{who} {how}: its process ended, or its connection was lost, while the others wait "
            f"for it at {what}. No worker goes on without the others: start all again, and go on "
            "from a state that was saved"
        )

    def _describe(self, rank: int, now: float) -> str:
        worker, name = self._workers[rank], self._names[rank]
        if not worker.incarnation:
            return f"{name} was not heard of so far (is it running, and does it find its way here?)"
        return f"{name} was last heard of {now - worker.heard:.0f} s ago, at {worker.at}"

    def _fail(self, error: HeadraceError) -> list[Due]:
        self.failure = error
        dues = [
            Due(rank, number, error) for number, meeting in self._open.items() for rank in meeting
        ]
        self._open.clear()
        return dues

    def _forget(self) -> None:
        done = [worker.done for worker in self._workers if not worker.has_left]
        everybody_has = min(done, default=self._forgotten)
        if not done:
            self._results.clear()
        for number in [each for each in self._results if each < everybody_has]:
            del self._results[number]
        self._forgotten = max(self._forgotten, everybody_has)


# --- What becomes of contributions: one value of those of all workers, by rank --------------------
#
#     ANY    whether any worker said yes, and the arrays of the first that brought some
#     SUM    each worker's arrays, added element by element
#     FIRST  what the first worker brought
#     ALL    what all workers brought, one after another
#     ERROR  nothing: the same step failed on all workers. What is brought is the error, as text
#
# Sums are made once, in one order: so they are the same on all workers, bit for bit.

ANY, SUM, FIRST, ALL, ERROR = "any", "sum", "first", "all", "error"


class Brought(NamedTuple):
    """What a worker brings, and what all take away."""

    flag: bool = False
    arrays: Sequence[NDArray[Any]] = ()


_Combine: TypeAlias = Callable[[Sequence[Brought]], Brought]


def combine(kind: str, values: Sequence[Brought]) -> Brought:
    """Return what comes of what the workers brought.

    Raises:
        FailedPreconditionError: There is no such kind.
        InvalidArgumentError: What they brought does not fit together.
    """
    how = _KINDS.get(kind)
    if how is None:
        raise FailedPreconditionError(
            f"meetings of the kind {kind!r} are not known; do all workers run the same version?"
        )
    return how(values)


def _any(values: Sequence[Brought]) -> Brought:
    arrays = next((value.arrays for value in values if value.arrays), ())
    return Brought(any(value.flag for value in values), [_kept(array) for array in arrays])


def _sum(values: Sequence[Brought]) -> Brought:
    _check_counts(values)
    columns = zip(*(value.arrays for value in values), strict=True)
    return Brought(arrays=[np.asarray(reduced(ReduceOp.SUM, column)) for column in columns])


def _first(values: Sequence[Brought]) -> Brought:
    return Brought(values[0].flag, [_kept(array) for array in values[0].arrays])


def _all(values: Sequence[Brought]) -> Brought:
    _check_counts(values)
    return Brought(arrays=[_kept(array) for value in values for array in value.arrays])


def _check_counts(values: Sequence[Brought]) -> None:
    if len({len(value.arrays) for value in values}) > 1:
        counts = ", ".join(str(len(value.arrays)) for value in values)
        raise InvalidArgumentError(
            f"the workers brought different numbers of values: {counts}, in the order of their "
            "ranks; return the same structure on all"
        )


def _kept(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that does not change later: what cannot be written here is somebody's own."""
    return array if array.flags.writeable else array.copy()


def _error(values: Sequence[Brought]) -> Brought:
    return Brought()


_KINDS: dict[str, _Combine] = {ANY: _any, SUM: _sum, FIRST: _first, ALL: _all, ERROR: _error}
