"""Schedules the steps of a model on workers, and delivers their results in order.

Steps run whenever a worker is free, some at a time and in any order. Their results are delivered
in the order in which they were scheduled, so callbacks see batch 0, 1, 2 ..., and sums of metrics
do not depend on which worker was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from headrace.coordinator.coordinator import ClusterCoordinator
from headrace.coordinator.remote_value import RemoteValue

__all__ = ["run_steps"]

_MOST_UNDELIVERED = 1000
"""Most results that may wait for an earlier one, whose worker is slow or was lost."""


def run_steps(
    coordinator: ClusterCoordinator,
    steps: Iterator[RemoteValue],
    deliver: Callable[[Any], bool],
) -> None:
    """Run steps until `steps` is exhausted, or `deliver` returns False.

    Args:
        coordinator: Runs them.
        steps: `next` schedules the next step and returns its value.
        deliver: Called with what each step returned; returns whether to go on. Where it returns
            False, or raises, steps that are under way are waited for, and not delivered.

    Raises:
        Exception: The first error of a step, of `steps` or of `deliver`.
    """
    pending: deque[RemoteValue] = deque()
    #: Those of them without a result yet.
    under_way: list[RemoteValue] = []
    has_ended = False
    goes_on = True
    try:
        while goes_on and not (has_ended and not pending):
            under_way = [each for each in under_way if not each.is_ready]
            room = coordinator.capacity - len(under_way)
            while not has_ended and room > 0 and len(pending) < len(under_way) + _MOST_UNDELIVERED:
                value = next(steps, None)
                if value is None:
                    has_ended = True
                else:
                    pending.append(value)
                    under_way.append(value)
                    room -= 1
            if pending and not pending[0].is_ready:
                # `pending` may have some that are here and wait for the first one.
                coordinator.wait_for_any(under_way)
            while goes_on and pending and pending[0].is_ready:
                goes_on = deliver(pending.popleft().fetch())
        coordinator.join()
    except BaseException:
        for value in pending:
            value.cancel()
        raise
