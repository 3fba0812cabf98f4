"""Dealing: the units of one stream go to whoever asks (`ShardingPolicy.DYNAMIC`).

Each worker has one task of each unfinished iteration, one that joins later too. Where units came
back from a leaving worker and nobody runs who could be dealt them, every worker that stays gets
another task.

An iteration is over when no task runs and somebody reached the end, or nothing is left to deal. A
task that runs and holds nothing does not keep it open once nothing can be dealt any more: its
worker may be one that no client reaches. Where several clients read, the end waits until each of
them was heard since the last task ended, or counts as gone: what one was sent that has died is left
to the others. Where all tasks were lost before that, or only leaving workers ended while units are
left, it goes on when a worker joins: until then its clients wait, as they do where there was no
worker at all.

Units of a task that is lost or failed are dealt again, once all its clients have said what they
received: those of which none received anything. An iteration is not over before that. A unit that
came back so twice because a worker process ended is suspected to kill its workers. It is dealt
with few others, in the end alone; it is given up after three deaths there. A worker that was only
silent proves nothing about its units: they are dealt again as often as that happens.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.losses import lost_units
from headrace.service.dispatcher.policy import Policy, Post, staying
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    Task,
    TaskPhase,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import GetSplit, LostUnits, OpenIteration
from headrace.service.ranges import (
    Ranges,
    at_least,
    common,
    count,
    subtracted,
    united,
)

__all__ = ["Dealing", "ExactDealing", "holds_suspects", "next_units"]


_SLOW = "it was slow, and another worker gave what it held"

_MOST_DEATHS = 3
"""Of a unit that was dealt alone: then it is given up."""


class Dealing(Policy):
    """Units are dealt to tasks, first come, first served (`shares`)."""

    deals = True
    #: Whether who reads is told of units that are whole, without elements (`must_flush`).
    says_what_is_whole = True

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse a dataset without units.

        Raises:
            FailedPreconditionError: It has none.
        """
        if dataset.positions is not None:
            return
        raise FailedPreconditionError(
            f"dataset {dataset.dataset_id} cannot be read with ShardingPolicy.DYNAMIC: it has no "
            "positions that could be dealt, because it reads another service or has a source that "
            "cannot be split. Use ShardingPolicy.OFF, or a source with indices: files, arrays, a "
            "range, Dataset.from_source"
        )

    def vacant(self, state: DispatcherState, iteration: Iteration) -> list[Post]:
        """Return a task for each worker without one; for all if no other can take the rest."""
        tasks = [task for task in state.tasks_of(iteration) if task.phase is not TaskPhase.LOST]
        running = {task.worker_id for task in tasks if task.phase is TaskPhase.RUNNING}
        if _has_rest(iteration) and not running & set(staying(state, iteration)):
            without = _able(state, iteration)
        else:
            served = {task.worker_id for task in tasks}
            without = [each for each in staying(state, iteration) if each not in served]
        return [Post(worker_id=each) for each in without]

    def loose_end(self, state: DispatcherState, iteration: Iteration) -> Update | None:
        """Return what becomes of units of a task that is gone, or the end of an idle task."""
        for task in state.tasks_of(iteration):
            if task.gone and not task.unsettled and iteration.left_of(task):
                return _recovery(iteration, task)
        idle = _idle(state, iteration)
        if idle is None:
            return None
        if idle.splits.returned and not state.workers[idle.worker_id].leaving:
            # It is still at what another one gave (`backups`): nobody waits for it.
            return updates.TaskLost(task_id=idle.task_id, reason=_SLOW)
        return updates.TaskFinished(task_id=idle.task_id)

    def is_over(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether no task runs and nothing can be dealt, now or later."""
        phases = {task.phase for task in state.tasks_of(iteration)}
        if not phases or TaskPhase.RUNNING in phases or state.may_recover(iteration):
            return False
        if phases == {TaskPhase.LOST}:
            return iteration.splits.rest == 0
        # Where every worker that could go on has failed at it, what is left would wait for ever.
        given_up = TaskPhase.FAILED in phases and not _able(state, iteration)
        return not _has_rest(iteration) or given_up

    def waits_for(
        self, state: DispatcherState, iteration: Iteration, is_silent: Callable[[str, int], bool]
    ) -> list[str]:
        """Return silent clients where others read too: what they did not use is dealt again."""
        if len(iteration.clients) < 2:
            return []
        return sorted(each for each in iteration.clients if is_silent(each, iteration.iteration_id))

    def next_units(
        self,
        state: DispatcherState,
        iteration: Iteration,
        task: Task,
        request: GetSplit,
        *,
        is_impatient: bool,
    ) -> tuple[int, int] | None:
        """Return the task's share, first come, first served."""
        return next_units(iteration, task, request.want, request.done, is_impatient=is_impatient)

    def must_flush(
        self, state: DispatcherState, iteration: Iteration, task: Task, request: GetSplit
    ) -> bool:
        """Whether it holds suspects: it is dealt nothing more before they are done.

        Not where a step works on the whole stream: to begin it again would change what comes.
        """
        if not (self.says_what_is_whole and _goes_by_units(state, iteration)):
            return False
        return holds_suspects(iteration, task, request.done)

    def lost(self, state: DispatcherState, iteration: Iteration) -> tuple[LostUnits, ...]:
        """Return the units that are missing."""
        return lost_units(iteration, state.tasks_of(iteration))

    def is_kept(self, state: DispatcherState, iteration: Iteration, task: Task) -> bool:
        """Whether units are with it which it has delivered, as far as its worker knows."""
        return task.phase is TaskPhase.FINISHED and not task.gone and bool(task.splits.held)


class ExactDealing(Dealing):
    """The same, and each element comes once: what nobody has of a unit is dealt again in part."""

    exactly_once = True

    def goes_on(self, state: DispatcherState, iteration: Iteration) -> bool:
        """Whether a worker was lost with what one of the clients has not got.

        A slow client keeps the others from nothing: an iteration is over though its last elements
        are still on their way to it.
        """
        return (
            bool(iteration.clients)
            and not iteration.failed
            and any(
                task.gone and not task.unsettled and iteration.left_of(task)
                for task in state.tasks_of(iteration)
            )
        )

    def must_flush(
        self, state: DispatcherState, iteration: Iteration, task: Task, request: GetSplit
    ) -> bool:
        """Whether it holds suspects, or waits for what a death brings, which it might outlive.

        Where workers die again and again, that nothing can come back any more may never be.
        """
        if iteration.splits.rest == 0:
            return state.may_recover(iteration)
        return super().must_flush(state, iteration, task, request)

    def check(self, state: DispatcherState, dataset: Dataset, opening: OpenIteration) -> None:
        """Refuse a dataset whose elements cannot be told apart.

        Raises:
            FailedPreconditionError: It says why.
        """
        super().check(state, dataset, opening)
        if not (dataset.origins or opening.terms.half):
            raise FailedPreconditionError(
                f"dataset {dataset.dataset_id} cannot be visited exactly once: a step works on the "
                "whole stream, so that its elements are of no one unit. Put that step after "
                '`distribute`, or use visitation="at_most_once"'
            )


def _recovery(iteration: Iteration, task: Task) -> Update:
    """Return what becomes of units of a task that is gone."""
    splits = task.splits
    pool = iteration.splits
    left = iteration.left_of(task)
    if pool.suspects and pool.suspects_at_once == 1 and iteration.may_be_poison(task):
        held = splits.located(left)
        deadly = splits.numbered(common(held, pool.suspects))
        deadly = common(deadly, left)
        if pool.exactly_once:
            # A worker that got on with a unit did not die of it; and others may have had a hand in
            # what happens once.
            deadly = subtracted(deadly, splits.touched)
            often = (
                (unit, unit + 1)
                for unit, addresses in pool.deaths.items()
                if len(addresses) + 1 >= _MOST_DEATHS
            )
            deadly = common(deadly, splits.numbered(united(often)))
        if deadly:
            return updates.UnitsGivenUp(task_id=task.task_id, units=deadly)
    return updates.UnitsReturned(task_id=task.task_id, units=left)


def _goes_by_units(state: DispatcherState, iteration: Iteration) -> bool:
    """Whether what workers run of the plan works on units, one by one or some together."""
    job = state.jobs[iteration.job_id]
    return bool(job.terms.half) or state.datasets[job.dataset_id].origins


def _idle(state: DispatcherState, iteration: Iteration) -> Task | None:
    """Return a running task of an iteration of which every unit is done, or lost for good."""
    if iteration.splits.rest != 0 or state.may_recover(iteration):
        return None
    running = state.running_tasks(iteration)
    return None if any(task.splits.held for task in running) else next(iter(running), None)


def _has_rest(iteration: Iteration) -> bool:
    pool = iteration.splits
    return bool(pool.returned or pool.parts) or (not iteration.ended and pool.rest != 0)


def _able(state: DispatcherState, iteration: Iteration) -> list[str]:
    tasks = state.tasks_of(iteration)
    failed = {task.worker_id for task in tasks if task.phase is TaskPhase.FAILED}
    return [worker_id for worker_id in staying(state, iteration) if worker_id not in failed]


# --- shares: which units a task is dealt next, where whoever asks first is served first -----------

# Rule 1. A grant is half of an even share of what can still be dealt, at most what is wanted: large
#         at first, small near the end, so that few requests deal much and all workers end together.
# Rule 2. A task holds at most an even share of what is not done, so that no worker drinks the
#         stream into a buffer. One that has its share waits; if nobody was dealt anything for a
#         while, the others do not want it, and it gets more all the same.
# Rule 3. Units that came back are dealt first; one that came back in part, by itself.
# Rule 4. Units that are suspected to kill workers are dealt in small groups, each to a task that
#         holds nothing and gets nothing else until they are done; what others hold does not die
#         with them. As with rule 2, a task that gets nothing done meanwhile is dealt more all the
#         same.
# Rule 5. A task that waits because of rule 4 gives all that its steps hold (`holds_suspects`):
#         above a shuffle of values its units would else be done only with many others, which it
#         does not get. So does one that waits for what others may lose, where nothing is left to
#         deal.

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
    splits = task.splits
    pool = iteration.splits
    held = splits.dealt - done - count(at_least(splits.returned, done))
    if pool.rest is None:
        share = max(4 * want, _INFINITE_SHARE)
        return want if is_impatient or held + want <= share else 0
    left = pool.rest + pool.held - splits.held + held
    room = -(-left // iteration.takers) - held
    if room <= 0 and not is_impatient:
        return 0
    portion = min(want, -(-pool.rest // (2 * iteration.takers)))
    return portion if is_impatient else min(portion, room)


def _choose(
    iteration: Iteration, task: Task, done: int, is_impatient: bool
) -> tuple[int, int] | None:
    """Return a range of units to deal from; None: nothing for this task now."""
    pool = iteration.splits
    back = pool.returned
    if pool.parts:
        back = united((*back, *((unit, unit + 1) for unit in pool.parts)))
    suspects = common(back, pool.suspects)
    others = subtracted(back, suspects)
    group: tuple[int, int] | None = None
    if suspects:
        start, stop = suspects[0]
        group = _apart(iteration, start, min(stop, start + pool.suspects_at_once))
    if group is not None and not _held(task, done):
        return group
    if not is_impatient and holds_suspects(iteration, task, done):
        return None
    if others:
        return _apart(iteration, *others[0])
    if pool.positions != pool.next:
        end = pool.positions or 0
        return pool.next, end if end > 0 else pool.next + _MOST_WANTED
    return group if is_impatient else None


def holds_suspects(iteration: Iteration, task: Task, done: int) -> bool:
    """Whether units of a task that are not done are suspected to kill workers."""
    if not iteration.splits.suspects:
        return False
    return bool(common(task.splits.located(_held(task, done)), iteration.splits.suspects))


def _held(task: Task, done: int) -> Ranges:
    """Return the units of a task, in dealt order, that are not done."""
    return subtracted(((done, task.splits.dealt),), at_least(task.splits.returned, done))


def _apart(iteration: Iteration, start: int, stop: int) -> tuple[int, int]:
    """Return the first of these units: one in part by itself, or those before one."""
    pool = iteration.splits
    if not pool.parts:
        return start, stop
    if start in pool.parts:
        return start, start + 1
    return start, min((unit for unit in pool.parts if start < unit < stop), default=stop)
