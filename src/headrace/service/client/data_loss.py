"""Report at the end of an epoch that lost elements: how many, where, and which."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.errors import DataLossError
from headrace.service.messages import LostSplits

__all__ = ["describe_loss", "report_loss"]

_log = logging.getLogger(__name__)

_RANGES_SHOWN = 5


def describe_loss(lost: tuple[LostSplits, ...]) -> list[str]:
    """Return the warnings about the losses of an epoch."""
    warnings = []
    units = [each for each in lost if not each.is_copy]
    if units:
        warnings.append(
            f"this pass lost up to {sum(each.num_splits for each in units)} positions of the "
            "dataset: " + "; ".join(f"{each.num_splits} {_describe_cause(each)}" for each in units)
        )
    copies = [each for each in lost if each.is_copy]
    if copies:
        named = " and ".join(f"{each.worker_address}{_reason(each)}" for each in copies)
        warnings.append(f"this pass lacks the rest of the copy of the worker at {named}")
    return warnings


def report_loss(lost: tuple[LostSplits, ...], on_loss: Callable[[Exception], None] | None) -> None:
    """Report the elements that an epoch lost.

    Args:
        lost: The missing splits or copies.
        on_loss: Receives the error for the consumer; None logs a warning instead.
    """
    found = describe_loss(lost)
    if found and on_loss is not None:
        on_loss(
            DataLossError(
                f"{'; '.join(found)}. All other elements were delivered. See the output of these "
                'workers, or read with `on_data_loss="warn"` to go on without these elements'
            )
        )
        return
    for warning in found:
        _log.warning("%s", warning)


def _describe_cause(lost: LostSplits) -> str:
    where = f"(positions {_format_positions(lost)})"
    if lost.client_id:
        return f"sent to client {lost.client_id}, which is gone {where}"
    if lost.abandoned:
        workers = lost.died_workers or (lost.worker_address,)
        ended = f"{len(workers)} worker processes" if len(workers) > 1 else "a worker process"
        return f"given up after {ended} ended while computing it ({', '.join(workers)}) {where}"
    return f"with the worker at {lost.worker_address} {where}{_reason(lost)}"


def _reason(lost: LostSplits) -> str:
    return f": {lost.reason}" if lost.reason else ""


def _format_positions(lost: LostSplits) -> str:
    ranges = [f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in lost.splits]
    more = len(ranges) - _RANGES_SHOWN
    return ", ".join(ranges[:_RANGES_SHOWN]) + (f" and {more} more ranges" if more > 0 else "")
