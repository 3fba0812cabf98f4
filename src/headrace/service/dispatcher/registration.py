"""Deciders that register datasets and workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from headrace.errors import AbortedError, AlreadyExistsError, FailedPreconditionError
from headrace.service import messages
from headrace.service.config import check_reachable
from headrace.service.dispatcher import events, slots
from headrace.service.dispatcher.decision import DecisionContext, DispatcherDecision
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.dispatcher.plans import check_digest
from headrace.service.dispatcher.state import DispatcherState, RegisteredDataset
from headrace.versions import python_mismatch

__all__ = [
    "describe_difference",
    "get_dataset",
    "ping",
    "register_dataset",
    "register_worker",
]

_INFINITE = -1
_MAX_SPLITS = 1 << 60


def ping(
    state: DispatcherState, request: messages.Ping, context: DecisionContext
) -> DispatcherDecision:
    """Reply to a ping."""
    return DispatcherDecision()


def register_dataset(
    state: DispatcherState, request: messages.RegisterDataset, context: DecisionContext
) -> DispatcherDecision:
    """Register a dataset under the requested id, or under the next free number.

    If its plan is not stored, nothing is registered and the reply requests the plan.

    Raises:
        AlreadyExistsError: If the requested id belongs to another dataset.
        ValueError: If the request is invalid.
    """
    registered_id = state.datasets_by_token.get(request.token)
    if registered_id is not None:
        return DispatcherDecision(reply=messages.RegisterDatasetReply(dataset_id=registered_id))
    check_digest(request.digest)
    num_splits = request.num_splits
    if num_splits is not None and not _INFINITE <= num_splits <= _MAX_SPLITS:
        raise ValueError(
            f"num_splits must be None, {_INFINITE} (infinite) or in [0, {_MAX_SPLITS}]; "
            f"got {num_splits}"
        )
    _check_plan_steps(request.plan_steps)
    dataset_id = request.dataset_id or str(state.next_dataset_id)
    known = state.datasets.get(dataset_id)
    if known is not None:
        _check_same_dataset(known, request)
        is_pinned = known.anonymous and not request.anonymous
        return DispatcherDecision(
            events=(events.DatasetPinned(dataset_id=dataset_id),) if is_pinned else (),
            reply=messages.RegisterDatasetReply(dataset_id=dataset_id),
        )
    if request.digest not in state.plan_sizes:
        return DispatcherDecision(
            reply=messages.RegisterDatasetReply(dataset_id="", plan_needed=True)
        )
    registered = events.DatasetRegistered(
        dataset_id=dataset_id,
        token=request.token,
        digest=request.digest,
        fingerprint=request.fingerprint,
        element_spec=request.element_spec,
        cardinality=request.cardinality,
        num_splits=request.num_splits,
        compression=request.compression,
        anonymous=request.anonymous,
        has_element_ids=request.has_element_ids,
        steps=request.steps,
        python_version=request.versions.python,
        plan_steps=request.plan_steps,
    )
    return DispatcherDecision(
        events=(registered,), reply=messages.RegisterDatasetReply(dataset_id=dataset_id)
    )


def describe_difference(known: Sequence[tuple[str, str]], given: Sequence[tuple[str, str]]) -> str:
    """Describe the first step in which two datasets with different fingerprints differ.

    Args:
        known: Names of the steps of the registered dataset, each with a fingerprint.
        given: Steps of the other dataset, in the same form.
    """
    for number, (old, new) in enumerate(zip_longest(known, given), 1):
        if old is None or new is None or old[0].split(" ")[0] != new[0].split(" ")[0]:
            old_name, new_name = (each[0] if each else "none" for each in (old, new))
            return f"step {number} is {new_name}, but was {old_name}"
        if old[1] != new[1]:
            return (
                f"step {number}, {new[0]}, has different arguments, functions or data (random "
                "arrays differ in each process: set a seed)"
            )
    return "module-level names that its functions use have different values"


def _check_plan_steps(steps: Sequence[messages.PlanStep]) -> None:
    if len(steps) > messages.MAX_PLAN_STEPS:
        raise ValueError(
            f"plan_steps must have at most {messages.MAX_PLAN_STEPS} steps; got {len(steps)}"
        )
    for number, step in enumerate(steps):
        if len(step.name) > messages.MAX_STEP_NAME:
            raise ValueError(
                f"the names in plan_steps must have at most {messages.MAX_STEP_NAME} characters; "
                f"step {number} has {len(step.name)}"
            )
        if len(step.inputs) > messages.MAX_PLAN_STEPS or not all(
            0 <= each < number for each in step.inputs
        ):
            raise ValueError(f"step {number} of plan_steps has inputs that do not precede it")


def _check_same_dataset(known: RegisteredDataset, request: messages.RegisterDataset) -> None:
    differences = []
    if python_mismatch(known.python_version, request.versions.python):
        differences.append(f"Python version: {known.python_version}; got {request.versions.python}")
    if known.element_spec != request.element_spec:
        differences.append("the element spec differs")
    if known.cardinality != request.cardinality:
        differences.append(f"cardinality: {known.cardinality}; got {request.cardinality}")
    if known.compression != request.compression:
        differences.append(f"compression: {known.compression!r}; got {request.compression!r}")
    if not differences and known.fingerprint != request.fingerprint:
        difference = describe_difference(known.steps, request.steps)
        differences.append(f"the element spec is equal, but the plans differ: {difference}")
    if differences:
        raise AlreadyExistsError(
            "Datasets with the same ID should have the same structure and content, got diff for "
            f"dataset ID {known.dataset_id}: {', '.join(differences)}. Register the same dataset "
            "with the same ID, or choose another ID."
        )


def get_dataset(
    state: DispatcherState, request: messages.GetDataset, context: DecisionContext
) -> DispatcherDecision:
    """Return the description of a dataset."""
    dataset = state.dataset(request.dataset_id)
    return DispatcherDecision(
        reply=messages.DatasetDescription(
            dataset_id=dataset.dataset_id,
            digest=dataset.digest,
            fingerprint=dataset.fingerprint,
            element_spec=dataset.element_spec,
            cardinality=dataset.cardinality,
            num_splits=dataset.num_splits,
            compression=dataset.compression,
            has_element_ids=dataset.has_element_ids,
            plan_steps=dataset.plan_steps,
        )
    )


def register_worker(
    state: DispatcherState, request: messages.RegisterWorker, context: DecisionContext
) -> DispatcherDecision:
    """Register a worker; it gets a task of every unfinished iteration.

    A worker that starts at the address of an earlier one proves that the earlier one ended.

    Raises:
        FailedPreconditionError: If the worker has unregistered, so that the request was delayed, or
            no slot fits it.
        AbortedError: If the worker must wait for a slot.
        ValueError: If clients cannot reach the worker at this address.
    """
    if request.worker_id in context.soft_state.unregistered_workers:
        raise FailedPreconditionError(
            f"worker {request.worker_id} has unregistered; register again under a new worker_id"
        )
    if not request.worker_id:
        raise ValueError("worker_id must not be empty")
    try:
        check_reachable(request.address)
    except ValueError as error:
        raise ValueError(
            f"worker not registered, because clients could not connect to it: {error}"
        ) from None
    reply = messages.RegisterWorkerReply(
        heartbeat_interval=context.limits.heartbeat_interval, dispatcher_id=state.dispatcher_id
    )
    known = state.workers.get(request.worker_id)
    if known is not None and known.address == request.address:
        changed = events.WorkerRegistered(
            worker_id=request.worker_id,
            address=request.address,
            tags=request.tags,
            versions=request.versions,
        )
        return DispatcherDecision(
            events=() if known.tags == request.tags else (changed,), reply=reply
        )
    slot = _choose_slot(state, request, context)
    replaced = {request.worker_id, state.workers_by_address.get(request.address, request.worker_id)}
    new_events: list[AnyEvent] = [
        events.WorkerLost(
            worker_id=worker_id,
            reason="another worker registered with the same address or id",
            timed_out=state.workers[worker_id].address != request.address,
        )
        for worker_id in sorted(replaced & state.workers.keys())
    ]
    registered = events.WorkerRegistered(
        worker_id=request.worker_id,
        address=request.address,
        tags=request.tags,
        slot=slot,
        versions=request.versions,
    )
    return DispatcherDecision(events=(*new_events, registered), reply=reply)


def _choose_slot(
    state: DispatcherState, request: messages.RegisterWorker, context: DecisionContext
) -> int | None:
    """Return the slot that a new worker takes; None if there are no slots.

    Raises:
        FailedPreconditionError: If no slot fits its address, or the workers in all fitting slots
            have sent heartbeats while it waited.
        AbortedError: If it must wait because one of those workers may be lost.
    """
    if not state.slots:
        return None
    matching = slots.matching_slots(state.slots, request.address)
    for index in matching:
        holder = state.slots[index].worker_id
        # A worker with the address or id of another proves that the other one ended.
        if holder in ("", request.worker_id) or (state.workers[holder].address == request.address):
            return index
    patterns = [slot.pattern for slot in state.slots]
    waited = (
        context.soft_state.wait_for_slot(request.address, context.now) if matching else math.inf
    )
    if waited < context.limits.worker_timeout:
        raise AbortedError(
            f"worker {request.address} must wait for a slot of worker_addresses={patterns}: all "
            "matching slots are held by workers that sent a heartbeat less than "
            f"{context.limits.worker_timeout:g} s ago"
        )
    raise FailedPreconditionError(
        f"Failed to assign an index for worker {request.address}. Configured workers list: "
        f"{patterns}. The worker's address is not configured, or other workers are already running "
        "at the configured host. If your worker has restarted, make sure it runs at the same "
        "address and port."
    )
