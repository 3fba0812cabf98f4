"""Deciders that create jobs and their iterations."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher import events
from headrace.service.dispatcher.clients import remove_client
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.policy_selection import mode_name, policy_for, policy_of
from headrace.service.dispatcher.python_versions import check_workers_can_run
from headrace.service.dispatcher.registration import describe_difference
from headrace.service.dispatcher.start_positions import (
    check_same_start_position,
    check_start_position,
    restarts_iteration,
)
from headrace.service.dispatcher.state import (
    DispatcherState,
    IterationReaders,
    Job,
    JobIteration,
    RegisteredDataset,
)
from headrace.service.epochs import format_epoch
from headrace.service.messages import JobOptions, OpenIteration

__all__ = ["check_consumer_available", "check_group", "open_iteration", "seed_for"]


def _format_enabled(value: bool) -> str:
    return "enabled" if value else "disabled"


_COMPARED_OPTIONS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "processing_mode": ("processing mode", mode_name),
    "target_workers": ("target workers", str),
    "num_consumers": ("num_consumers", str),
    "cross_trainer_cache": ("cross-trainer cache", _format_enabled),
    "visitation": ("visitation", str),
    "ordered": ("ordered", str),
    "remainder": ("remainder", str),
    "cost_fn_id": ("cost_fn", lambda cost: cost or "None"),
    "partition_mode": ("partition mode", repr),
    "num_splits": ("number of splits", str),
    "group": ("group of consumers", repr),
    "group_options": ("group options", str),
}
"""Options that must be equal for all clients of a job: fields of `JobOptions`, their names in
errors, and how their values are shown. `cost_fn_digest` is not compared: if cost functions have
equal ids, that of the first client is used."""

_COST_FN_NEEDED = messages.OpenIterationReply(
    iteration_id=0, tasks=(), seed=0, finished=False, cost_fn_needed=True
)

_MAX_EPOCH_DEPTH = 32

_MISSED_HEARTBEATS = 3
"""Missed heartbeats after which a client may be dead, although it has not expired."""

_MAX_CONSUMERS = 1 << 20

_MAX_SPLITS = 1 << 60

_INT64 = range(-(1 << 63), 1 << 63)

_EPOCH_LIMIT = 1 << 64
"""Exclusive bound of epoch numbers: the epoch of a dataset opened by a function contains a hash."""


def open_iteration(
    state: DispatcherState, request: messages.OpenIteration, context: DecisionContext
) -> DispatcherDecision:
    """Let a client join an iteration, which is created if it does not exist.

    A client reads one iteration at a time: opening another one closes the previous one.

    Raises:
        NotFoundError: If the dataset is not registered.
        AlreadyExistsError: If the job's name belongs to a job with other options.
        FailedPreconditionError: If the dataset cannot be processed in this mode, or the workers run
            another minor version of Python than the client that registered it.
        ValueError: If the request is invalid.
    """
    _validate_request(request)
    check_group(state, request)
    dataset = state.dataset(request.dataset_id)
    policy = policy_for(request.options)
    policy.check_dataset(state, dataset, request)
    check_start_position(request, policy.num_splits(dataset, request.options.num_splits))
    job = _find_job(state, request)
    if job is not None:
        _check_same_job(state, job, dataset, request)
    job_dataset = dataset if job is None else state.datasets[job.dataset_id]
    check_workers_can_run(state, job_dataset)
    iteration_id = None if job is None else job.iterations.get(request.epoch)
    new_events: list[AnyEvent] = []
    if iteration_id is not None and restarts_iteration(state.iterations[iteration_id], request):
        new_events.append(events.IterationDiscarded(iteration_id=iteration_id))
        iteration_id = None
    if iteration_id is not None and not state.iterations[iteration_id].finished:
        _check_not_departed(state.iterations[iteration_id], request.client_id)
        policy.check_client(state.iterations[iteration_id], request)
    current_iteration_id = state.clients.get(request.client_id)
    if iteration_id is not None and current_iteration_id != iteration_id:
        check_same_start_position(state.iterations[iteration_id], request)
        _check_exclusive(state.iterations[iteration_id], request)
    if current_iteration_id is not None and current_iteration_id != iteration_id:
        new_events += remove_client(state, request.client_id)
    if job is None:
        cost_fn_digest = request.options.cost_fn_digest
        if cost_fn_digest and cost_fn_digest not in state.plan_sizes:
            return DispatcherDecision(reply=_COST_FN_NEEDED)
        new_events.append(
            events.JobCreated(
                job_id=state.next_job_id,
                name=request.job_name,
                owner=request.client_id if request.job_name is None else None,
                dataset_id=request.dataset_id,
                options=request.options,
            )
        )
    else:
        # The client's own job survives when the client opens another of its epochs.
        new_events = [
            event for event in new_events if event != events.JobForgotten(job_id=job.job_id)
        ]
        if iteration_id is None:
            _check_epoch_depth(job, request)
        if iteration_id is None and job.is_epoch_finished(request.epoch):
            has_other_readers = _has_other_readers(state, job, request.client_id, context)
            reply = _finished_reply(
                job, 0, job.finished_epochs.get(request.epoch), has_other_readers
            )
            return DispatcherDecision(events=tuple(new_events), reply=reply)
    if iteration_id is None:
        iteration_id = state.next_iteration_id
        new_events.append(
            events.IterationCreated(
                iteration_id=iteration_id,
                job_id=state.next_job_id if job is None else job.job_id,
                epoch=request.epoch,
                seed=seed_for(state, request),
                num_splits=policy.num_splits(job_dataset, request.options.num_splits),
                exactly_once=policy.exactly_once,
                first_split=request.first_split,
                delivered=request.delivered,
                partial_splits=request.partial_splits,
                start_position_id=request.start_position_id,
                mode_state=policy.new_iteration_state(request.options),
                fixed_seeds=request.fixed_seeds,
            )
        )
    if current_iteration_id != iteration_id:
        new_events.append(
            events.ClientJoined(
                client_id=request.client_id,
                iteration_id=iteration_id,
                consumer_index=request.consumer_index,
            )
        )
    return DispatcherDecision(
        events=tuple(new_events),
        compose_reply=lambda new_state: _opened_reply(new_state, request.client_id, context),
    )


def _check_not_departed(iteration: JobIteration, client_id: str) -> None:
    """Reject a client that joined before, with or without receiving the reply, and left."""
    if client_id in iteration.departed_clients:
        raise FailedPreconditionError(
            f"client {client_id} has left this iteration and cannot rejoin it: it closed the "
            "iteration, or timed out while opening it. Iterate over the dataset again"
        )


def _find_job(state: DispatcherState, request: messages.OpenIteration) -> Job | None:
    """Return the job with the requested name, or the client's own."""
    if request.job_name is not None:
        job_id = state.jobs_by_name.get(request.job_name)
    else:
        job_id = state.jobs_by_owner.get(request.client_id)
    return None if job_id is None else state.jobs[job_id]


def _check_same_job(
    state: DispatcherState, job: Job, dataset: RegisteredDataset, request: messages.OpenIteration
) -> None:
    known, existing, requested = state.datasets[job.dataset_id], job.options, request.options
    differences = [
        f"Existing {label}: <{show(getattr(existing, option))}>; "
        f"got <{show(getattr(requested, option))}>"
        for option, (label, show) in _COMPARED_OPTIONS.items()
        if getattr(existing, option) != getattr(requested, option)
    ]
    if known.compression != dataset.compression:
        differences.append(
            f"Existing compression: <{known.compression}>; got <{dataset.compression}>"
        )
    if known.fingerprint != dataset.fingerprint:
        differences.append(
            f"Existing dataset: <{known.dataset_id}>; got <{dataset.dataset_id}>: "
            f"{describe_difference(known.steps, dataset.steps)}"
        )
    if differences:
        name = request.job_name or f"(unnamed job of client {request.client_id})"
        raise AlreadyExistsError(
            f"Tried to create job with name {name}, but found an existing job with different "
            f"parameters: {'; '.join(differences)}. Choose another job_name."
        )


def _check_epoch_depth(job: Job, request: messages.OpenIteration) -> None:
    """Reject a client with another number of `repeat` steps than others of the job.

    An epoch is identified by its number and those of the `repeat` steps around the source, so that
    such clients would share nothing.
    """
    number, *repeats = request.epoch or (0,)
    for known in (*job.iterations, *job.finished_epochs):
        if known and known[0] == number and len(known) != 1 + len(repeats):
            raise FailedPreconditionError(
                f"epoch {number} of job {request.job_name!r} is read with {len(known) - 1} "
                f"`repeat` steps after `distribute`, but this client has {len(repeats)} and would "
                "read all elements a second time. Use the same `repeat` steps in all clients, move "
                "them before `distribute`, or choose another job_name"
            )


def _check_exclusive(iteration: JobIteration, request: messages.OpenIteration) -> None:
    """Reject a second client if a step needs the whole stream.

    With ordered reading, also reject a client that would get only the rest of a departed one.
    """
    check_consumer_available(iteration, request)
    if not request.exclusive_reason or iteration.finished:
        return
    if iteration.clients:
        raise FailedPreconditionError(
            f"job {request.job_name!r} is already read by client {min(iteration.clients)}, but "
            f"{request.exclusive_reason} needs the whole stream, which several clients would "
            "share. Move that step after `distribute`, or use a different job_name for each client"
        )
    if request.options.ordered and iteration.readers is not None:
        raise FailedPreconditionError(
            f"{format_epoch(request.epoch)} of job {request.job_name!r}, which is read in order, "
            f"was started by client {iteration.readers.first_client}, which has departed: another "
            "client would receive only the remaining elements. Choose another job_name"
        )


def _opened_reply(
    state: DispatcherState, client_id: str, context: DecisionContext
) -> messages.OpenIterationReply:
    iteration = state.client_iteration(client_id)
    job = state.jobs[iteration.job_id]
    if iteration.finished:
        has_other_readers = _has_other_readers(state, job, client_id, context)
        finished_reply = _finished_reply(
            job, iteration.iteration_id, iteration.readers, has_other_readers
        )
        if iteration.failure_reason:
            return msgspec.structs.replace(
                finished_reply, finished_by="", failure_reason=iteration.failure_reason
            )
        return finished_reply
    reply = messages.OpenIterationReply(
        iteration_id=iteration.iteration_id,
        tasks=context.soft_state.task_addresses.of(state, iteration).listed,
        seed=iteration.seed,
        finished=False,
        job_name=job.name or "",
        lease=context.limits.client_timeout,
        deployment_mode=context.limits.deployment_mode,
        opened_by=_describe_readers(iteration.readers, client_id),
        has_other_readers=_has_other_readers(state, job, client_id, context),
    )
    return policy_of(state, iteration).extend_opened_reply(reply, iteration)


def _has_other_readers(
    state: DispatcherState, job: Job, client_id: str, context: DecisionContext
) -> bool:
    """Return whether other active clients read the job."""
    timeout = _MISSED_HEARTBEATS * context.limits.interval_between_client_heartbeats(
        len(state.clients)
    )
    last_heartbeats = context.soft_state.client_heartbeats
    return any(
        context.now - last_heartbeats.get(other, -math.inf) <= timeout
        for iteration in map(state.iterations.__getitem__, job.iterations.values())
        for other in iteration.clients
        if other != client_id and not iteration.finished
    )


def _describe_readers(readers: IterationReaders | None, client_id: str = "") -> str:
    """Describe the clients that opened an iteration before this one; "" if there were none."""
    if readers is None or readers.first_client == client_id:
        return ""
    others = readers.num_clients - 1 - bool(client_id)
    if others <= 0:
        return f"client {readers.first_client}"
    return f"client {readers.first_client} and {'another' if others == 1 else f'{others} others'}"


def _finished_reply(
    job: Job, iteration_id: int, readers: IterationReaders | None, has_other_readers: bool
) -> messages.OpenIterationReply:
    return messages.OpenIterationReply(
        iteration_id=iteration_id,
        tasks=(),
        seed=0,
        finished=True,
        job_name=job.name or "",
        finished_by=_describe_readers(readers) or "no client",
        has_other_readers=has_other_readers,
    )


def _validate_request(request: messages.OpenIteration) -> None:
    options = request.options
    if options.num_consumers is None:
        is_valid = request.consumer_index is None
    else:
        index = -1 if request.consumer_index is None else request.consumer_index
        is_valid = 0 <= index < options.num_consumers <= _MAX_CONSUMERS
    if not is_valid:
        raise ValueError(
            f"num_consumers={options.num_consumers} requires "
            + (
                "consumer_index=None"
                if options.num_consumers is None
                else f"consumer_index in [0, {options.num_consumers}) and num_consumers <= "
                f"{_MAX_CONSUMERS}"
            )
            + f"; got consumer_index={request.consumer_index}"
        )
    if options.num_splits is not None and not -1 <= options.num_splits <= _MAX_SPLITS:
        raise ValueError(
            f"num_splits must be None, -1 (infinite) or in [0, {_MAX_SPLITS}]; "
            f"got {options.num_splits}"
        )
    max_first_split = _MAX_SPLITS if options.num_splits in (None, -1) else options.num_splits
    if not 0 <= request.first_split <= (max_first_split or 0):
        raise ValueError(
            f"first_split must be in [0, {max_first_split or 0}]; got {request.first_split}"
        )
    if not request.client_id:
        raise ValueError("client_id must not be empty")
    if options.cross_trainer_cache and request.job_name is None:
        raise ValueError("Cross-trainer caching requires named jobs. Got empty `job_name`.")
    if request.job_name == "":
        raise ValueError("job_name must be None or a non-empty string; got ''")
    if request.seed not in _INT64:
        raise ValueError(f"seed must be a signed 64-bit integer; got {request.seed}")
    if not all(seed in _INT64 for seed in request.fixed_seeds):
        raise ValueError(f"fixed_seeds must be signed 64-bit integers; got {request.fixed_seeds}")
    epoch = request.epoch
    if len(epoch) > _MAX_EPOCH_DEPTH or any(not 0 <= each < _EPOCH_LIMIT for each in epoch):
        raise ValueError(
            f"epoch must be at most {_MAX_EPOCH_DEPTH} unsigned 64-bit integers; "
            f"got {len(epoch)}: {epoch[:_MAX_EPOCH_DEPTH]}"
        )


# --- groups: related jobs, such as one for each consumer with ordered reading --------------------

# Rule 1. The iterations of an epoch have the same seed in all jobs of a group, in whatever order
#         they start, and even if some were forgotten: it is derived from the group's name and the
#         dispatcher's secret. Iterations with a start position have the seed of that position.
# Rule 2. Jobs of a group have equal group options: a job that differs is rejected while another one
#         is known.
# Rule 3. No other job has the name of a group: its clients must set their consumer index.

_SEED_BITS = 52


def seed_for(state: DispatcherState, request: OpenIteration) -> int:
    """Return the seed of an iteration that a client is the first to open."""
    if not request.options.group or request.start_position_id:
        return request.seed
    identity = json.dumps([request.options.group, request.epoch])
    digest = hashlib.blake2b(identity.encode(), key=state.secret, digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> (64 - _SEED_BITS)


def check_group(state: DispatcherState, request: OpenIteration) -> None:
    """Reject a client whose job differs from others of its group.

    Raises:
        AlreadyExistsError: If the group options differ, or a job and a group have the same name.
    """
    options, name = request.options, request.job_name
    if not options.group:
        is_new = name is not None and name not in state.jobs_by_name
        if is_new and any(job.options.group == name for job in state.jobs.values()):
            raise AlreadyExistsError(
                f"job {name!r} is read in order by several consumers, but this client has no "
                "consumer index: set `num_consumers` and `consumer_index`, or choose another "
                "job_name"
            )
        return
    if options.group in state.jobs_by_name:
        raise AlreadyExistsError(
            f"job {options.group!r} is read without `num_consumers`, but this client is one of "
            "several ordered consumers. Choose another job_name"
        )
    for job in state.jobs.values():
        existing = job.options
        if existing.group == options.group and existing.group_options != options.group_options:
            raise AlreadyExistsError(
                f"job {options.group!r} is read by consumers with different options: "
                f"{_describe_option_difference(existing, options)}. Choose another job_name"
            )


def _describe_option_difference(existing: JobOptions, requested: JobOptions) -> str:
    """Describe how two group options differ.

    Group options are a line of options, followed by one for each step of the dataset.
    """
    (existing_line, *existing_steps), (requested_line, *requested_steps) = (
        options.group_options.splitlines() or [""] for options in (existing, requested)
    )
    description = f"existing <{existing_line}>; got <{requested_line}>"
    if existing_steps == requested_steps:
        return description
    difference = describe_difference(_parse_steps(existing_steps), _parse_steps(requested_steps))
    return f"{description}: the datasets differ: {difference}"


def _parse_steps(steps: list[str]) -> list[tuple[str, str]]:
    """Return the names of steps, each with its fingerprint."""
    parts = (step.rpartition(" ") for step in steps)
    return [(name, fingerprint) for name, _, fingerprint in parts]


def check_consumer_available(iteration: JobIteration, request: OpenIteration) -> None:
    """Reject a second client for a consumer's job, or one that was read and not finished.

    Raises:
        FailedPreconditionError: If another client reads the job, or did.
    """
    if not request.options.group or iteration.finished:
        return
    if iteration.clients:
        raise FailedPreconditionError(
            f"job {request.job_name!r} is already read by client {min(iteration.clients)}: each "
            "`consumer_index` has one client. Set another consumer_index, or with several readers "
            "per consumer another reader_index; a restarted client can join once its predecessor "
            "has sent nothing for `client_timeout_ms`"
        )
    if iteration.readers is not None:
        raise FailedPreconditionError(
            f"{format_epoch(request.epoch)} of job {request.job_name!r} was started by client "
            f"{iteration.readers.first_client}, which has departed: restore a state of that client "
            "(`set_state`), or choose another job_name for all consumers"
        )
