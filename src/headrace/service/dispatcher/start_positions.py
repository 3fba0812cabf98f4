"""Start positions of iterations: the start of the stream, or a position that a client saved."""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher.state import JobIteration, SplitPool
from headrace.service.element_sets import ALL_ORDINALS, END_ORDINAL, PartialSplits
from headrace.service.epochs import format_epoch
from headrace.service.messages import OpenIteration
from headrace.service.ranges import Ranges, subtract, union

__all__ = [
    "check_delivered",
    "check_same_start_position",
    "check_start_position",
    "exclude_delivered",
    "restarts_iteration",
]


def check_start_position(request: OpenIteration, num_splits: int | None) -> None:
    """Reject a start position that does not fit the dataset.

    Args:
        request: Request with the start position.
        num_splits: Number of splits, or INFINITE (-1); None if the iteration assigns none.

    Raises:
        ValueError: If the position is invalid.
        FailedPreconditionError: If it is of a dataset of another size, or the elements have no ids.
    """
    if request.first_split and num_splits is None:
        raise FailedPreconditionError(
            f"first_unit={request.first_split} needs a dataset of which units are dealt: use "
            "ShardingPolicy.DYNAMIC"
        )
    if num_splits is not None and 0 <= num_splits < request.first_split:
        raise FailedPreconditionError(_describe_size_mismatch(request.first_split, num_splits))
    if not (request.delivered or request.partial_splits):
        return
    check_delivered(
        request.delivered, request.partial_splits, num_splits, first_split=request.first_split
    )
    if request.options.visitation != "exactly_once":
        raise FailedPreconditionError(
            'a place that says which elements were delivered needs visitation="exactly_once"; got '
            f"{request.options.visitation!r}"
        )


def check_delivered(
    delivered: Ranges,
    partial_splits: PartialSplits,
    num_splits: int | None,
    *,
    first_split: int = 0,
) -> None:
    """Reject an invalid description of delivered elements.

    Args:
        delivered: Splits that were delivered completely.
        partial_splits: Other splits that were delivered in part, with the delivered ordinals.
        num_splits: Number of splits of the dataset, or INFINITE (-1); None if it has none.
        first_split: First split that may be among them.

    Raises:
        ValueError: If ranges overlap or are not sorted.
        FailedPreconditionError: If the position is of a dataset of another size.
    """
    units = [unit for unit, _ in partial_splits]
    taken = union((*delivered, *((unit, unit + 1) for unit in units)))
    makes_sense = (
        units == sorted(set(units))
        and _is_range_set(delivered)
        and (not taken or taken[0][0] >= first_split)
        and not any(start <= unit < stop for start, stop in delivered for unit in units)
        and all(rows and _is_ordinal_set(rows) for _, rows in partial_splits)
    )
    if not makes_sense:
        raise ValueError(
            "`delivered` and `parts` must be units after `first_unit`, ascending and apart, with "
            "some ordinals of each part"
        )
    if taken and num_splits is not None and 0 <= num_splits < taken[-1][1]:
        raise FailedPreconditionError(_describe_size_mismatch(taken[-1][1], num_splits))


def _describe_size_mismatch(delivered: int, positions: int) -> str:
    return (
        f"the state says that units up to {delivered} were delivered, and the dataset has "
        f"{positions}; restore it with the same data"
    )


def _is_ordinal_set(rows: Ranges) -> bool:
    is_within = rows[0][0] >= 0 and rows[-1][1] <= END_ORDINAL
    return _is_range_set(rows) and is_within and rows != ALL_ORDINALS


def _is_range_set(ranges: Ranges) -> bool:
    return ranges == union(ranges) and all(start < stop for start, stop in ranges)


def restarts_iteration(iteration: JobIteration, request: OpenIteration) -> bool:
    """Return whether a sole client resumes from a position after another client has left.

    What was assigned for that client is then discarded.
    """
    return bool(request.start_position_id and request.exclusive_reason) and not iteration.clients


def check_same_start_position(iteration: JobIteration, request: OpenIteration) -> None:
    """Reject a client that would start at another position.

    Raises:
        FailedPreconditionError: If the iteration started at another position.
    """
    if iteration.finished:
        return
    if iteration.start_position_id == request.start_position_id:
        _check_same_order(iteration, request)
        return
    began = "a saved state" if iteration.start_position_id else "the start"
    wanted = (
        "another saved state"
        if iteration.start_position_id and request.start_position_id
        else "a saved state"
    )
    raise FailedPreconditionError(
        f"{format_epoch(request.epoch)} of job {request.job_name!r} is read from {began}, "
        f"and this client would go on from {wanted if request.start_position_id else 'the start'}: "
        "all clients "
        "of a job restore the same state. Choose another job_name"
    )


def _check_same_order(iteration: JobIteration, request: OpenIteration) -> None:
    """Reject a client with other seeds for the steps that draw the same values in each epoch."""
    if iteration.fixed_seeds != request.fixed_seeds:
        raise FailedPreconditionError(
            f"pass {request.epoch} of job {request.job_name!r} is read already, with another "
            "order of the steps that have `reshuffle_each_iteration=False` (or "
            "`rerandomize_each_iteration=False`) and no seed: give them one, or choose another "
            "job_name"
        )


def exclude_delivered(pool: SplitPool, delivered: Ranges, partial_splits: PartialSplits) -> None:
    """Mark what was delivered before an iteration as assigned; gaps in it are assigned first."""
    if not (delivered or partial_splits):
        return
    begun = union((*delivered, *((unit, unit + 1) for unit, _ in partial_splits)))
    first, pool.next_split = pool.next_split, begun[-1][1]
    pool.returned = subtract(((first, pool.next_split),), begun)
    for unit, rows in partial_splits:
        pool.partial_splits[unit] = subtract(ALL_ORDINALS, rows)
