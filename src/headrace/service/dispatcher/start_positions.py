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
            f"first_split={request.first_split} requires splits: use ShardingPolicy.DYNAMIC"
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
            "a start position with delivered elements requires "
            f'visitation="exactly_once"; got {request.options.visitation!r}'
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
    splits = [split for split, _ in partial_splits]
    all_splits = union((*delivered, *((split, split + 1) for split in splits)))
    is_valid = (
        splits == sorted(set(splits))
        and _is_range_set(delivered)
        and (not all_splits or all_splits[0][0] >= first_split)
        and not any(start <= split < stop for start, stop in delivered for split in splits)
        and all(ordinals and _is_ordinal_set(ordinals) for _, ordinals in partial_splits)
    )
    if not is_valid:
        raise ValueError(
            f"`delivered` and `partial_splits` must be sorted, disjoint splits from first_split="
            f"{first_split} on, with a proper subset of the ordinals of each partial split"
        )
    if all_splits and num_splits is not None and 0 <= num_splits < all_splits[-1][1]:
        raise FailedPreconditionError(_describe_size_mismatch(all_splits[-1][1], num_splits))


def _describe_size_mismatch(delivered: int, num_splits: int) -> str:
    return (
        f"the state contains delivered splits up to {delivered}, but the dataset has only "
        f"{num_splits}; restore it with the same data"
    )


def _is_ordinal_set(ordinals: Ranges) -> bool:
    is_in_range = ordinals[0][0] >= 0 and ordinals[-1][1] <= END_ORDINAL
    return _is_range_set(ordinals) and is_in_range and ordinals != ALL_ORDINALS


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
    existing = "a saved state" if iteration.start_position_id else "the beginning"
    if not request.start_position_id:
        requested = "the beginning"
    elif iteration.start_position_id:
        requested = "another saved state"
    else:
        requested = "a saved state"
    raise FailedPreconditionError(
        f"{format_epoch(request.epoch)} of job {request.job_name!r} is read from {existing}, but "
        f"this client starts from {requested}: all clients of a job must restore the same state. "
        "Choose another job_name"
    )


def _check_same_order(iteration: JobIteration, request: OpenIteration) -> None:
    """Reject a client with other seeds for the steps that draw the same values in each epoch."""
    if iteration.fixed_seeds != request.fixed_seeds:
        raise FailedPreconditionError(
            f"{format_epoch(request.epoch)} of job {request.job_name!r} is already read with other "
            "random seeds of the steps with `reshuffle_each_iteration=False` or "
            "`rerandomize_each_iteration=False`: set their `seed`, or choose another job_name"
        )


def exclude_delivered(pool: SplitPool, delivered: Ranges, partial_splits: PartialSplits) -> None:
    """Mark what was delivered before an iteration as assigned; gaps in it are assigned first."""
    if not (delivered or partial_splits):
        return
    all_splits = union((*delivered, *((split, split + 1) for split, _ in partial_splits)))
    first, pool.next_split = pool.next_split, all_splits[-1][1]
    pool.returned = subtract(((first, pool.next_split),), all_splits)
    for split, ordinals in partial_splits:
        pool.partial_splits[split] = subtract(ALL_ORDINALS, ordinals)
