"""Decider for the status of the service."""

from __future__ import annotations

from headrace.service import messages
from headrace.service.dispatcher.activity import (
    ClientCounters,
    DataWorkerCounters,
    IterationCounters,
    JobCounters,
    ServiceActivity,
    TaskCounters,
    count_done_splits,
)
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.state import (
    DispatcherState,
    DispatcherTask,
    Job,
    JobIteration,
    Worker,
)
from headrace.service.modes.static.records import shard_of
from headrace.service.ranges import total_length

__all__ = ["describe", "get_status"]


def get_status(
    state: DispatcherState, request: messages.GetStatus, context: DecisionContext
) -> DispatcherDecision:
    """Reply with the status of the service."""
    return DispatcherDecision(reply=describe(state, context))


def describe(state: DispatcherState, context: DecisionContext) -> messages.DispatcherStatus:
    """Return the status of the service."""
    activity, now = context.soft_state.activity, context.now
    return messages.DispatcherStatus(
        workers=tuple(_worker(worker, context) for worker in state.workers.values()),
        jobs=tuple(_job(state, job, context) for job in state.jobs.values()),
        datasets=len(state.datasets),
        dispatcher_id=state.dispatcher_id,
        clients=len(state.clients),
        plan_bytes=sum(state.plan_sizes.values()),
        uptime_seconds=now - activity.started_at,
        workers_lost=activity.num_workers_lost,
        recently_lost_workers=tuple(
            messages.LostWorker(
                address=each.address, reason=each.reason, seconds_ago=now - each.lost_at
            )
            for each in activity.recently_lost_workers
        ),
        elements=activity.total.elements,
        bytes=activity.total.bytes,
        wait_seconds=activity.total.wait_seconds,
        refused_connections=activity.count_refused_connections(),
        slots=len(state.slots),
        occupied_slots=sum(bool(slot.worker_id) for slot in state.slots),
        wanted_workers=context.soft_state.worker_demand.wanted_workers,
    )


def _worker(worker: Worker, context: DecisionContext) -> messages.WorkerStatus:
    now = context.now
    counters = context.soft_state.activity.workers.get(worker.worker_id) or DataWorkerCounters(now)
    return messages.WorkerStatus(
        worker_id=worker.worker_id,
        address=worker.address,
        seconds_since_heartbeat=now - context.soft_state.worker_heartbeats[worker.worker_id],
        tasks=len(worker.tasks),
        draining=worker.draining,
        tags=worker.tags,
        elements=counters.elements,
        bytes=counters.bytes,
        elements_per_second=counters.element_rate.read(now),
        bytes_per_second=counters.byte_rate.read(now),
        buffered_batches=counters.buffered_batches,
        buffered_bytes=counters.buffered_bytes,
        versions=worker.versions,
        cores=counters.cores,
        cpu_seconds=counters.cpu_seconds,
        machine_cpu_seconds=counters.machine_cpu_seconds,
        busy_cores=counters.cpu_rate.read(now),
    )


def _job(state: DispatcherState, job: Job, context: DecisionContext) -> messages.JobStatus:
    iterations = [state.iterations[iteration_id] for iteration_id in job.iterations.values()]
    counters = context.soft_state.activity.jobs.get(job.job_id) or JobCounters()
    statuses = tuple(_iteration(state, each, context) for each in iterations)
    save = state.saves.get(job.save_id) if job.save_id else None
    return messages.JobStatus(
        job_id=job.job_id,
        name=job.name or "",
        dataset_id=job.dataset_id,
        processing_mode=job.options.processing_mode,
        num_epochs=job.num_epochs,
        running_tasks=sum(len(each.tasks) for each in statuses),
        clients=sum(len(each.clients) for each in statuses),
        iterations=statuses,
        # For a save, the committed ones, which may exceed what heartbeats have reported so far.
        elements=counters.elements if save is None else save.num_elements,
        bytes=counters.bytes if save is None else save.num_bytes,
        wait_seconds=counters.wait_seconds,
        path="" if save is None else save.path,
        ordered=job.options.ordered,
        num_consumers=job.options.num_consumers,
        remainder=job.options.remainder,
    )


def _iteration(
    state: DispatcherState, iteration: JobIteration, context: DecisionContext
) -> messages.IterationStatus:
    pool = iteration.pool
    activity, now = context.soft_state.activity, context.now
    counters = activity.iterations[iteration.iteration_id]
    running = state.running_tasks(iteration)
    progress, remaining_seconds = _progress(state, iteration, running, activity, counters, now)
    return messages.IterationStatus(
        iteration_id=iteration.iteration_id,
        epoch=iteration.epoch,
        finished=iteration.finished,
        elapsed_seconds=now - counters.started_at,
        num_splits=pool.num_splits,
        splits_assigned=pool.num_assigned,
        splits_in_progress=pool.num_held,
        splits_unassigned=pool.num_unassigned,
        splits_abandoned=total_length(pool.abandoned),
        progress=progress,
        remaining_seconds=remaining_seconds,
        elements=counters.elements,
        bytes=counters.bytes,
        elements_per_second=counters.element_rate.read(now),
        bytes_per_second=counters.byte_rate.read(now),
        history=counters.history.read(now),
        wait_seconds=counters.wait_seconds,
        clients=tuple(_client(client_id, context) for client_id in sorted(iteration.clients)),
        tasks=tuple(_task(task, context) for task in running),
        steps=tuple(
            messages.StepStatus(
                step=name,
                seconds=step.seconds,
                busy_threads=step.rate.read(now),
                position=step.position,
                threads=step.threads,
            )
            for name, step in sorted(counters.steps.items(), key=lambda item: -item[1].seconds)
        ),
        failure_reason=iteration.failure_reason,
    )


def _progress(
    state: DispatcherState,
    iteration: JobIteration,
    running: list[DispatcherTask],
    activity: ServiceActivity,
    counters: IterationCounters,
    now: float,
) -> tuple[float | None, float | None]:
    """Return the fraction of an iteration that is done, and the seconds that the rest will take."""
    if iteration.finished:
        return 1.0, 0.0
    if iteration.pool.num_splits is not None:
        total, done, initially_done = (
            iteration.pool.num_splits,
            count_done_splits(state, iteration),
            counters.initially_done,
        )
    else:
        # Each task reads the whole dataset, or its shard.
        shards = [shard_of(task.mode_state) for task in running]
        shard_counts = {1 if shard is None else shard.num_shards for shard in shards}
        cardinality = state.dataset_of(iteration).cardinality
        if len(shard_counts) != 1 or cardinality < 0:
            return None, None
        total = cardinality * len(running) // shard_counts.pop()
        done = sum(
            activity.tasks[task.task_id].elements
            for task in running
            if task.task_id in activity.tasks
        )
        initially_done = 0
    if total <= 0:
        return None, None
    progress = min(1.0, max(0.0, done / total))
    seconds = now - counters.started_at
    if done <= initially_done or seconds <= 0:
        return progress, None
    return progress, max(0, total - done) * seconds / (done - initially_done)


def _client(client_id: str, context: DecisionContext) -> messages.ClientStatus:
    now = context.now
    reported = context.soft_state.activity.clients.get(client_id)
    counters = reported or ClientCounters(now)
    return messages.ClientStatus(
        client_id=client_id,
        seconds_since_heartbeat=now - context.soft_state.client_heartbeats[client_id],
        elements=counters.elements,
        elements_per_second=counters.element_rate.read(now),
        wait_seconds=counters.wait_seconds,
        wait_ratio=counters.wait_ratio(now),
        buffered_batches=counters.buffered_batches,
        seconds_since_report=None if reported is None else now - reported.reported_at,
    )


def _task(task: DispatcherTask, context: DecisionContext) -> messages.TaskStatus:
    now = context.now
    reported = context.soft_state.activity.tasks.get(task.task_id)
    counters = reported or TaskCounters(task.task_id, now)
    last_report, shard = counters.last_report, shard_of(task.mode_state)
    return messages.TaskStatus(
        task_id=task.task_id,
        worker_address=task.address,
        splits_held=task.assigned.num_held,
        elements=counters.elements,
        elements_per_second=counters.element_rate.read(now),
        buffered_batches=last_report.buffered_batches,
        buffered_bytes=last_report.buffered_bytes,
        waiting_for=last_report.waiting_for,
        client_wait_ratio=counters.client_wait_ratio(now),
        split_wait_ratio=counters.split_wait_ratio(now),
        client_wait_seconds=last_report.client_wait_seconds,
        split_wait_seconds=last_report.split_wait_seconds,
        seconds_since_report=None if reported is None else now - reported.reported_at,
        shard_index=None if shard is None else shard.index,
        trainers=last_report.trainers,
    )
