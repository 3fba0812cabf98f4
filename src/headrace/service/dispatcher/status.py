"""Decider: who is there, and what is going on."""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher.activity import (
    Activity,
    ClientWork,
    IterationWork,
    JobWork,
    TaskWork,
    WorkerWork,
    done_of,
)
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.state import DispatcherState, Iteration, Job, Task, Worker
from headrace.service.modes.static.records import shard_of
from headrace.service.ranges import count

__all__ = ["describe", "get_status"]

_BLOCKED_SECONDS = 3.0
"""A task that has stood still for so long, and said so once, does nothing else."""


def get_status(state: DispatcherState, request: messages.GetStatus, moment: Moment) -> Decision:
    """Say who is there, and what is going on."""
    return Decision(reply=describe(state, moment))


def describe(state: DispatcherState, moment: Moment) -> messages.DispatcherStatus:
    """Return who is there, and what is going on."""
    activity, now = moment.presence.activity, moment.now
    return messages.DispatcherStatus(
        workers=tuple(_worker(worker, moment) for worker in state.workers.values()),
        jobs=tuple(_job(state, job, moment) for job in state.jobs.values()),
        datasets=len(state.datasets),
        incarnation=state.incarnation,
        clients=len(state.clients),
        plan_bytes=sum(state.plans.values()),
        seconds_up=now - activity.began,
        workers_lost=activity.workers_lost,
        last_lost=tuple(
            messages.LostWorker(address=each.address, reason=each.reason, seconds_ago=now - each.at)
            for each in activity.lost
        ),
        elements=activity.total.elements,
        bytes=activity.total.bytes,
        waited=activity.total.waited,
        peers_refused=activity.peers_refused(),
        slots=len(state.slots),
        slots_held=sum(bool(slot.worker_id) for slot in state.slots),
    )


def _worker(worker: Worker, moment: Moment) -> messages.WorkerStatus:
    now = moment.now
    work = moment.presence.activity.workers.get(worker.worker_id) or WorkerWork(now)
    return messages.WorkerStatus(
        worker_id=worker.worker_id,
        address=worker.address,
        seconds_since_heartbeat=now - moment.presence.workers[worker.worker_id],
        tasks=len(worker.tasks),
        leaving=worker.leaving,
        tags=worker.tags,
        elements=work.elements,
        bytes=work.bytes,
        elements_per_second=work.element_rate.read(now),
        bytes_per_second=work.byte_rate.read(now),
        buffers=work.buffers,
        buffer_bytes=work.buffer_bytes,
        versions=worker.versions,
    )


def _job(state: DispatcherState, job: Job, moment: Moment) -> messages.JobStatus:
    alive = [state.iterations[iteration_id] for iteration_id in job.iterations.values()]
    work = moment.presence.activity.jobs.get(job.job_id) or JobWork()
    passes = tuple(_iteration(state, each, moment) for each in alive)
    save = state.saves.get(job.save) if job.save else None
    return messages.JobStatus(
        job_id=job.job_id,
        name=job.name or "",
        dataset_id=job.dataset_id,
        processing_mode=job.terms.processing_mode,
        iterations=job.passes,
        running_tasks=sum(len(each.tasks) for each in passes),
        clients=sum(len(each.clients) for each in passes),
        passes=passes,
        # Of a save those that count, which may be more than heartbeats have said so far.
        elements=work.elements if save is None else save.elements,
        bytes=work.bytes if save is None else save.size,
        waited=work.waited,
        path="" if save is None else save.path,
        ordered=job.terms.ordered,
        consumers=job.terms.num_consumers,
        remainder=job.terms.remainder,
    )


def _iteration(
    state: DispatcherState, iteration: Iteration, moment: Moment
) -> messages.IterationStatus:
    pool = iteration.splits
    activity, now = moment.presence.activity, moment.now
    work = activity.iterations[iteration.iteration_id]
    running = state.running_tasks(iteration)
    progress, seconds_left = _progress(state, iteration, running, activity, work, now)
    return messages.IterationStatus(
        iteration_id=iteration.iteration_id,
        pass_number=iteration.pass_number,
        finished=iteration.finished,
        seconds=now - work.began,
        units=pool.positions,
        units_dealt=pool.assigned,
        units_in_hand=pool.held,
        units_left=pool.rest,
        units_given_up=count(pool.given_up),
        progress=progress,
        seconds_left=seconds_left,
        elements=work.elements,
        bytes=work.bytes,
        elements_per_second=work.element_rate.read(now),
        bytes_per_second=work.byte_rate.read(now),
        history=work.history.read(now),
        waited=work.waited,
        clients=tuple(_client(client_id, moment) for client_id in sorted(iteration.clients)),
        tasks=tuple(_task(task, moment) for task in running),
        stages=tuple(
            messages.StageStatus(stage=name, seconds=stage.seconds, busy=stage.rate.read(now))
            for name, stage in sorted(work.stages.items(), key=lambda item: -item[1].seconds)
        ),
        failed=iteration.failed,
    )


def _progress(
    state: DispatcherState,
    iteration: Iteration,
    running: list[Task],
    activity: Activity,
    work: IterationWork,
    now: float,
) -> tuple[float | None, float | None]:
    """Return which part of an iteration is done, and the seconds that the rest will take."""
    if iteration.finished:
        return 1.0, 0.0
    if iteration.splits.positions is not None:
        total, done, before = (
            iteration.splits.positions,
            done_of(state, iteration),
            work.done_before,
        )
    else:
        # Each task reads all of the dataset, or its share of it.
        shards = [shard_of(task.mode) for task in running]
        shares = {1 if shard is None else shard.of for shard in shards}
        cardinality = state.dataset_of(iteration).cardinality
        if len(shares) != 1 or cardinality < 0:
            return None, None
        total = cardinality * len(running) // shares.pop()
        done = sum(
            activity.tasks[task.task_id].elements
            for task in running
            if task.task_id in activity.tasks
        )
        before = 0
    if total <= 0:
        return None, None
    progress = min(1.0, max(0.0, done / total))
    seconds = now - work.began
    if done <= before or seconds <= 0:
        return progress, None
    return progress, max(0, total - done) * seconds / (done - before)


def _client(client_id: str, moment: Moment) -> messages.ClientStatus:
    now = moment.now
    work = moment.presence.activity.clients.get(client_id) or ClientWork(now)
    return messages.ClientStatus(
        client_id=client_id,
        seconds_since_heartbeat=now - moment.presence.clients[client_id],
        elements=work.elements,
        elements_per_second=work.element_rate.read(now),
        waited=work.waited,
        waiting=min(1.0, work.waiting.read(now)),
        buffers=work.buffers,
    )


def _task(task: Task, moment: Moment) -> messages.TaskStatus:
    now = moment.now
    work = moment.presence.activity.tasks.get(task.task_id) or TaskWork(task.task_id, now)
    last, shard = work.last, shard_of(task.mode)
    is_blocked = bool(last.waits_for) and now - work.said_at > _BLOCKED_SECONDS
    return messages.TaskStatus(
        task_id=task.task_id,
        worker_address=task.address,
        units_held=task.splits.held,
        elements=work.elements,
        elements_per_second=work.element_rate.read(now),
        buffers=last.buffers,
        buffer_bytes=last.buffer_bytes,
        waits_for=last.waits_for,
        waiting_for_clients=_part(
            work.for_clients.read(now), last, messages.FOR_CLIENTS, is_blocked
        ),
        waiting_for_units=_part(work.for_units.read(now), last, messages.FOR_UNITS, is_blocked),
        shard=None if shard is None else shard.index,
        trainers=last.trainers,
    )


def _part(rate: float, last: messages.TaskActivity, what: str, is_blocked: bool) -> float:
    if is_blocked:
        return float(last.waits_for == what)
    return min(1.0, rate)
