"""Datasets that are read through a data service."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar, overload

from headrace.argument_names import explain_unknown_arguments
from headrace.data.dataset import Dataset
from headrace.element.spec import ArraySpec, Spec, decode_spec, relax
from headrace.element.structure import flatten
from headrace.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidElementError,
    NotFoundError,
)
from headrace.plan import traverse
from headrace.plan.determinism import collect_default_seeds, derive_seeds
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.sliding_windows import refuse_windows
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.user_function import step_name
from headrace.rewrites.optimize import proved_spec
from headrace.rewrites.partition import PlanPartition
from headrace.service.by_value import check_modules, pickling_by_value
from headrace.service.client.exhausted_jobs import ExhaustedJobCheck
from headrace.service.client.options import ReadOptions, make_read_options
from headrace.service.client.source import RemoteSource
from headrace.service.client.visitation import (
    find_exclusive_reason,
    is_partitioned,
    partition_for,
    with_visitation,
)
from headrace.service.config import (
    CrossTrainerCache,
    DataLossAction,
    ProcessingMode,
    Remainder,
    ShardingPolicy,
    TargetWorkers,
    TransferProtocol,
    Visitation,
    parse_service,
)
from headrace.service.dataset_registration import (
    call_dispatcher,
    check_compression,
    fetch_plan,
    register_with_service,
    without_process_sources,
)
from headrace.service.messages import GetDataset
from headrace.service.modes.ordered.consumer_options import consumer_spec
from headrace.service.modes.ordered.ordered_consumers import (
    OrderedConsumerSource,
    make_consumer_source,
)
from headrace.service.modes.ordered.ordered_partition import OrderedPartition
from headrace.transport.security import Security

__all__ = ["delivery_report", "distribute", "from_dataset_id"]

S = TypeVar("S")


class DistributeFunction(Protocol):
    """Function that `distribute` returns, for `Dataset.apply`."""

    @overload
    def __call__(self, pipeline: Dataset[S], /) -> Dataset[S]: ...

    @overload
    def __call__(self, pipeline: Any, /) -> Dataset[Any]: ...


@explain_unknown_arguments
def distribute(
    processing_mode: ProcessingMode,
    service: str | tuple[str, str],
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: TransferProtocol | None = None,
    compression: Literal["AUTO"] | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: TargetWorkers = "AUTO",
    visitation: Visitation | None = None,
    *,
    ordered: bool = False,
    remainder: Remainder = "drop",
    cost_fn: Callable[..., object] | None = None,
    readers_per_consumer: int | None = None,
    reader_index: int | None = None,
    modules: Sequence[ModuleType | str] = (),
    wait_timeout: float = 3600.0,
    security: Security | None = None,
    on_data_loss: DataLossAction = "error",
) -> DistributeFunction:
    """Return a function for `Dataset.apply` that moves a dataset's work to a data service.

    The function also accepts the inputs of `Dataset.from_pipeline`, such as a torch DataLoader.

    The dataset is registered when the function is applied, which waits up to a minute for the
    dispatcher. Each iteration over the result, or over a dataset derived from it, is the next
    iteration of the job.

    >>> with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    ...     dataset = hr.Dataset.range(6).map(lambda x: x * x).apply(
    ...         hr.service.distribute("distributed_epoch", cluster.target, ordered=True)
    ...     )
    ...     [int(x) for x in dataset]
    [0, 1, 4, 9, 16, 25]

    Args:
        processing_mode: `ShardingPolicy.OFF` (each worker produces the whole dataset), `DYNAMIC`
            (each element once, by any worker), or one of FILE, DATA, FILE_OR_DATA and HINT (each
            worker of the dispatcher's fixed list produces its shard; at least once when workers are
            lost). The names "parallel_epochs" and "distributed_epoch" mean OFF and DYNAMIC.
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port").
        job_name: Readers with the same name share one job: each element is delivered to one of
            them.
        consumer_index: Index of this consumer, from 0. All consumers of a job read in rounds: in
            each round, every consumer receives one element of the same worker; with `ordered`,
            consumer i of n receives elements i, i + n, ... of that order.
        num_consumers: Number of consumers of the job. Requires a `job_name`.
        max_outstanding_requests: Maximum number of elements, over all workers, that are requested,
            being produced, in flight or not consumed yet; None limits buffered elements by bytes.
        data_transfer_protocol: "local" (workers in this process), "shm" (on this host), "tcp", or
            None for the first of these that works.
        compression: "AUTO" compresses elements from other machines if measurements show that this
            is faster; None disables compression.
        cross_trainer_cache: Identifies this trainer. Several trainers of one job then each read
            all its elements, and workers produce each element once. Requires an infinite dataset.
        target_workers: "ANY" for all workers; "LOCAL" for those in this process; "AUTO" for all
            except those of other processes with the tag "COLOCATED", and with static sharding only
            those in this process, if there are any.
        visitation: Delivery guarantee when workers or clients are lost; None for the default of the
            mode. DYNAMIC supports "exactly_once" (the default: undelivered elements are recomputed,
            and each element is delivered once to the remaining clients) and "at_most_once" (partly
            delivered splits are lost and reported). Exactly once requires functions that return the
            same number of elements for the same input. Static sharding supports only
            "at_least_once", and OFF nothing: a lost copy ends where it is.
        ordered: Whether elements are delivered in the order of a single process, even if workers
            join, leave or die. Requires DYNAMIC and exactly once. Such a job has one client, or
            `num_consumers`, each reading its elements. Workers run the steps that can run split by
            split, and this process runs the rest and buffers elements that arrive ahead of their
            turn. If the partition depends on the size of elements that only functions can
            determine, a few elements are computed in this process when reading begins.
        remainder: Handling of elements at the end that are too few for a round of all consumers:
            "drop" (they are dropped), "pad" (the other consumers receive batches without rows) or
            "end_together" (their rows are shared evenly).
        cost_fn: Returns the cost of a row, such as its length. The rows of a round's batches are
            then shared so that consumers have equally many rows at similar costs. Runs on workers;
            with `ordered` in each consumer, for all rows of a round.
        readers_per_consumer: Number of processes that each read all elements of the same consumer
            in the same order, such as the ranks that share a model replica. Requires `ordered`.
        reader_index: Index of this process among them, from 0.
        modules: Modules, or their names, that are sent with the dataset, so that workers need not
            have them. A package includes everything in it. Other modules are referenced by name.
        wait_timeout: Seconds without a live worker that could deliver, or without a dispatcher when
            an epoch begins, after which reading raises UnavailableError; with several consumers,
            also seconds of a wait for one of them, after which it raises DeadlineExceededError. A
            slow but live worker causes no timeout: a wait of ten seconds is logged with its reason.
        security: Keys of this client, for a service that requires them.
        on_data_loss: Action if DYNAMIC with exactly once cannot deliver all elements, for example
            because a function kills every worker that computes one of them. "error": the iterator
            raises DataLossError after the last element, with the missing ones; "warn": a warning is
            logged. With weaker guarantees, it is always a warning.

    Raises:
        TypeError, ValueError: If an argument is invalid or not supported by this version.
        FailedPreconditionError: When applied, if something in the dataset cannot be pickled.
        UnavailableError: When applied, if the dispatcher did not reply for a minute.
    """
    if isinstance(processing_mode, Dataset):
        raise TypeError(
            "`distribute` does not take a dataset; pass its result to `Dataset.apply`: "
            'dataset.apply(hr.service.distribute("distributed_epoch", "host:port"))'
        )
    sent_modules = check_modules(modules)
    with pickling_by_value(sent_modules):  # the cost function is sent, too
        options = make_read_options(
            processing_mode=processing_mode,
            service=service,
            job_name=job_name,
            consumer_index=consumer_index,
            num_consumers=num_consumers,
            max_outstanding_requests=max_outstanding_requests,
            data_transfer_protocol=data_transfer_protocol,
            cross_trainer_cache=cross_trainer_cache,
            target_workers=target_workers,
            visitation=visitation,
            ordered=ordered,
            remainder=remainder,
            cost_fn=cost_fn,
            readers_per_consumer=readers_per_consumer,
            reader_index=reader_index,
            wait_timeout=wait_timeout,
            security=security,
            on_data_loss=on_data_loss,
        )
    check_compression(compression)

    def apply(pipeline: Any) -> Dataset:
        dataset = without_process_sources(Dataset.from_pipeline(pipeline))
        if options.processing_mode is ShardingPolicy.DYNAMIC:
            _check_not_distributed(dataset)
            _check_dynamic_steps(options, dataset.plan)
        refuse_windows(dataset.plan, "`distribute`")
        _check_infinite(options, traverse.cardinality(dataset.plan))
        if options.ordered and options.num_consumers is not None:
            return _make_consumer_dataset(options, dataset.plan, compression, sent_modules)
        partition = partition_for(dataset.plan, options)
        dataset_id = register_with_service(
            service, dataset, compression, None, security, modules=sent_modules, anonymous=True
        )
        plan = dataset.plan
        spec, size = proved_spec(plan), traverse.cardinality(plan)
        return _make_reading_dataset(
            options, dataset_id, spec, size, job_name, compression, plan, partition
        )

    return apply


@explain_unknown_arguments
def from_dataset_id(
    processing_mode: ProcessingMode,
    service: str | tuple[str, str],
    dataset_id: str | bytes | int,
    element_spec: Spec | None = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: TransferProtocol | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: TargetWorkers = "AUTO",
    visitation: Visitation | None = None,
    *,
    ordered: bool = False,
    remainder: Remainder = "drop",
    cost_fn: Callable[..., object] | None = None,
    readers_per_consumer: int | None = None,
    reader_index: int | None = None,
    modules: Sequence[ModuleType | str] = (),
    wait_timeout: float = 3600.0,
    security: Security | None = None,
    on_data_loss: DataLossAction = "error",
) -> Dataset:
    """Return a dataset that reads a dataset registered by `register_dataset`.

    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     dataset_id = hr.service.register_dataset(cluster.target, hr.Dataset.range(3))
    ...     dataset = hr.service.from_dataset_id("parallel_epochs", cluster.target, dataset_id)
    ...     [int(x) for x in dataset]
    [0, 1, 2]

    Args:
        processing_mode: As in `distribute`.
        service: As in `distribute`.
        dataset_id: Result of `register_dataset`.
        element_spec: Spec of the elements; None uses the dispatcher's.
        job_name: Readers of the same dataset ID with the same name share one job.
        consumer_index: As in `distribute`.
        num_consumers: As in `distribute`.
        max_outstanding_requests: As in `distribute`.
        data_transfer_protocol: As in `distribute`.
        cross_trainer_cache: As in `distribute`.
        target_workers: As in `distribute`.
        remainder: As in `distribute`.
        cost_fn: As in `distribute`.
        readers_per_consumer: As in `distribute`.
        reader_index: As in `distribute`.
        visitation: As in `distribute`.
        ordered: As in `distribute`.
        modules: Modules of functions given here; those of the dataset are sent when it is
            registered.
        wait_timeout: As in `distribute`.
        security: Keys of this client, for a service that requires them.
        on_data_loss: As in `distribute`.

    Raises:
        TypeError, ValueError: If an argument is invalid or not supported by this version.
        NotFoundError: If no dataset is registered under this ID.
        UnavailableError: If the dispatcher did not reply for a minute.
    """
    with pickling_by_value(check_modules(modules)):
        options = make_read_options(
            processing_mode=processing_mode,
            service=service,
            job_name=job_name,
            consumer_index=consumer_index,
            num_consumers=num_consumers,
            max_outstanding_requests=max_outstanding_requests,
            data_transfer_protocol=data_transfer_protocol,
            cross_trainer_cache=cross_trainer_cache,
            target_workers=target_workers,
            remainder=remainder,
            cost_fn=cost_fn,
            readers_per_consumer=readers_per_consumer,
            reader_index=reader_index,
            visitation=visitation,
            ordered=ordered,
            wait_timeout=wait_timeout,
            security=security,
            on_data_loss=on_data_loss,
        )
    if element_spec is not None:
        _check_spec(element_spec)
    name = _normalize_dataset_id(dataset_id)
    try:
        known = call_dispatcher(parse_service(service), security, GetDataset(dataset_id=name))
    except NotFoundError as error:
        raise NotFoundError(
            f"Dataset id {name} not found. It must be registered with `register_dataset` before "
            "calling `from_dataset_id`."
        ) from error
    if known.element_spec:
        registered = decode_spec(known.element_spec)
        if element_spec is not None and not _covers(element_spec, registered):
            raise ValueError(
                f"`element_spec` {element_spec!r} does not match the spec that dataset {name} was "
                f"registered with, {registered!r}; correct it or leave it out"
            )
        element_spec = element_spec or registered
    _check_infinite(options, known.cardinality)
    scoped_name = None if job_name is None else f"dataset_id={name}/{job_name}"
    if options.ordered and options.num_consumers is not None:
        consumer_plan = fetch_plan(parse_service(service), security, known.digest)
        options = dataclasses.replace(options, job_name=scoped_name)
        return _make_consumer_dataset(
            options, consumer_plan, known.compression, check_modules(modules)
        )
    plan, partition = None, None
    if (
        is_partitioned(options)
        and known.num_splits is not None
        and (options.ordered or not known.has_element_ids)
    ):
        plan = fetch_plan(parse_service(service), security, known.digest)
        partition = partition_for(plan, options)
    return _make_reading_dataset(
        options,
        name,
        element_spec,
        known.cardinality,
        scoped_name,
        known.compression,
        plan,
        partition,
    )


def delivery_report(dataset: Dataset) -> dict[str, int]:
    """Return how many elements each worker, by address, delivered in the latest iteration.

    Empty for a dataset that reads no service, and before its first iteration.

    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     dataset = hr.Dataset.range(100).apply(
    ...         hr.service.distribute("distributed_epoch", cluster.target)
    ...     )
    ...     elements = list(dataset)
    ...     list(hr.service.delivery_report(dataset).values())
    [100]

    Args:
        dataset: Result of `distribute` or `from_dataset_id`, or a dataset derived from it.
    """
    report: dict[str, int] = {}
    for node in traverse.walk(dataset.plan):
        if isinstance(node, FromSource) and isinstance(node.source, RemoteSource):
            for address, count in node.source.elements_by_worker().items():
                report[address] = report.get(address, 0) + count
    return report


def _covers(general: Spec, specific: Spec) -> bool:
    try:
        return bool(relax(specific, general) == general)
    except InvalidElementError:
        return False


def _make_reading_dataset(
    options: ReadOptions,
    dataset_id: str,
    element_spec: Spec | None,
    cardinality: int,
    job_name: str | None,
    compression: str | None,
    plan: Node | None,
    partition: PlanPartition | None,
) -> Dataset:
    """Return a dataset that reads a registered dataset.

    Args:
        options: Reading options.
        dataset_id: ID of the dataset.
        element_spec: Spec of its elements, if known.
        cardinality: Number of its elements.
        job_name: Job whose iterations to share.
        compression: "AUTO", or None.
        plan: The registered plan, if a part of it runs here.
        partition: Partition of the plan; None if workers run all of it.
    """
    is_ordered = partition is not None and partition.is_ordered
    # The number of workers, and so of copies of the dataset, is unknown.
    is_known = is_ordered or cardinality in _preserved_cardinalities(options.processing_mode)
    remote_plan = plan if partition is not None or is_partitioned(options) else None
    fixed_seeds: list[int] = []
    if remote_plan is not None:
        # Each reader of a job may have drawn different seeds; they share only the job's name.
        fixed_seeds = (
            collect_default_seeds(remote_plan)
            if job_name is None
            else derive_seeds(remote_plan, job_name)
        )
    counter = None if job_name is None else IterationCounter()
    source = RemoteSource(
        options=with_visitation(options),
        dataset_id=dataset_id,
        cardinality=cardinality if is_known else UNKNOWN,
        job_name=job_name,
        spec=consumer_spec(element_spec, options.remainder),
        compression=compression,
        partition_mode="" if partition is None else partition.mode,
        num_splits=None if partition is None else partition.num_splits,
        exclusive_reason="" if partition is None else find_exclusive_reason(partition),
        remote_plan=remote_plan,
        ordered_partition=None if remote_plan is None else OrderedPartition(remote_plan),
        fixed_seeds=tuple(fixed_seeds),
        _counter=counter,
        _job_check=ExhaustedJobCheck(counter),
    )
    return Dataset.from_source(source)


def _make_consumer_dataset(
    options: ReadOptions,
    plan: Node,
    compression: str | None,
    modules: Sequence[ModuleType],
) -> Dataset:
    """Return a dataset that one of several consumers reads in order."""

    def register(part: Node) -> str:
        return register_with_service(
            options.service,
            Dataset(part),
            compression,
            None,
            options.security,
            modules=modules,
            anonymous=True,
        )

    source = make_consumer_source(
        plan,
        options,
        spec=proved_spec(plan),
        compression=compression,
        register=register,
    )
    return Dataset.from_source(source)


def _check_not_distributed(dataset: Dataset) -> None:
    sources = [node.source for node in traverse.walk(dataset.plan) if isinstance(node, FromSource)]
    if any(isinstance(source, RemoteSource | OrderedConsumerSource) for source in sources):
        raise FailedPreconditionError(
            "this dataset already reads from a data service, so workers cannot divide it again; "
            "apply `distribute` only once, after the steps to run on workers"
        )


def _check_dynamic_steps(options: ReadOptions, plan: Node) -> None:
    if options.processing_mode is not ShardingPolicy.DYNAMIC:
        return
    for node in traverse.walk(plan):
        if node.dynamic_sharding_obstacle:
            raise FailedPreconditionError(
                f"{step_name(node)} does not work with ShardingPolicy.DYNAMIC, because "
                f"{node.dynamic_sharding_obstacle}"
            )


def _check_spec(spec: object) -> None:
    """Reject values that are not specs.

    Raises:
        TypeError: If it contains values other than ArraySpecs.
    """
    try:
        leaves, _ = flatten(spec)
        invalid = [leaf for leaf in leaves if not isinstance(leaf, ArraySpec)]
    except InvalidElementError:
        invalid = [spec]
    if invalid:
        raise TypeError(
            "`element_spec` must be an ArraySpec, or dicts and tuples of them, but got "
            f"{invalid[0]!r} of type {type(invalid[0]).__name__}"
        )


def _preserved_cardinalities(mode: ShardingPolicy) -> tuple[int, ...]:
    """Return the cardinalities that reading through a service preserves in this mode."""
    if mode == ShardingPolicy.HINT:
        return ()  # a hint may select no elements, or all
    # The files of a shard of an infinite dataset may be finite.
    by_files = mode in (ShardingPolicy.FILE, ShardingPolicy.FILE_OR_DATA)
    return (0,) if by_files else (0, INFINITE)


def _check_infinite(options: ReadOptions, cardinality: int) -> None:
    if options.trainer_id and cardinality >= 0:
        raise InvalidArgumentError(
            "Cross-trainer caching requires the input dataset to be infinite. Got input with "
            f"cardinality {cardinality}. End the dataset with `repeat()`"
        )


def _normalize_dataset_id(dataset_id: object) -> str:
    if isinstance(dataset_id, bytes):
        return dataset_id.decode()
    if isinstance(dataset_id, bool) or not isinstance(dataset_id, str | int):
        raise TypeError(f"`dataset_id` must be a string, but got {dataset_id!r}")
    if dataset_id == "":
        raise ValueError("`dataset_id` must not be empty")
    return str(dataset_id)
