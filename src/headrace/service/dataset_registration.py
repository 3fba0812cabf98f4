"""Registration of a dataset with a service: sends its properties, and its plan in parts."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar

from headrace.argument_names import explain_unknown_arguments
from headrace.data.dataset import Dataset
from headrace.element.spec import encode_spec
from headrace.errors import UnavailableError
from headrace.execution.step_registry import name_step
from headrace.plan import traverse
from headrace.plan.fingerprint import fingerprint_with_steps
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.serialize import load_plan
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.process_pools import inline_pools
from headrace.rewrites.split_space import compute_split_space
from headrace.service.by_value import check_modules, dump_with
from headrace.service.client.visitation import has_element_ids
from headrace.service.config import parse_service
from headrace.service.messages import (
    MAX_PLAN_STEPS,
    MAX_STEP_NAME,
    PLAN_CHUNK_BYTES,
    GetPlan,
    PlanStep,
    PutPlan,
    RegisterDataset,
)
from headrace.service.stub import DispatcherStub
from headrace.serving.rpc import TypedRequest
from headrace.transport.security import Security, check_security
from headrace.versions import own_versions, release_mismatch
from headrace.waiting import retry

__all__ = [
    "call_dispatcher",
    "check_compression",
    "fetch_plan",
    "register_dataset",
    "register_with_service",
    "without_process_sources",
]

_log = logging.getLogger(__name__)

A = TypeVar("A")

_COMPRESSIONS = ("AUTO", None)
_CALL_SECONDS = 60.0
"""Seconds to wait for the dispatcher, over all attempts."""
_ATTEMPT_SECONDS = 5.0
_LARGE_PLAN_BYTES = 64 << 20
_MAX_UPLOADS = 5


@explain_unknown_arguments
def register_dataset(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: Literal["AUTO"] | None = "AUTO",
    dataset_id: str | None = None,
    *,
    modules: Sequence[ModuleType | str] = (),
    security: Security | None = None,
) -> str:
    """Register a dataset with a service; return its ID, for `from_dataset_id`.

    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     hr.service.register_dataset(cluster.target, hr.Dataset.range(3), dataset_id="numbers")
    'numbers'

    Args:
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port").
        dataset: The dataset. Its functions are sent with it, by value.
        compression: As in `distribute`, for all readers.
        dataset_id: ID of the dataset; None or "" lets the dispatcher choose one.
        modules: As in `distribute`.
        security: Keys of this client, for a service that requires them.

    Raises:
        TypeError, ValueError: If an argument is invalid.
        AlreadyExistsError: If the ID belongs to another dataset.
        FailedPreconditionError: If something in the dataset cannot be pickled.
        UnavailableError: If the dispatcher did not reply for a minute.
    """
    sent_modules = check_modules(modules)
    return register_with_service(
        service, dataset, compression, dataset_id, security, modules=sent_modules, anonymous=False
    )


def register_with_service(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: str | None,
    dataset_id: str | None,
    security: Security | None,
    *,
    modules: Sequence[ModuleType] = (),
    anonymous: bool,
) -> str:
    """Register a dataset; return its ID. See `register_dataset`.

    Args:
        service: The dispatcher.
        dataset: The dataset.
        compression: "AUTO" or None.
        dataset_id: ID of the dataset, or None.
        security: Keys of this client.
        modules: Modules that are sent with it.
        anonymous: Whether the ID is not given to the user.
    """
    address = parse_service(service)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` must be a Dataset, but got {dataset!r}")
    check_compression(compression)
    check_security(security)
    if dataset_id is not None and not isinstance(dataset_id, str):
        raise TypeError(f"`dataset_id` must be a string, but got {dataset_id!r}")
    plan = inline_pools(dataset.plan)
    spec = traverse.element_spec(plan)
    data = dump_with(modules, plan)
    if len(data) > _LARGE_PLAN_BYTES:
        _log.warning(
            "this dataset contains %d MB of data, which are sent to each worker: read files on the "
            "workers instead, or provide memory for a copy on each worker",
            len(data) >> 20,
        )
    executed = canonicalize(plan).plan
    split_space = compute_split_space(executed)
    fingerprint, steps = fingerprint_with_steps(plan)
    message = RegisterDataset(
        token=uuid.uuid4().hex,
        digest=hashlib.sha256(data).digest(),
        fingerprint=fingerprint,
        # Empty if only execution can determine it.
        element_spec=b"" if spec is None else encode_spec(spec),
        cardinality=traverse.cardinality(plan),
        num_splits=None if split_space is None else split_space.size,
        compression=compression,
        dataset_id=dataset_id or None,
        anonymous=anonymous,
        has_element_ids=has_element_ids(plan),
        steps=steps,
        plan_steps=_plan_steps(executed),
    )
    return _register(address, security, message, data)


def _plan_steps(plan: Node) -> tuple[PlanStep, ...]:
    """Return the names and inputs of the steps of a plan; empty if there are too many."""
    nodes = distinct_nodes([plan])
    if len(nodes) > MAX_PLAN_STEPS:
        return ()
    numbers = {id(node): number for number, node in enumerate(nodes)}
    return tuple(
        PlanStep(name_step(node)[:MAX_STEP_NAME], tuple(numbers[id(each)] for each in node.inputs))
        for node in nodes
    )


def without_process_sources(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return the dataset without `in_processes`, which workers of a service ignore."""
    plan = inline_pools(dataset.plan)
    return dataset if plan is dataset.plan else Dataset(plan)


def _register(
    address: str, security: Security | None, message: RegisterDataset, data: bytes
) -> str:
    """Register the dataset, after sending the plan if the dispatcher needs it; return the ID."""
    for _ in range(_MAX_UPLOADS):
        registered = call_dispatcher(address, security, message)
        if not registered.plan_needed:
            if release_mismatch(registered.versions, own := own_versions()):
                _log.warning(
                    "this client runs %s, but the dispatcher at %s runs %s; use one release "
                    "after an upgrade",
                    own,
                    address,
                    registered.versions,
                )
            return registered.dataset_id
        _put_plan(address, security, message.digest, data)
    raise UnavailableError(
        f"the dispatcher at {address} lost the plan of the dataset after each of {_MAX_UPLOADS} "
        "uploads; is it being restarted repeatedly?"
    )


def _put_plan(address: str, security: Security | None, digest: bytes, data: bytes) -> None:
    offset = 0
    while offset < len(data):
        chunk = data[offset : offset + PLAN_CHUNK_BYTES]
        request = PutPlan(digest=digest, offset=offset, total_bytes=len(data), chunk=chunk)
        offset = call_dispatcher(address, security, request).received_bytes


def fetch_plan(address: str, security: Security | None, digest: bytes) -> Node:
    """Return the registered plan with this digest."""
    data = bytearray()
    while True:
        reply = call_dispatcher(address, security, GetPlan(digest=digest, offset=len(data)))
        data += reply.chunk
        if len(data) >= reply.total_bytes:
            return load_plan(bytes(data))


def check_compression(compression: object) -> None:
    """Raise ValueError unless it is "AUTO" or None."""
    if compression not in _COMPRESSIONS:
        raise ValueError(
            f"Invalid `compression` argument: {compression}. Must be one of {list(_COMPRESSIONS)}."
        )


def call_dispatcher(address: str, security: Security | None, request: TypedRequest[A]) -> A:
    """Call the dispatcher, retrying for up to a minute if it does not reply; return the reply."""
    with DispatcherStub(address, security=security) as stub:
        return retry(
            lambda timeout: stub.call(request, timeout=timeout),
            deadline=_CALL_SECONDS,
            peer=f"the dispatcher at {address}",
            attempt_timeout=_ATTEMPT_SECONDS,
            warn=_log.warning,
        )
