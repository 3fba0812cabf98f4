"""Shares: which units a task is dealt next, where whoever asks first is served first.

Rule 1. A grant is half of an even share of what can still be dealt, at most what is wanted: large
        at first, small near the end, so that few requests deal much and all workers end together.
Rule 2. A task holds at most an even share of what is not done, so that no worker drinks the stream
        into a buffer. One that has its share waits; if nobody was dealt anything for a while, the
        others do not want it, and it gets more all the same.
Rule 3. Units that came back are dealt first; one that came back in part, by itself.
Rule 4. Units that are suspected to kill workers are dealt in small groups, each to a task that
        holds nothing and gets nothing else until they are done; what others hold does not die with
        them. As with rule 2, a task that gets nothing done meanwhile is dealt more all the same.
Rule 5. A task that waits because of rule 4 gives all that its steps hold (`holds_suspects`): above
        a shuffle of values its units would else be done only with many others, which it does not
        get. So does one that waits for what others may lose, where nothing is left to deal.
"""

from __future__ import annotations

from headrace.service.dispatcher.state import Iteration, Task
from headrace.service.ranges import (
    Ranges,
    at_least,
    common,
    count,
    located,
    subtracted,
    united,
)

__all__ = ["holds_suspects", "next_units"]

_MOST_WANTED = 1 << 32
_INFINITE_SHARE = 1 << 16
"""Units of a stream without end that a task may hold in any case."""


def next_units(
    iteration: Iteration, task: Task, want: int, done: int, *, is_impatient: bool
) -> tuple[int, int] | None:
    """Return a range of units for a task; None: nothing for this task now.

    Args:
        iteration: What is dealt, some of which is left.
        task: Who asks.
        want: How many units it would like.
        done: How many of its units, in dealt order, are done.
        is_impatient: Nobody was dealt anything for a while.
    """
    number = _size(iteration, task, min(want, _MOST_WANTED), done, is_impatient)
    units = _choose(iteration, task, done, is_impatient) if number else None
    return None if units is None else (units[0], min(units[1], units[0] + number))


def _size(iteration: Iteration, task: Task, want: int, done: int, is_impatient: bool) -> int:
    """Return how many units to deal; 0: the task has its share."""
    held = task.dealt - done - count(at_least(task.returned, done))
    if iteration.rest is None:
        share = max(4 * want, _INFINITE_SHARE)
        return want if is_impatient or held + want <= share else 0
    left = iteration.rest + iteration.held - task.held + held
    room = -(-left // iteration.takers) - held
    if room <= 0 and not is_impatient:
        return 0
    portion = min(want, -(-iteration.rest // (2 * iteration.takers)))
    return portion if is_impatient else min(portion, room)


def _choose(
    iteration: Iteration, task: Task, done: int, is_impatient: bool
) -> tuple[int, int] | None:
    """Return a range of units to deal from; None: nothing for this task now."""
    back = iteration.returned
    if iteration.parts:
        back = united((*back, *((unit, unit + 1) for unit in iteration.parts)))
    suspects = common(back, iteration.suspects)
    others = subtracted(back, suspects)
    group: tuple[int, int] | None = None
    if suspects:
        start, stop = suspects[0]
        group = _apart(iteration, start, min(stop, start + iteration.suspects_at_once))
    if group is not None and not _held(task, done):
        return group
    if not is_impatient and holds_suspects(iteration, task, done):
        return None
    if others:
        return _apart(iteration, *others[0])
    if iteration.positions != iteration.next:
        end = iteration.positions or 0
        return iteration.next, end if end > 0 else iteration.next + _MOST_WANTED
    return group if is_impatient else None


def holds_suspects(iteration: Iteration, task: Task, done: int) -> bool:
    """Whether units of a task that are not done are suspected to kill workers."""
    if not iteration.suspects:
        return False
    return bool(common(located(task.runs, task.done, _held(task, done)), iteration.suspects))


def _held(task: Task, done: int) -> Ranges:
    """Return the units of a task, in dealt order, that are not done."""
    return subtracted(((done, task.dealt),), at_least(task.returned, done))


def _apart(iteration: Iteration, start: int, stop: int) -> tuple[int, int]:
    """Return the first of these units: one in part by itself, or those before one."""
    if not iteration.parts:
        return start, stop
    if start in iteration.parts:
        return start, start + 1
    return start, min((unit for unit in iteration.parts if start < unit < stop), default=stop)
