"""State machine of collectives: numbered operations of the workers of one session.

Rule 1. A collective completes when every worker has contributed. All workers get the same result.
Rule 2. A repeated contribution is answered again. A result is kept until every worker has
        acknowledged it; a contribution that arrives later is ignored, since no worker waits for it.
Rule 3. The session fails once, with one error for all workers: a missing worker timed out or was
        lost, or the workers run different operations. The error answers all pending contributions
        and all later ones.
Rule 4. The session starts when collective 0 completes. Before that, workers may leave and join: a
        restarted worker replaces its predecessor.
Rule 5. After that, a worker whose connection was lost may reconnect within `RECONNECT_SECONDS`. A
        worker that waits here reconnects at once; one that is busy elsewhere does not notice the
        loss, and counts as lost, like a killed one. This is checked when a contribution arrives,
        so the server requests new contributions from waiting workers.

Workers are identified by rank; contributed values are opaque. Times are seconds of any monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.collectives import ReduceOp, reduce_values
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
    "RECONNECT_SECONDS",
    "SUM",
    "CollectiveOutcome",
    "CollectiveState",
    "CollectiveValue",
    "Contribution",
    "RankAnswer",
    "RetryAfter",
    "combine",
]

RECONNECT_SECONDS = 0.5
"""Seconds after a lost connection within which a worker may reconnect."""


class Contribution(NamedTuple):
    """Contribution of a worker: description and kind of the collective, and a value."""

    description: str
    kind: str
    value: Any


@dataclass(frozen=True)
class CollectiveOutcome:
    """Result of a collective."""

    value: Any


@dataclass(frozen=True)
class RetryAfter:
    """Request to contribute again after this number of seconds."""

    seconds: float


CollectiveAnswer: TypeAlias = CollectiveOutcome | RetryAfter | HeadraceError


class RankAnswer(NamedTuple):
    """Answer to send now, if the worker waits for it."""

    rank: int
    number: int
    answer: CollectiveAnswer


@dataclass
class _WorkerState:
    """State of one worker."""

    process_id: str = ""
    last_heard: float = 0.0
    last_collective: str = ""
    acknowledged: int = 0
    disconnected_since: float | None = None
    has_left: bool = False


class CollectiveState:
    """State of a session; each input returns the answers to send.

    Args:
        names: Names of the workers by rank, for errors.
        combine: Function of a collective's kind and the contributed values, in rank order, that
            returns the result. A HeadraceError that it raises becomes the result.
    """

    def __init__(self, names: Sequence[str], combine: Callable[[str, Sequence[Any]], Any]) -> None:
        self._names = tuple(names)
        self._combine = combine
        self._workers = [_WorkerState() for _ in names]
        #: Incomplete collectives: number -> rank -> contribution.
        self._pending: dict[int, dict[int, Contribution]] = {}
        #: Results of completed collectives that not all workers have acknowledged.
        self._results: dict[int, CollectiveOutcome | HeadraceError] = {}
        #: Number below which all results were dropped.
        self._first_kept = 0
        #: Whether a collective has completed, so that all workers have joined.
        self.has_started: bool = False
        #: Error that ended the session.
        self.failure: HeadraceError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every worker has left."""
        return all(worker.has_left for worker in self._workers)

    def has_worker(self, rank: int, process_id: str) -> bool:
        """Return whether this process is the worker of that rank, even if it has left."""
        return self._workers[rank].process_id == process_id

    @property
    def num_results(self) -> int:
        """Number of results that are kept."""
        return len(self._results)

    def contribute(
        self,
        rank: int,
        process_id: str,
        number: int,
        acknowledged: int,
        contribution: Contribution,
        now: float,
    ) -> list[RankAnswer]:
        """Add a worker's contribution to a collective.

        Args:
            rank: Rank of the worker.
            process_id: Identifies one process of that rank; a restarted process has another.
            number: Number of the collective.
            acknowledged: Number below which the worker has received all results.
            contribution: The contribution; ignored in a repetition.
            now: Time in seconds.
        """
        if self.failure is not None:
            return [RankAnswer(rank, number, self.failure)]
        if not self.has_started and self._workers[rank].process_id != process_id:
            self._forget_worker(rank)
        worker = self._workers[rank]
        if worker.process_id not in ("", process_id) or worker.has_left:
            error = UnavailableError(
                f"{self._names[rank]} was restarted while other workers continued: restart all "
                "workers together from a saved state"
            )
            return [*self._fail(error), RankAnswer(rank, number, error)]
        worker.process_id, worker.last_heard, worker.disconnected_since = process_id, now, None
        worker.acknowledged = max(worker.acknowledged, acknowledged)
        self._drop_acknowledged()
        if number in self._results:
            return [RankAnswer(rank, number, self._results[number])]
        if number < self._first_kept:
            return []
        contributions = self._pending.setdefault(number, {})
        if rank not in contributions:
            contributions[rank] = contribution
            worker.last_collective = contribution.description
            if (mismatch := self._find_mismatch(contributions, rank)) is not None:
                return self._fail(mismatch)
        if len(contributions) == len(self._names):
            return self._complete(number)
        return self._wait_for_missing(rank, number, now)

    def disconnected(self, rank: int, now: float) -> list[RankAnswer]:
        """Handle the loss of a worker's connection."""
        worker = self._workers[rank]
        if self.failure is not None or worker.has_left:
            return []
        if not self.has_started:
            self._forget_worker(rank)
            return []
        worker.disconnected_since = now
        return [
            RankAnswer(other, number, RetryAfter(RECONNECT_SECONDS))
            for number, contributions in self._pending.items()
            if rank not in contributions
            for other in contributions
        ]

    def leave(self, rank: int, process_id: str) -> list[RankAnswer]:
        """Handle that a worker takes part in no further collective."""
        worker = self._workers[rank]
        if worker.process_id != process_id:
            return []
        if not self.has_started and self.failure is None:
            self._forget_worker(rank)
            return []
        worker.has_left = True
        if self.failure is None:
            for number, contributions in self._pending.items():
                if rank not in contributions:
                    return self._fail(self._ended_error([rank], number))
                if contributions[rank].kind == ERROR:
                    return self._fail(self._remote_error(rank, contributions[rank]))
        self._drop_acknowledged()
        return []

    def describe_missing(self, number: int, now: float) -> list[str]:
        """Describe the workers missing in a collective; empty if it is complete or unknown."""
        contributions = self._pending.get(number)
        if not contributions or self.failure is not None:
            return []
        return [self._describe(rank, now) for rank in self._missing(contributions)]

    def fail_missing(self, number: int, waited: float, missing: Sequence[str]) -> list[RankAnswer]:
        """Fail the session, because a worker has waited too long for missing workers.

        Args:
            number: Number of the collective.
            waited: Seconds waited.
            missing: Result of `describe_missing`; if empty, the session continues.
        """
        if not missing:
            return []
        description = next(iter(self._pending[number].values())).description
        return self._fail(
            UnavailableError(
                f"the other workers waited {waited:.0f} s in {description}, but "
                f"{'; '.join(missing)}. Workers cannot continue without each other: restart all "
                "of them from a saved state"
            )
        )

    # --- internal -----------------------------------------------------------------------------

    def _forget_worker(self, rank: int) -> None:
        """Forget a worker before the session has started."""
        self._workers[rank] = _WorkerState()
        for contributions in self._pending.values():
            contributions.pop(rank, None)

    def _missing(self, contributions: dict[int, Contribution]) -> list[int]:
        return [rank for rank in range(len(self._names)) if rank not in contributions]

    def _find_mismatch(
        self, contributions: dict[int, Contribution], rank: int
    ) -> HeadraceError | None:
        own = contributions[rank]
        for other, contribution in sorted(contributions.items()):
            if (contribution.description, contribution.kind) != (own.description, own.kind):
                for each, failed in ((other, contribution), (rank, own)):
                    if failed.kind == ERROR:
                        return self._remote_error(each, failed)
                return FailedPreconditionError(
                    f"the workers run different operations: {self._names[other]} is in "
                    f"{contribution.description}, and {self._names[rank]} is in {own.description}; "
                    "every worker must run the same program, with the same steps in the same "
                    "order"
                )
        return None

    def _remote_error(self, rank: int, contribution: Contribution) -> HeadraceError:
        text = b"".join(array.tobytes() for array in contribution.value.arrays).decode()
        return UnavailableError(
            f"{contribution.description} failed on {self._names[rank]}, but not on all workers: "
            f"{text}. Workers cannot continue without each other: restart all of them from a "
            "saved state"
        )

    def _complete(self, number: int) -> list[RankAnswer]:
        contributions = self._pending[number]
        values = [contributions[rank].value for rank in range(len(self._names))]
        result: CollectiveOutcome | HeadraceError
        try:
            result = CollectiveOutcome(self._combine(contributions[0].kind, values))
        except HeadraceError as error:
            result = error
        # In this order: an interruption between the two must leave a completed collective.
        self._results[number], self.has_started = result, True
        del self._pending[number]
        return [RankAnswer(rank, number, result) for rank in range(len(self._names))]

    def _wait_for_missing(self, rank: int, number: int, now: float) -> list[RankAnswer]:
        """Return the answers for a worker whose collective is incomplete."""
        missing = self._missing(self._pending[number])
        departed = [each for each in missing if self._workers[each].has_left]
        if departed:
            return self._fail(self._ended_error(departed, number))
        since = {each: self._workers[each].disconnected_since for each in missing}
        disconnected = {each: now - at for each, at in since.items() if at is not None}
        lost = [each for each, seconds in disconnected.items() if seconds >= RECONNECT_SECONDS]
        if lost:
            return self._fail(self._ended_error(lost, number))
        if disconnected:
            return [
                RankAnswer(rank, number, RetryAfter(RECONNECT_SECONDS - max(disconnected.values())))
            ]
        return []

    def _ended_error(self, ranks: Sequence[int], number: int) -> HeadraceError:
        names = ", ".join(self._names[rank] for rank in ranks)
        description = next(iter(self._pending[number].values())).description
        outcome = (
            "has left the session"
            if all(self._workers[rank].has_left for rank in ranks)
            else "is lost"
        )
        return UnavailableError(
            f"{names} {outcome}: its process ended, or its connection was lost, while other "
            f"workers wait for it in {description}. Workers cannot continue without each other: "
            "restart all of them from a saved state"
        )

    def _describe(self, rank: int, now: float) -> str:
        worker, name = self._workers[rank], self._names[rank]
        if not worker.process_id:
            return (
                f"{name} has not connected yet (is it running, and can it connect to "
                f"{self._names[0]}?)"
            )
        return (
            f"{name} was last heard from {now - worker.last_heard:.0f} s ago, in "
            f"{worker.last_collective}"
        )

    def _fail(self, error: HeadraceError) -> list[RankAnswer]:
        self.failure = error
        answers = [
            RankAnswer(rank, number, error)
            for number, contributions in self._pending.items()
            for rank in contributions
        ]
        self._pending.clear()
        return answers

    def _drop_acknowledged(self) -> None:
        acknowledged = [worker.acknowledged for worker in self._workers if not worker.has_left]
        first_unacknowledged = min(acknowledged, default=self._first_kept)
        if not acknowledged:
            self._results.clear()
        for number in [each for each in self._results if each < first_unacknowledged]:
            del self._results[number]
        self._first_kept = max(self._first_kept, first_unacknowledged)


# --- Combination of the contributions of all workers, by rank -------------------------------------
#
#     ANY    whether any worker's flag is set, and the arrays of the first worker that sent some
#     SUM    elementwise sums of the workers' arrays
#     FIRST  contribution of rank 0
#     ALL    arrays of all workers, concatenated in rank order
#     ERROR  empty: the same step failed on all workers. Contributions are the errors, as text
#
# Each sum is computed once, in one order, so all workers get bitwise identical results.

ANY, SUM, FIRST, ALL, ERROR = "any", "sum", "first", "all", "error"


class CollectiveValue(NamedTuple):
    """Value that a worker contributes, or the result that all workers receive."""

    flag: bool = False
    arrays: Sequence[NDArray[Any]] = ()


_Combine: TypeAlias = Callable[[Sequence[CollectiveValue]], CollectiveValue]


def combine(kind: str, values: Sequence[CollectiveValue]) -> CollectiveValue:
    """Return the result of the workers' contributions.

    Raises:
        FailedPreconditionError: If the kind is unknown.
        InvalidArgumentError: If the contributions do not match.
    """
    function = _KINDS.get(kind)
    if function is None:
        raise FailedPreconditionError(
            f"unknown kind of collective {kind!r}; do all workers run the same version of Headrace?"
        )
    return function(values)


def _any(values: Sequence[CollectiveValue]) -> CollectiveValue:
    arrays = next((value.arrays for value in values if value.arrays), ())
    return CollectiveValue(
        any(value.flag for value in values), [_freeze(array) for array in arrays]
    )


def _sum(values: Sequence[CollectiveValue]) -> CollectiveValue:
    _check_counts(values)
    columns = zip(*(value.arrays for value in values), strict=True)
    return CollectiveValue(
        arrays=[np.asarray(reduce_values(ReduceOp.SUM, column)) for column in columns]
    )


def _first(values: Sequence[CollectiveValue]) -> CollectiveValue:
    return CollectiveValue(values[0].flag, [_freeze(array) for array in values[0].arrays])


def _all(values: Sequence[CollectiveValue]) -> CollectiveValue:
    _check_counts(values)
    return CollectiveValue(arrays=[_freeze(array) for value in values for array in value.arrays])


def _check_counts(values: Sequence[CollectiveValue]) -> None:
    if len({len(value.arrays) for value in values}) > 1:
        counts = ", ".join(str(len(value.arrays)) for value in values)
        raise InvalidArgumentError(
            f"the workers contributed different numbers of values ({counts}, by rank); return "
            "the same structure on all workers"
        )


def _freeze(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that does not change later; a read-only array is owned by a message."""
    return array if array.flags.writeable else array.copy()


def _error(values: Sequence[CollectiveValue]) -> CollectiveValue:
    return CollectiveValue()


_KINDS: dict[str, _Combine] = {ANY: _any, SUM: _sum, FIRST: _first, ALL: _all, ERROR: _error}
