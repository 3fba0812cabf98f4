"""Deciders: datasets and workers become known."""

from __future__ import annotations

import hashlib

from headrace.errors import AlreadyExistsError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.liveness import lose_workers
from headrace.service.dispatcher.state import Dataset, DispatcherState

__all__ = [
    "get_dataset",
    "get_plan",
    "ping",
    "register_dataset",
    "register_worker",
]


def ping(state: DispatcherState, request: messages.Ping, moment: Moment) -> Decision:
    """Say that somebody is there."""
    return Decision()


def register_dataset(
    state: DispatcherState, request: messages.RegisterDataset, moment: Moment
) -> Decision:
    """Make a dataset known under the id asked for, or under the next free number.

    Raises:
        AlreadyExistsError: The id asked for belongs to a dataset that differs.
    """
    repeated = state.tokens.get(request.token)
    if repeated is not None:
        return Decision(reply=messages.DatasetRegistered(dataset_id=repeated))
    dataset_id = request.dataset_id or str(state.next_dataset)
    known = state.datasets.get(dataset_id)
    if known is not None:
        _check_equal(known, request)
        return Decision(reply=messages.DatasetRegistered(dataset_id=dataset_id))
    digest = hashlib.sha256(request.plan).digest()
    registered = updates.DatasetRegistered(
        dataset_id=dataset_id,
        token=request.token,
        fingerprint=request.fingerprint,
        element_spec=request.element_spec,
        cardinality=request.cardinality,
        split_sizes=request.split_sizes,
        compression=request.compression,
        plan=digest,
    )
    return Decision(
        updates=(registered,),
        reply=messages.DatasetRegistered(dataset_id=dataset_id),
        plan_to_store=request.plan,
    )


def _check_equal(known: Dataset, request: messages.RegisterDataset) -> None:
    differences = []
    if known.element_spec != request.element_spec:
        differences.append("the element spec differs")
    if known.cardinality != request.cardinality:
        differences.append(f"cardinality: {known.cardinality}; got {request.cardinality}")
    if known.compression != request.compression:
        differences.append(f"compression: {known.compression!r}; got {request.compression!r}")
    if not differences and known.fingerprint != request.fingerprint:
        differences.append("elements of the same structure come from a different plan")
    if differences:
        raise AlreadyExistsError(
            "Datasets with the same ID should have the same structure and content, got diff for "
            f"dataset ID {known.dataset_id}: {', '.join(differences)}. Register the same dataset "
            "with the same ID, or choose another ID."
        )


def get_dataset(state: DispatcherState, request: messages.GetDataset, moment: Moment) -> Decision:
    """Tell what is known of a dataset."""
    dataset = state.dataset(request.dataset_id)
    return Decision(
        reply=messages.DatasetDescription(
            dataset_id=dataset.dataset_id,
            fingerprint=dataset.fingerprint,
            element_spec=dataset.element_spec,
            cardinality=dataset.cardinality,
            splittable=dataset.splittable,
            compression=dataset.compression,
        )
    )


def get_plan(state: DispatcherState, request: messages.GetPlan, moment: Moment) -> Decision:
    """Hand out the bytes that a dataset was registered with."""
    dataset = state.dataset(request.dataset_id)
    return Decision(reply=messages.PlanBytes(plan=b""), plan_to_send=dataset.plan)


def register_worker(
    state: DispatcherState, request: messages.RegisterWorker, moment: Moment
) -> Decision:
    """Let a worker in and give it a task of every unfinished iteration.

    A worker that was started anew at the address of an earlier one proves that that one is gone.
    """
    if not request.worker_id or not request.address:
        raise ValueError(
            f"a worker needs an id and an address; got worker_id={request.worker_id!r}, "
            f"address={request.address!r}"
        )
    reply = messages.WorkerRegistered(heartbeat_interval=moment.limits.heartbeat_interval)
    registered = updates.WorkerRegistered(
        worker_id=request.worker_id, address=request.address, tags=request.tags
    )
    known = state.workers.get(request.worker_id)
    if known is not None and known.address == request.address:
        return Decision(updates=() if known.tags == request.tags else (registered,), reply=reply)
    replaced = {request.worker_id, state.addresses.get(request.address, request.worker_id)}
    facts = lose_workers(state, replaced & state.workers.keys())
    over = {fact.iteration_id for fact in facts if isinstance(fact, updates.IterationFinished)}
    unfinished = [
        iteration_id
        for iteration_id, iteration in state.iterations.items()
        if not iteration.finished and iteration_id not in over
    ]
    facts.append(registered)
    facts += [
        updates.TaskCreated(task_id=task_id, iteration_id=iteration_id, worker_id=request.worker_id)
        for task_id, iteration_id in enumerate(unfinished, start=state.next_task)
    ]
    return Decision(updates=tuple(facts), reply=reply)
