"""Registering a dataset with a service: what is said of it, and its plan, part by part."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

from headrace.data.dataset import Dataset
from headrace.element.spec import encode_spec
from headrace.errors import UnavailableError
from headrace.plan import traverse
from headrace.plan.fingerprint import fingerprint_with_steps
from headrace.plan.node import Node
from headrace.plan.serialize import load_plan
from headrace.rewrites.normal import normalize
from headrace.rewrites.positions import deal_of
from headrace.service.by_value import checked_modules, dump_with
from headrace.service.client.visits import has_origins
from headrace.service.config import parse_service
from headrace.service.messages import PLAN_CHUNK_BYTES, GetPlan, PutPlan, RegisterDataset
from headrace.service.stub import DispatcherStub
from headrace.serving.call import Question
from headrace.transport.security import Security, check_security
from headrace.versions import own_versions, release_mismatch
from headrace.waiting import retry

__all__ = ["ask", "check_compression", "register_dataset", "registered", "registered_plan"]

_log = logging.getLogger(__name__)

A = TypeVar("A")

_COMPRESSIONS = ("AUTO", None)
_DEADLINE = 60.0
_CALL_SECONDS = 5.0
_LARGE_PLAN_BYTES = 64 << 20
_MOST_TIMES_WANTED = 5


def register_dataset(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
    *,
    modules: Sequence[ModuleType | str] = (),
    security: Security | None = None,
) -> str:
    """Make a dataset known to a service; return its id, for `from_dataset_id`.

    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     hr.service.register_dataset(cluster.target, hr.Dataset.range(3), dataset_id="numbers")
    'numbers'

    Args:
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port").
        dataset: What to register. Its functions travel with it, by value.
        compression: As in `distribute`, for all who read it.
        dataset_id: The id to give it; None or "": the dispatcher chooses one.
        modules: As in `distribute`.
        security: Keys of this client, for a service that asks for them.

    Raises:
        TypeError, ValueError: An argument is wrong.
        AlreadyExistsError: The id names a dataset of another structure.
        FailedPreconditionError: Something in the dataset cannot be pickled.
        UnavailableError: The dispatcher did not answer for a minute.
    """
    travelling = checked_modules(modules)
    return registered(
        service, dataset, compression, dataset_id, security, modules=travelling, anonymous=False
    )


def registered(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: str | None,
    dataset_id: str | None,
    security: Security | None,
    *,
    modules: Sequence[ModuleType] = (),
    anonymous: bool,
) -> str:
    """Register a dataset; return its id. Arguments as in `register_dataset`.

    Args:
        service: The dispatcher.
        dataset: What to register.
        compression: "AUTO" or None.
        dataset_id: The id to give it, or None.
        security: Keys of this client.
        modules: Those that travel with it.
        anonymous: Nobody is given the id to keep.
    """
    address = parse_service(service)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` must be a Dataset, but got {dataset!r}")
    check_compression(compression)
    check_security(security)
    if dataset_id is not None and not isinstance(dataset_id, str):
        raise TypeError(f"`dataset_id` must be a string, but got {dataset_id!r}")
    plan = dataset.plan
    spec = traverse.element_spec(plan)
    data = dump_with(modules, plan)
    if len(data) > _LARGE_PLAN_BYTES:
        _log.warning(
            "this dataset is %d MB to send to workers, because it holds its data: read files on "
            "the workers instead, or expect each worker to hold a copy",
            len(data) >> 20,
        )
    deal = deal_of(normalize(plan).plan)
    whole, steps = fingerprint_with_steps(plan)
    message = RegisterDataset(
        token=uuid.uuid4().hex,
        digest=hashlib.sha256(data).digest(),
        fingerprint=whole,
        # Empty where only running can tell: that is for the workers, not for this process.
        element_spec=b"" if spec is None else encode_spec(spec),
        cardinality=traverse.cardinality(plan),
        num_splits=None if deal is None else deal.size,
        compression=compression,
        dataset_id=dataset_id or None,
        anonymous=anonymous,
        has_element_ids=has_origins(plan),
        steps=steps,
    )
    return _register(address, security, message, data)


def _register(
    address: str, security: Security | None, message: RegisterDataset, data: bytes
) -> str:
    """Register, after putting the plan if the dispatcher does not have it; return the id."""
    for _ in range(_MOST_TIMES_WANTED):
        registered = ask(address, security, message)
        if not registered.plan_needed:
            if release_mismatch(registered.versions, mine := own_versions()):
                _log.warning(
                    "this client runs %s, and the dispatcher at %s %s: the same release "
                    "everywhere is tested",
                    mine,
                    address,
                    registered.versions,
                )
            return registered.dataset_id
        _put_plan(address, security, message.digest, data)
    raise UnavailableError(
        f"the dispatcher at {address} forgets the dataset's plan as often as it is sent: is it "
        "restarted again and again?"
    )


def _put_plan(address: str, security: Security | None, digest: bytes, data: bytes) -> None:
    offset = 0
    while offset < len(data):
        part = data[offset : offset + PLAN_CHUNK_BYTES]
        put = PutPlan(digest=digest, offset=offset, total_bytes=len(data), chunk=part)
        offset = ask(address, security, put).received_bytes


def registered_plan(address: str, security: Security | None, digest: bytes) -> Node:
    """Return the plan that has been registered with a digest."""
    data = bytearray()
    while True:
        got = ask(address, security, GetPlan(digest=digest, offset=len(data)))
        data += got.chunk
        if len(data) >= got.total_bytes:
            return load_plan(bytes(data))


def check_compression(compression: object) -> None:
    """Raise ValueError unless it is "AUTO" or None."""
    if compression not in _COMPRESSIONS:
        raise ValueError(
            f"Invalid `compression` argument: {compression}. Must be one of {list(_COMPRESSIONS)}."
        )


def ask(address: str, security: Security | None, question: Question[A]) -> A:
    """Ask the dispatcher, which is waited for; return the answer."""
    with DispatcherStub(address, security=security) as stub:
        return retry(
            lambda timeout: stub.call(question, timeout=timeout),
            deadline=_DEADLINE,
            whom=f"the dispatcher at {address}",
            attempt_timeout=_CALL_SECONDS,
            warn=_log.warning,
        )
