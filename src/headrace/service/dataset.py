"""Where the service touches a Dataset: to register one, to read one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

from headrace.data.dataset import Dataset
from headrace.element.spec import Spec, decode_spec, encode_spec, relax
from headrace.errors import InvalidElementError, NotFoundError
from headrace.plan import traverse
from headrace.plan.elements import FromSource
from headrace.plan.fingerprint import fingerprint
from headrace.plan.serialize import dump_plan
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.splits import split_sizes
from headrace.service.client.source import RemoteSource
from headrace.service.config import (
    TRANSFER_PROTOCOLS,
    ShardingPolicy,
    parse_processing_mode,
    parse_service,
)
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import GetDataset, RegisterDataset
from headrace.transport.retry import RetryPolicy, retry
from headrace.transport.security import Security

__all__ = ["delivery_report", "distribute", "from_dataset_id", "register_dataset"]

T = TypeVar("T")

_MAX_OUTSTANDING_REQUESTS = 16
_AUTOTUNE = -1
_SUPPORTED_MODES = (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
_COMPRESSIONS = ("AUTO", None)
_TARGETS = ("AUTO", "ANY", "LOCAL")
_PATIENCE = RetryPolicy(deadline=60.0)
_CALL_SECONDS = 5.0


def distribute(
    processing_mode: ShardingPolicy | str,
    service: str | tuple[str, str],
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: object | None = None,
    target_workers: str = "AUTO",
    visitation: str | None = None,
    *,
    security: Security | None = None,
) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that moves a dataset's work to a data service.

    The dataset is registered when the function is applied; a dispatcher that is not there yet is
    waited for (a minute). Each iteration over the result is a repetition of the job.

    Args:
        processing_mode: `ShardingPolicy.OFF` (each worker produces the whole dataset) or `DYNAMIC`
            (each element once, by whichever worker asks; at most once when workers are lost). The
            names "parallel_epochs" and "distributed_epoch" mean the same.
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port").
        job_name: Readers with the same name share one job: each element goes to one of them.
        consumer_index: Coordinated reads; not supported by this version.
        num_consumers: Coordinated reads; not supported by this version.
        max_outstanding_requests: Requests and answers not used yet, over all workers; None: 16.
        data_transfer_protocol: "local" (workers in this process), "shm" (on this host), "tcp", or
            None: the first of these that works.
        compression: "AUTO" or None. AUTO compresses nothing in this version.
        cross_trainer_cache: Not supported by this version.
        target_workers: "AUTO" or "ANY": all workers; "LOCAL": those in this process.
        visitation: None, or with DYNAMIC "at_most_once", which is its default.
        security: Keys of this client, for a service that asks for them.

    Raises:
        TypeError, ValueError: An argument is wrong, or not supported by this version.
        FailedPreconditionError: (when applied) Something in the dataset cannot be pickled.
        UnavailableError: (when applied) The dispatcher did not answer for a minute.
    """
    build = _checked_build(
        processing_mode,
        service,
        job_name=job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        max_outstanding_requests=max_outstanding_requests,
        data_transfer_protocol=data_transfer_protocol,
        cross_trainer_cache=cross_trainer_cache,
        target_workers=target_workers,
        visitation=visitation,
        security=security,
    )
    _check_compression(compression)

    def apply(dataset: Dataset) -> Dataset:
        dataset_id = register_dataset(service, dataset, compression, security=security)
        plan = dataset.plan
        return build(dataset_id, traverse.element_spec(plan), traverse.cardinality(plan), job_name)

    return apply


def register_dataset(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
    *,
    security: Security | None = None,
) -> str:
    """Make a dataset known to a service; return its id, for `from_dataset_id`.

    Args:
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port").
        dataset: What to register. Its functions travel with it, by value.
        compression: "AUTO" or None. AUTO compresses nothing in this version.
        dataset_id: The id to give it; None or "": the dispatcher chooses one.
        security: Keys of this client, for a service that asks for them.

    Raises:
        TypeError, ValueError: An argument is wrong.
        AlreadyExistsError: The id names a dataset of another structure.
        FailedPreconditionError: Something in the dataset cannot be pickled.
        UnavailableError: The dispatcher did not answer for a minute.
    """
    address = parse_service(service)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` must be a Dataset, but got {dataset!r}")
    _check_compression(compression)
    if dataset_id is not None and not isinstance(dataset_id, str):
        raise TypeError(f"`dataset_id` must be a string, but got {dataset_id!r}")
    plan = dataset.plan
    spec = traverse.element_spec(plan)
    message = RegisterDataset(
        token=uuid.uuid4().hex,
        plan=dump_plan(plan),
        fingerprint=fingerprint(plan),
        # Empty where only running can tell: that is for the workers, not for this process.
        element_spec=b"" if spec is None else encode_spec(spec),
        cardinality=traverse.cardinality(plan),
        split_sizes=split_sizes(plan),
        compression=compression,
        dataset_id=dataset_id or None,
    )
    registered = _patiently(
        address, security, lambda stub, timeout: stub.register_dataset(message, timeout=timeout)
    )
    return registered.dataset_id


def from_dataset_id(
    processing_mode: ShardingPolicy | str,
    service: str | tuple[str, str],
    dataset_id: str | bytes | int,
    element_spec: Spec | None = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: object | None = None,
    target_workers: str = "AUTO",
    *,
    security: Security | None = None,
) -> Dataset:
    """Return a dataset that reads what `register_dataset` registered.

    Args:
        processing_mode: As in `distribute`.
        service: As in `distribute`.
        dataset_id: What `register_dataset` returned.
        element_spec: Spec of its elements; None: the dispatcher knows.
        job_name: Readers of the same id with the same name share one job.
        consumer_index: Not supported by this version.
        num_consumers: Not supported by this version.
        max_outstanding_requests: As in `distribute`.
        data_transfer_protocol: As in `distribute`.
        cross_trainer_cache: Not supported by this version.
        target_workers: As in `distribute`.
        security: Keys of this client, for a service that asks for them.

    Raises:
        TypeError, ValueError: An argument is wrong, or not supported by this version.
        NotFoundError: No dataset was registered under this id.
        UnavailableError: The dispatcher did not answer for a minute.
    """
    build = _checked_build(
        processing_mode,
        service,
        job_name=job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        max_outstanding_requests=max_outstanding_requests,
        data_transfer_protocol=data_transfer_protocol,
        cross_trainer_cache=cross_trainer_cache,
        target_workers=target_workers,
        visitation=None,
        security=security,
    )
    name = _dataset_name(dataset_id)
    try:
        known = _patiently(
            parse_service(service),
            security,
            lambda stub, timeout: stub.get_dataset(GetDataset(dataset_id=name), timeout=timeout),
        )
    except NotFoundError as error:
        raise NotFoundError(
            f"Dataset id {name} not found. It must be registered with `register_dataset` before "
            "calling `from_dataset_id`."
        ) from error
    if known.element_spec:
        registered = decode_spec(known.element_spec)
        if element_spec is not None and not _covers(element_spec, registered):
            raise ValueError(
                f"`element_spec` is {element_spec!r}, but dataset {name} was registered with "
                f"{registered!r}; leave it out, or correct it"
            )
        element_spec = element_spec or registered
    scoped = None if job_name is None else f"dataset_id={name}/{job_name}"
    return build(name, element_spec, known.cardinality, scoped)


def delivery_report(dataset: Dataset) -> dict[str, int]:
    """Return how many elements each worker, by address, delivered in the latest iteration.

    Args:
        dataset: What `distribute` or `from_dataset_id` made, or a dataset built on that.
    """
    report: dict[str, int] = {}
    for node in traverse.walk(dataset.plan):
        if isinstance(node, FromSource) and isinstance(node.source, RemoteSource):
            for address, count in node.source.elements_by_worker().items():
                report[address] = report.get(address, 0) + count
    return report


def _covers(wide: Spec, narrow: Spec) -> bool:
    try:
        return bool(relax(narrow, wide) == wide)
    except InvalidElementError:
        return False


def _checked_build(
    processing_mode: object,
    service: object,
    *,
    job_name: object,
    consumer_index: object,
    num_consumers: object,
    max_outstanding_requests: object,
    data_transfer_protocol: object,
    cross_trainer_cache: object,
    target_workers: object,
    visitation: object,
    security: Security | None,
) -> Callable[[str, Spec | None, int, str | None], Dataset]:
    """Check what `distribute` and `from_dataset_id` share; return what builds the dataset."""
    mode = parse_processing_mode(processing_mode)
    address = parse_service(service)
    if mode not in _SUPPORTED_MODES:
        raise ValueError(
            f"processing_mode={mode.name} is not supported by this version; it supports OFF and "
            "DYNAMIC"
        )
    if job_name is not None and not isinstance(job_name, str):
        raise ValueError(
            f"`job_name` must be a string, but `job_name` was of type {type(job_name)}. "
            f"job_name={job_name!r}"
        )
    if job_name == "":
        raise ValueError("`job_name` must not be empty")
    _check_unsupported(consumer_index, num_consumers, job_name, cross_trainer_cache)
    _check_visitation(mode, visitation)
    credit = _checked_credit(max_outstanding_requests)
    if data_transfer_protocol is not None and data_transfer_protocol not in TRANSFER_PROTOCOLS:
        raise ValueError(
            f"`data_transfer_protocol` must be None or one of {list(TRANSFER_PROTOCOLS)}, but got "
            f"{data_transfer_protocol!r}"
        )
    if not isinstance(target_workers, str) or (target_workers.upper() or "AUTO") not in _TARGETS:
        raise ValueError(
            f"Unrecognized target workers: {target_workers!r}. Must be one of {list(_TARGETS)}."
        )
    target = target_workers.upper() or "AUTO"
    protocol = data_transfer_protocol

    def build(
        dataset_id: str, element_spec: Spec | None, cardinality: int, job: str | None
    ) -> Dataset:
        if cardinality not in (0, INFINITE):
            # How many workers there will be, and how many copies they make, nobody knows.
            cardinality = UNKNOWN
        source = RemoteSource(
            service=address,
            dataset_id=dataset_id,
            processing_mode=mode,
            cardinality=cardinality,
            job_name=job,
            max_outstanding_requests=credit,
            data_transfer_protocol=None if protocol is None else str(protocol),
            target_workers=target,
            security=security,
            element_spec=element_spec,
        )
        return Dataset.from_source(source)

    return build


def _check_unsupported(
    consumer_index: object, num_consumers: object, job_name: object, cross_trainer_cache: object
) -> None:
    if (consumer_index is None) != (num_consumers is None):
        raise ValueError(
            "`consumer_index` and `num_consumers` must be set together, but got "
            f"consumer_index={consumer_index!r} and num_consumers={num_consumers!r}"
        )
    if num_consumers is not None:
        if job_name is None:
            raise ValueError(
                "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
                f"{num_consumers!r}."
            )
        raise ValueError(
            f"coordinated reads (consumer_index={consumer_index!r}, num_consumers="
            f"{num_consumers!r}) are not supported by this version; without them, readers that "
            "share a `job_name` get their elements first come, first served"
        )
    if cross_trainer_cache is not None:
        raise ValueError(
            f"cross_trainer_cache={cross_trainer_cache!r} is not supported by this version; use "
            "None"
        )


def _check_visitation(mode: ShardingPolicy, visitation: object) -> None:
    own = {ShardingPolicy.DYNAMIC: ("at_most_once",)}.get(mode, ())
    if visitation is not None and visitation not in own:
        raise ValueError(
            f"visitation={visitation!r} is not supported with {mode.name} by this version; use "
            f"None{''.join(f' or {name!r}' for name in own)}"
        )


def _checked_credit(max_outstanding_requests: object) -> int:
    if max_outstanding_requests is None or max_outstanding_requests == _AUTOTUNE:
        return _MAX_OUTSTANDING_REQUESTS
    if isinstance(max_outstanding_requests, bool) or not isinstance(max_outstanding_requests, int):
        raise TypeError(
            "`max_outstanding_requests` must be an integer or None, but got "
            f"{max_outstanding_requests!r}"
        )
    if max_outstanding_requests < 1:
        raise ValueError(
            "`max_outstanding_requests` must be at least 1, or None, but got "
            f"{max_outstanding_requests}"
        )
    return max_outstanding_requests


def _check_compression(compression: object) -> None:
    if compression not in _COMPRESSIONS:
        raise ValueError(
            f"Invalid `compression` argument: {compression}. Must be one of {list(_COMPRESSIONS)}."
        )


def _dataset_name(dataset_id: object) -> str:
    if isinstance(dataset_id, bytes):
        return dataset_id.decode()
    if isinstance(dataset_id, bool) or not isinstance(dataset_id, str | int):
        raise TypeError(f"`dataset_id` must be a string, but got {dataset_id!r}")
    if dataset_id == "":
        raise ValueError("`dataset_id` must not be empty")
    return str(dataset_id)


def _patiently(
    address: str, security: Security | None, ask: Callable[[DispatcherStub, float], T]
) -> T:
    with DispatcherStub(address, security=security) as stub:
        return retry(
            lambda timeout: ask(stub, timeout),
            _PATIENCE,
            whom=f"the dispatcher at {address}",
            attempt_timeout=_CALL_SECONDS,
        )
