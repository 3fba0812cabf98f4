"""Deciders: datasets and workers become known."""

from __future__ import annotations

from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import messages
from headrace.service.config import check_reachable
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.plans import check_digest
from headrace.service.dispatcher.state import Dataset, DispatcherState
from headrace.service.dispatcher.updates import Update

__all__ = [
    "get_dataset",
    "ping",
    "register_dataset",
    "register_worker",
]

_INFINITE = -1
_MOST_POSITIONS = 1 << 60


def ping(state: DispatcherState, request: messages.Ping, moment: Moment) -> Decision:
    """Say that somebody is there."""
    return Decision()


def register_dataset(
    state: DispatcherState, request: messages.RegisterDataset, moment: Moment
) -> Decision:
    """Make a dataset known under the id asked for, or under the next free number.

    Where its plan is not stored, nothing is registered and the reply asks for the plan.

    Raises:
        AlreadyExistsError: The id asked for belongs to a dataset that differs.
        ValueError: The request makes no sense.
    """
    repeated = state.tokens.get(request.token)
    if repeated is not None:
        return Decision(reply=messages.DatasetRegistered(dataset_id=repeated))
    check_digest(request.digest)
    positions = request.positions
    if positions is not None and not _INFINITE <= positions <= _MOST_POSITIONS:
        raise ValueError(f"positions={positions} must be None, {_INFINITE} (infinite) or a number")
    dataset_id = request.dataset_id or str(state.next_dataset)
    known = state.datasets.get(dataset_id)
    if known is not None:
        _check_equal(known, request)
        kept = known.anonymous and not request.anonymous
        return Decision(
            updates=(updates.DatasetKept(dataset_id=dataset_id),) if kept else (),
            reply=messages.DatasetRegistered(dataset_id=dataset_id),
        )
    if request.digest not in state.plans:
        return Decision(reply=messages.DatasetRegistered(dataset_id="", wanted=True))
    registered = updates.DatasetRegistered(
        dataset_id=dataset_id,
        token=request.token,
        digest=request.digest,
        fingerprint=request.fingerprint,
        element_spec=request.element_spec,
        cardinality=request.cardinality,
        positions=request.positions,
        compression=request.compression,
        anonymous=request.anonymous,
    )
    return Decision(updates=(registered,), reply=messages.DatasetRegistered(dataset_id=dataset_id))


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
    """Say what is known of a dataset."""
    dataset = state.dataset(request.dataset_id)
    return Decision(
        reply=messages.DatasetDescription(
            dataset_id=dataset.dataset_id,
            digest=dataset.digest,
            fingerprint=dataset.fingerprint,
            element_spec=dataset.element_spec,
            cardinality=dataset.cardinality,
            positions=dataset.positions,
            compression=dataset.compression,
        )
    )


def register_worker(
    state: DispatcherState, request: messages.RegisterWorker, moment: Moment
) -> Decision:
    """Let a worker in; it gets a task of every unfinished iteration.

    A worker that starts at the address of an earlier one proves that the earlier one is gone.

    Raises:
        FailedPreconditionError: It has left: the request was late.
        ValueError: Nobody could reach it at this address.
    """
    if request.worker_id in moment.presence.left:
        raise FailedPreconditionError(
            f"worker {request.worker_id} has left; a worker that comes again needs a new id"
        )
    if not request.worker_id:
        raise ValueError("a worker needs an id; got worker_id=''")
    try:
        check_reachable(request.address)
    except ValueError as error:
        raise ValueError(
            f"the worker cannot be registered, for no client could read from it: {error}"
        ) from None
    reply = messages.WorkerRegistered(
        heartbeat_interval=moment.limits.heartbeat_interval, incarnation=state.incarnation
    )
    registered = updates.WorkerRegistered(
        worker_id=request.worker_id, address=request.address, tags=request.tags
    )
    known = state.workers.get(request.worker_id)
    if known is not None and known.address == request.address:
        return Decision(updates=() if known.tags == request.tags else (registered,), reply=reply)
    replaced = {request.worker_id, state.addresses.get(request.address, request.worker_id)}
    facts: list[Update] = [
        updates.WorkerLost(worker_id=each, reason="another worker began at its address")
        for each in sorted(replaced & state.workers.keys())
    ]
    return Decision(updates=(*facts, registered), reply=reply)
