"""Datasets that read a service."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

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
from headrace.plan.determinism import drawn_seeds, seeds_named
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.rewrites.cut import Cut
from headrace.service.by_value import by_value, checked_modules
from headrace.service.client.job_use import JobUse
from headrace.service.client.options import ReadingOptions, reading_options
from headrace.service.client.source import RemoteSource
from headrace.service.client.visits import (
    cut_for,
    is_cut,
    whole_stream_step,
    with_visitation,
)
from headrace.service.config import CrossTrainerCache, ShardingPolicy, parse_service
from headrace.service.messages import GetDataset
from headrace.service.modes.ordered.consumers import spec_of_parts
from headrace.service.modes.ordered.consumers_source import InTurns, source_for
from headrace.service.modes.ordered.plan_cut import InOrder
from headrace.service.registering import ask, check_compression, registered, registered_plan
from headrace.transport.security import Security

__all__ = ["delivery_report", "distribute", "from_dataset_id"]


def distribute(
    processing_mode: ShardingPolicy | str,
    service: str | tuple[str, str],
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    visitation: str | None = None,
    *,
    ordered: bool = False,
    remainder: str = "drop",
    cost_fn: Callable[..., object] | None = None,
    modules: Sequence[ModuleType | str] = (),
    wait_timeout: float = 3600.0,
    security: Security | None = None,
    on_data_loss: str = "error",
) -> Callable[[Any], Dataset]:
    """Return a function for `Dataset.apply` that moves a dataset's work to a data service.

    The function also takes what `Dataset.from_pipeline` takes: a torch DataLoader, say.

    The dataset is registered when the function is applied; a dispatcher that is not there yet is
    waited for (a minute). Each iteration over the result, or over a dataset derived from it, is the
    next iteration of the job.

    >>> with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
    ...     dataset = hr.Dataset.range(6).map(lambda x: x * x).apply(
    ...         hr.service.distribute("distributed_epoch", cluster.target, ordered=True)
    ...     )
    ...     [int(x) for x in dataset]
    [0, 1, 4, 9, 16, 25]

    Args:
        processing_mode: `ShardingPolicy.OFF` (each worker produces the whole dataset), `DYNAMIC`
            (each element once, by whichever worker asks), or one of FILE, DATA, FILE_OR_DATA and
            HINT (each worker of the dispatcher's fixed list its share; at least once when workers
            are lost). The names "parallel_epochs" and "distributed_epoch" mean OFF and DYNAMIC.
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port").
        job_name: Readers with the same name share one job: each element goes to one of them.
        consumer_index: Which of the consumers this is, from 0. All consumers of a job read in
            rounds: in each, every one of them gets one element of the same worker; if `ordered`,
            consumer i of n gets elements i, i + n, ... of that order.
        num_consumers: How many consumers the job has. They need a `job_name`.
        max_outstanding_requests: At most so many elements, over all workers, are asked for, made,
            under way or not used yet; None: what lies ready is bounded in bytes.
        data_transfer_protocol: "local" (workers in this process), "shm" (on this host), "tcp", or
            None: the first of these that works.
        compression: "AUTO": what comes from another machine is compressed where that is found to
            be faster; None: nothing is.
        cross_trainer_cache: For which trainer this is, where several trainers of one job read all
            its elements, and workers make each once. The dataset has no end.
        target_workers: "ANY": all workers; "LOCAL": those in this process; "AUTO": all but those
            of other processes that have the tag "COLOCATED", and with fixed shares those in this
            process alone, if there are any.
        visitation: How often elements come where workers or clients are lost; None: the default of
            the mode. DYNAMIC offers "exactly_once" (the default: what nobody has is computed again,
            and each element is delivered once to clients that live) and "at_most_once" (what came
            in part is lost and named). Exactly once needs functions that give as many elements
            again for the same input. Fixed shares offer "at_least_once" alone, and OFF
            nothing: a lost copy ends where it is.
        ordered: Whether elements come in the order in which one process yields them, whichever
            workers come, go and die. With DYNAMIC and exactly once alone. One client reads
            a job so, or `num_consumers` do, each its elements. Workers run what they can unit by
            unit, and this process runs the rest; it holds what comes before its turn. Where it
            hangs on the size of elements what workers run, and only functions can tell, a few are
            made in this process when reading begins.
        remainder: What becomes of elements at the end that are too few for a round of all
            consumers: "drop" (they go to nobody), "pad" (the others get batches of no rows) or
            "end_together" (their rows are shared evenly).
        cost_fn: Returns what a row costs, as its length. Rows of a round's batches are then shared
            so that each consumer has as many, and none is much dearer. It runs on workers.
        modules: Modules, or their names, that travel with the dataset: workers need not have them.
            A package stands for all that is in it. Modules that are not named travel by name.
        wait_timeout: Seconds without anybody alive who could deliver, or with a dispatcher that is
            away when a pass begins, after which reading raises UnavailableError; of several
            consumers, seconds after which a wait for one of them raises DeadlineExceededError. A
            worker that is alive is waited for without end; a wait of ten seconds is logged, with
            what is missing.
        security: Keys of this client, for a service that asks for them.
        on_data_loss: What happens where DYNAMIC with exactly once cannot deliver all elements: a
            function ends the process of every worker that computes one of them, say. "error": the
            iterator raises DataLossError after the last element, which names what is missing;
            "warn": a warning says so. Where less is promised, it is always a warning.

    Raises:
        TypeError, ValueError: An argument is wrong, or not supported by this version.
        FailedPreconditionError: (when applied) Something in the dataset cannot be pickled.
        UnavailableError: (when applied) The dispatcher did not answer for a minute.
    """
    if isinstance(processing_mode, Dataset):
        raise TypeError(
            "distribute() takes no dataset, but returns what a dataset's `apply` takes: "
            'dataset.apply(hr.service.distribute("distributed_epoch", "host:port"))'
        )
    travelling = checked_modules(modules)
    with by_value(travelling):  # the cost function travels, too
        options = reading_options(
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
            wait_timeout=wait_timeout,
            security=security,
            on_data_loss=on_data_loss,
        )
    check_compression(compression)

    def apply(pipeline: Any) -> Dataset:
        dataset = Dataset.from_pipeline(pipeline)
        if options.processing_mode is ShardingPolicy.DYNAMIC:
            _check_not_distributed(dataset)
        _check_endless(options, traverse.cardinality(dataset.plan))
        if options.ordered and options.num_consumers is not None:
            return _in_turns(options, dataset.plan, compression, travelling)
        made = cut_for(dataset.plan, options)
        dataset_id = registered(
            service, dataset, compression, None, security, modules=travelling, anonymous=True
        )
        plan = dataset.plan
        spec, size = traverse.element_spec(plan), traverse.cardinality(plan)
        return _reading(options, dataset_id, spec, size, job_name, compression, plan, made)

    return apply


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
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    visitation: str | None = None,
    *,
    ordered: bool = False,
    remainder: str = "drop",
    cost_fn: Callable[..., object] | None = None,
    modules: Sequence[ModuleType | str] = (),
    wait_timeout: float = 3600.0,
    security: Security | None = None,
    on_data_loss: str = "error",
) -> Dataset:
    """Return a dataset that reads what `register_dataset` registered.

    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     dataset_id = hr.service.register_dataset(cluster.target, hr.Dataset.range(3))
    ...     dataset = hr.service.from_dataset_id("parallel_epochs", cluster.target, dataset_id)
    ...     [int(x) for x in dataset]
    [0, 1, 2]

    Args:
        processing_mode: As in `distribute`.
        service: As in `distribute`.
        dataset_id: What `register_dataset` returned.
        element_spec: Spec of its elements; None: the dispatcher knows.
        job_name: Readers of the same id with the same name share one job.
        consumer_index: As in `distribute`.
        num_consumers: As in `distribute`.
        max_outstanding_requests: As in `distribute`.
        data_transfer_protocol: As in `distribute`.
        cross_trainer_cache: As in `distribute`.
        target_workers: As in `distribute`.
        remainder: As in `distribute`.
        cost_fn: As in `distribute`.
        visitation: As in `distribute`.
        ordered: As in `distribute`.
        modules: Of functions that are given here; those of the dataset travel with it when it is
            registered.
        wait_timeout: As in `distribute`.
        security: Keys of this client, for a service that asks for them.
        on_data_loss: As in `distribute`.

    Raises:
        TypeError, ValueError: An argument is wrong, or not supported by this version.
        NotFoundError: No dataset was registered under this id.
        UnavailableError: The dispatcher did not answer for a minute.
    """
    with by_value(checked_modules(modules)):
        options = reading_options(
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
            visitation=visitation,
            ordered=ordered,
            wait_timeout=wait_timeout,
            security=security,
            on_data_loss=on_data_loss,
        )
    if element_spec is not None:
        _check_spec(element_spec)
    name = _dataset_name(dataset_id)
    try:
        known = ask(parse_service(service), security, GetDataset(dataset_id=name))
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
    _check_endless(options, known.cardinality)
    scoped = None if job_name is None else f"dataset_id={name}/{job_name}"
    if options.ordered and options.num_consumers is not None:
        whole = registered_plan(parse_service(service), security, known.digest)
        named = dataclasses.replace(options, job_name=scoped)
        return _in_turns(named, whole, known.compression, checked_modules(modules))
    plan, made = None, None
    if (
        is_cut(options)
        and known.num_splits is not None
        and (options.ordered or not known.has_element_ids)
    ):
        plan = registered_plan(parse_service(service), security, known.digest)
        made = cut_for(plan, options)
    return _reading(
        options, name, element_spec, known.cardinality, scoped, known.compression, plan, made
    )


def delivery_report(dataset: Dataset) -> dict[str, int]:
    """Return how many elements each worker, by address, delivered in the latest iteration.

    It is empty for a dataset that reads no service, and for one that was not iterated over yet.

    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     dataset = hr.Dataset.range(100).apply(
    ...         hr.service.distribute("distributed_epoch", cluster.target)
    ...     )
    ...     elements = list(dataset)
    ...     list(hr.service.delivery_report(dataset).values())
    [100]

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


def _reading(
    options: ReadingOptions,
    dataset_id: str,
    element_spec: Spec | None,
    cardinality: int,
    job_name: str | None,
    compression: str | None,
    plan: Node | None,
    made: Cut | None,
) -> Dataset:
    """Return a dataset that reads what is registered.

    Args:
        options: How.
        dataset_id: What.
        element_spec: Spec of its elements, if it is known.
        cardinality: How many there are.
        job_name: Whose iterations to share.
        compression: "AUTO", or None.
        plan: What is registered, where a part of it is run here.
        made: How it is cut then; None: workers run all of it.
    """
    is_ordered = made is not None and made.is_ordered
    # How many workers there will be, and how many copies they make, nobody knows.
    is_known = is_ordered or cardinality in _known_sizes(options.processing_mode)
    written = plan if made is not None or is_cut(options) else None
    fixed: list[int] = []
    if written is not None:
        # Each reader of a job may have drawn for itself: what they share is the job's name.
        fixed = drawn_seeds(written) if job_name is None else seeds_named(written, job_name)
    counter = None if job_name is None else IterationCounter()
    source = RemoteSource(
        options=with_visitation(options),
        dataset_id=dataset_id,
        cardinality=cardinality if is_known else UNKNOWN,
        job_name=job_name,
        spec=spec_of_parts(element_spec, options.remainder),
        compression=compression,
        half="" if made is None else made.half,
        units=None if made is None else made.units,
        whole_stream="" if made is None else whole_stream_step(made),
        written=written,
        in_order=None if written is None else InOrder(written),
        fixed_seeds=tuple(fixed),
        _counter=counter,
        _use=JobUse(counter),
    )
    return Dataset.from_source(source)


def _in_turns(
    options: ReadingOptions,
    plan: Node,
    compression: str | None,
    modules: Sequence[ModuleType],
) -> Dataset:
    """Return what one of several consumers reads in order."""

    def register(part: Node) -> str:
        return registered(
            options.service,
            Dataset(part),
            compression,
            None,
            options.security,
            modules=modules,
            anonymous=True,
        )

    source = source_for(
        plan,
        options,
        spec=traverse.element_spec(plan),
        compression=compression,
        register=register,
    )
    return Dataset.from_source(source)


def _check_not_distributed(dataset: Dataset) -> None:
    sources = [node.source for node in traverse.walk(dataset.plan) if isinstance(node, FromSource)]
    if any(isinstance(source, RemoteSource | InTurns) for source in sources):
        raise FailedPreconditionError(
            "this dataset reads a data service already, so there is nothing in it to be dealt: "
            "apply `distribute` once, after the steps that workers are to run"
        )


def _check_spec(spec: object) -> None:
    """Refuse what is no spec of an element.

    Raises:
        TypeError: There is something else than ArraySpecs in it.
    """
    try:
        leaves, _ = flatten(spec)
        strange = [leaf for leaf in leaves if not isinstance(leaf, ArraySpec)]
    except InvalidElementError:
        strange = [spec]
    if strange:
        raise TypeError(
            "`element_spec` must be an ArraySpec, or dicts and tuples of them, but got "
            f"{strange[0]!r} of type {type(strange[0]).__name__}"
        )


def _known_sizes(mode: ShardingPolicy) -> tuple[int, ...]:
    """Return the cardinalities of a dataset that what a service delivers of it has, too."""
    if mode == ShardingPolicy.HINT:
        return ()  # what a hint stands for may leave nothing, or all
    # A share of the files of an endless dataset may be one that ends.
    by_files = mode in (ShardingPolicy.FILE, ShardingPolicy.FILE_OR_DATA)
    return (0,) if by_files else (0, INFINITE)


def _check_endless(options: ReadingOptions, cardinality: int) -> None:
    if options.trainer_id and cardinality >= 0:
        raise InvalidArgumentError(
            "Cross-trainer caching requires the input dataset to be infinite. Got input with "
            f"cardinality {cardinality}. End the dataset with `repeat()`"
        )


def _dataset_name(dataset_id: object) -> str:
    if isinstance(dataset_id, bytes):
        return dataset_id.decode()
    if isinstance(dataset_id, bool) or not isinstance(dataset_id, str | int):
        raise TypeError(f"`dataset_id` must be a string, but got {dataset_id!r}")
    if dataset_id == "":
        raise ValueError("`dataset_id` must not be empty")
    return str(dataset_id)
