"""Rounds of closures: for each step that several took, the mean of their gradients is pushed once.

Rule 1. The n-th steps that closures took with one optimizer become one step.
Rule 2. Its gradients are means over the closures that took the step; where one of them has none for
        a variable, it counts as zero.
Rule 3. Sums are made in the order in which closures are given, so that the same closures give the
        same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.parameter_server.origin import Origin, writing_as
from headrace.parameter_server.pushing import TakenStep, push, sum_steps

__all__ = ["mean_steps", "push_round"]

_FIRST_WRITE = 1 << 32
"""Keys of a round are those of its last closure, beyond all that a function writes itself."""


def mean_steps(closures: Sequence[Sequence[TakenStep]]) -> list[TakenStep]:
    """Return the steps of a round, in the order in which they first occur.

    Args:
        closures: The steps that each closure took, in their order.

    Raises:
        FailedPreconditionError: Some have a dense gradient and some a sparse one for a variable.
    """
    steps: dict[tuple[str, int], list[TakenStep]] = {}
    for taken in closures:
        counts: dict[str, int] = {}
        for step in taken:
            name = step.optimizer.name
            place = counts[name] = counts.get(name, -1) + 1
            steps.setdefault((name, place), []).append(step)
    return [_mean(each) for each in steps.values()]


def _mean(steps: Sequence[TakenStep]) -> TakenStep:
    total = sum_steps(steps, "functions of a round")
    count = len(steps)
    return total._replace(
        gradients=[
            each._replace(values=each.values / each.values.dtype.type(count))
            for each in total.gradients
        ]
    )


def push_round(incarnation: int, last: int, closures: Sequence[Sequence[TakenStep]]) -> None:
    """Push the steps of a round; what a server carried out already it does not do again.

    Args:
        incarnation: Of the coordinator.
        last: Number of the round's last closure, whose keys are not forgotten yet.
        closures: The steps that each closure took.
    """
    # No worker has number 0, so nobody fences this one.
    with writing_as(Origin(incarnation, last, worker=0, first=_FIRST_WRITE)):
        for step in mean_steps(closures):
            push(step)
