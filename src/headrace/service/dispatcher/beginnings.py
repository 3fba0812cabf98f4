"""Where iterations begin: at the start of the stream, or at a place that a client saved."""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher.state import Iteration, SplitPool
from headrace.service.messages import OpenIteration
from headrace.service.passes import pass_in_words
from headrace.service.ranges import Ranges, subtracted, united
from headrace.service.rows import END, EVERYTHING, Parts

__all__ = [
    "begins_again",
    "check_beginning",
    "check_place",
    "check_same_beginning",
    "leave_out",
]


def check_beginning(request: OpenIteration, positions: int | None) -> None:
    """Refuse a place that the dataset has not.

    Args:
        request: Names the place.
        positions: Units that are dealt, or INFINITE (-1); None: nothing is dealt.

    Raises:
        ValueError: It makes no sense.
        FailedPreconditionError: It is of a dataset of another size, or elements have no origins.
    """
    if request.first_unit and positions is None:
        raise FailedPreconditionError(
            f"first_unit={request.first_unit} needs a dataset of which units are dealt: use "
            "ShardingPolicy.DYNAMIC"
        )
    if positions is not None and 0 <= positions < request.first_unit:
        raise FailedPreconditionError(_other_size(request.first_unit, positions))
    if not (request.delivered or request.parts):
        return
    check_place(request.delivered, request.parts, positions, first=request.first_unit)
    if request.terms.visitation != "exactly_once":
        raise FailedPreconditionError(
            'a place that says which elements were delivered needs visitation="exactly_once"; got '
            f"{request.terms.visitation!r}"
        )


def check_place(delivered: Ranges, parts: Parts, positions: int | None, *, first: int = 0) -> None:
    """Refuse what does not say which elements of a dataset were delivered.

    Args:
        delivered: Units of which all were.
        parts: Other units of which some were, with the ordinals of these.
        positions: Units of the dataset, or INFINITE (-1); None: nothing is dealt.
        first: The first unit that may be among them.

    Raises:
        ValueError: It makes no sense.
        FailedPreconditionError: It is of a dataset of another size.
    """
    units = [unit for unit, _ in parts]
    taken = united((*delivered, *((unit, unit + 1) for unit in units)))
    makes_sense = (
        units == sorted(set(units))
        and _is_a_set(delivered)
        and (not taken or taken[0][0] >= first)
        and not any(start <= unit < stop for start, stop in delivered for unit in units)
        and all(rows and _are_ordinals(rows) for _, rows in parts)
    )
    if not makes_sense:
        raise ValueError(
            "`delivered` and `parts` must be units after `first_unit`, ascending and apart, with "
            "some ordinals of each part"
        )
    if taken and positions is not None and 0 <= positions < taken[-1][1]:
        raise FailedPreconditionError(_other_size(taken[-1][1], positions))


def _other_size(delivered: int, positions: int) -> str:
    return (
        f"the state says that units up to {delivered} were delivered, and the dataset has "
        f"{positions}; restore it with the same data"
    )


def _are_ordinals(rows: Ranges) -> bool:
    is_within = rows[0][0] >= 0 and rows[-1][1] <= END
    return _is_a_set(rows) and is_within and rows != EVERYTHING


def _is_a_set(ranges: Ranges) -> bool:
    return ranges == united(ranges) and all(start < stop for start, stop in ranges)


def begins_again(iteration: Iteration, request: OpenIteration) -> bool:
    """Whether a client that is alone goes on from a place where another one has gone.

    What was dealt to that one means nothing then.
    """
    return bool(request.start and request.whole_stream) and not iteration.clients


def check_same_beginning(iteration: Iteration, request: OpenIteration) -> None:
    """Refuse a client that would begin elsewhere.

    Raises:
        FailedPreconditionError: The iteration began at another place.
    """
    if iteration.finished:
        return
    if iteration.start == request.start:
        _check_same_order(iteration, request)
        return
    began = "a saved state" if iteration.start else "the start"
    wanted = "another saved state" if iteration.start and request.start else "a saved state"
    raise FailedPreconditionError(
        f"{pass_in_words(request.pass_number)} of job {request.job_name!r} is read from {began}, "
        f"and this client would go on from {wanted if request.start else 'the start'}: all clients "
        "of a job restore the same state. Choose another job_name"
    )


def _check_same_order(iteration: Iteration, request: OpenIteration) -> None:
    """Refuse a client whose steps that draw the same in each pass drew something else."""
    if iteration.fixed_seeds != request.fixed_seeds:
        raise FailedPreconditionError(
            f"pass {request.pass_number} of job {request.job_name!r} is read already, with another "
            "order of the steps that have `reshuffle_each_iteration=False` (or "
            "`rerandomize_each_iteration=False`) and no seed: give them one, or choose another "
            "job_name"
        )


def leave_out(splits: SplitPool, delivered: Ranges, parts: Parts) -> None:
    """Take what came before an iteration began as dealt: the rest before it is dealt first."""
    if not (delivered or parts):
        return
    begun = united((*delivered, *((unit, unit + 1) for unit, _ in parts)))
    first, splits.next = splits.next, begun[-1][1]
    splits.returned = subtracted(((first, splits.next),), begun)
    for unit, rows in parts:
        splits.parts[unit] = subtracted(EVERYTHING, rows)
