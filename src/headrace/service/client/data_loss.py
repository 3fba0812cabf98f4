"""Report at the end of an epoch that lost elements: how many, where, and which."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.errors import DataLossError
from headrace.service.messages import LostSplits

__all__ = ["describe_loss", "report_loss"]

_log = logging.getLogger(__name__)

_MAX_RANGES_SHOWN = 5


def describe_loss(losses: tuple[LostSplits, ...]) -> list[str]:
    """Return the warnings about the losses of an epoch."""
    warnings = []
    splits = [loss for loss in losses if not loss.is_copy]
    if splits:
        causes = "; ".join(f"{loss.num_splits} {_describe_cause(loss)}" for loss in splits)
        total = sum(loss.num_splits for loss in splits)
        noun = "split" if total == 1 else "splits"
        warnings.append(f"this epoch lost elements of up to {total} {noun}: {causes}")
    copies = [loss for loss in losses if loss.is_copy]
    if copies:
        workers = "; ".join(f"{loss.worker_address}{_describe_reason(loss)}" for loss in copies)
        warnings.append(
            f"this epoch lacks the rest of the dataset copies of lost workers: {workers}"
        )
    return warnings


def report_loss(
    losses: tuple[LostSplits, ...], on_loss: Callable[[Exception], None] | None
) -> None:
    """Report the elements that an epoch lost.

    Args:
        losses: The missing splits or copies.
        on_loss: Receives the error for the consumer; None logs a warning instead.
    """
    warnings = describe_loss(losses)
    if warnings and on_loss is not None:
        on_loss(
            DataLossError(
                f"{'; '.join(warnings)}. All other elements were delivered. See the logs of these "
                'workers, or set `on_data_loss="warn"` to continue without the lost elements'
            )
        )
        return
    for warning in warnings:
        _log.warning("%s", warning)


def _describe_cause(loss: LostSplits) -> str:
    splits = f"({_format_splits(loss)})"
    if loss.client_id:
        return f"sent to client {loss.client_id}, which left or expired {splits}"
    if loss.abandoned:
        workers = loss.died_workers or (loss.worker_address,)
        processes = f"{len(workers)} worker processes" if len(workers) > 1 else "a worker process"
        pronoun = "it" if loss.num_splits == 1 else "them"
        return (
            f"abandoned after {processes} died computing {pronoun}: {', '.join(workers)} {splits}"
        )
    return f"lost with worker {loss.worker_address} {splits}{_describe_reason(loss)}"


def _describe_reason(loss: LostSplits) -> str:
    return f": {loss.reason}" if loss.reason else ""


def _format_splits(loss: LostSplits) -> str:
    ranges = [
        f"{start}" if stop == start + 1 else f"{start} to {stop - 1}" for start, stop in loss.splits
    ]
    num_hidden = len(ranges) - _MAX_RANGES_SHOWN
    hidden = f" and {num_hidden} more ranges" if num_hidden > 0 else ""
    noun = "split" if loss.num_splits == 1 else "splits"
    return f"{noun} {', '.join(ranges[:_MAX_RANGES_SHOWN])}{hidden}"
