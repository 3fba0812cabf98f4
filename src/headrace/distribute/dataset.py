"""Distributed datasets: a dataset whose elements are divided among the replicas in each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.arguments import check_instance
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.data.lookahead import next_epoch
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.batch_inputs import (
    BalancedBatchInput,
    SplitBatchInput,
    check_is_batched,
    check_keeps_order,
    empty_step,
    global_batch_size,
    match_spec_classes,
    piece_spec,
    round_robin_spec,
)
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.input_streams import (
    InputStreams,
    StreamAssignment,
    auto_shard,
    is_read_by_all,
)
from headrace.distribute.iterator import DistributedIterator, HostPlacement, StepPlacement
from headrace.distribute.rebatch import rotated_batch_sizes
from headrace.distribute.step_inputs import (
    PerReplicaInput,
    RoundRobinInput,
    SingleReplicaInput,
    StepColumns,
    StepInput,
)
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.plan.buffering import Prefetch
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy, Options, WithOptions
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import element_spec
from headrace.rewrites.reader_agreement import with_deterministic_order

__all__ = ["DistributedDataset", "DistributedDatasetsFromFunction", "ReplicaDataset"]

OpenDataset: TypeAlias = Callable[[Dataset], DatasetIterator]
"""Opens an epoch of a dataset."""


class ReplicaDataset(ABC):
    """Base class of distributed datasets."""

    def __init__(
        self,
        context: InputContext,
        agreement: Callable[[], StepAgreement] | None,
        placement: StepPlacement | None,
    ) -> None:
        self._context = context
        self._placement = placement or HostPlacement()
        self._num_local = context.num_replicas_per_pipeline
        #: A single replica gets elements unchanged.
        self._wraps = self._num_local > 1 or context.num_input_pipelines > 1
        self._agreement = agreement
        #: Spec of a replica's piece, once a step without rows was created from it.
        self._empty_spec: Spec | None = None

    @abstractmethod
    def _open_input(self, open_: OpenDataset) -> InputStreams:
        """Return the input of an epoch, given a function that opens its datasets."""

    @abstractmethod
    def _replica_spec(self) -> Spec:
        """Return the spec of one replica's piece."""

    @abstractmethod
    def _replica_plan(self) -> Node:
        """Return the plan whose elements have the structure of a replica's piece."""

    @property
    def element_spec(self) -> Spec:
        """Spec of a step, with a `PerReplicaSpec` for each leaf of several replicas."""
        num_replicas = self._context.num_replicas_in_sync
        return self._placement.spec(
            self._replica_spec(), self._num_local, num_replicas, self._wraps
        )

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""

    def __len__(self) -> int:
        size = self.cardinality()
        if size < 0:
            description = "infinite" if size == INFINITE else "unknown until it is read"
            raise TypeError(f"the number of steps of this distributed dataset is {description}")
        return size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        return self.open_epoch()

    def open_epoch(self, epoch: int | None = None) -> DistributedIterator:
        """Return an iterator over an epoch, for callers that count epochs.

        Args:
            epoch: Number of the epoch, which seeds shuffles; None uses the next one.
        """
        agreement = self._agreement and self._agreement()
        opened: list[DatasetIterator] = []

        def open_(dataset: Dataset) -> DatasetIterator:
            opened.append(_dataset_for_epoch(dataset, epoch))
            return opened[-1]

        def check_jobs() -> None:
            for elements in opened:
                elements.check_job_not_exhausted()

        # Without an agreement, other workers may have the elements that are missing here.
        sees_all_workers = agreement is not None or self._context.num_input_pipelines == 1
        return DistributedIterator(
            self._open_input(open_),
            self._wraps,
            lambda: self.element_spec,
            agreement,
            self._empty_step,
            self._placement,
            check_jobs if sees_all_workers else None,
        )

    def _empty_step(self, remote_spec: Spec | None) -> StepColumns:
        if self._empty_spec is None:  # computing the spec may read an element
            self._empty_spec = (
                self._replica_spec()
                if remote_spec is None
                else match_spec_classes(element_spec(self._replica_plan()), remote_spec)
            )
        return empty_step(self._empty_spec, self._num_local)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} for {self._num_local} of {self._context.num_replicas_in_sync}>"
        )

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__} has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Dataset, name):
                message += "; transform the Dataset first, and distribute the result: " + (
                    f"strategy.distribute_dataset(dataset.{name}(...))"
                )
            raise AttributeError(message, name=name, obj=self)


class DistributedDataset(ReplicaDataset):
    """A dataset of global batches; in each step, each replica gets a piece of a batch.

    Created by `strategy.distribute_dataset(dataset)`.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> for step in strategy.distribute_dataset(hr.Dataset.range(8).batch(4)):
    ...     print([rows.tolist() for rows in step.values])
    [[0, 1], [2, 3]]
    [[4, 5], [6, 7]]

    Args:
        dataset: Dataset, the same on all workers.
        context: Index of this worker, and number of replicas.
        options: Options of the distribution.
        agreement: Creates the agreement of each iterator, so that all workers end at the same
            step; None with one worker.
        seed: Seed for steps of the dataset without a seed; the same on all workers.
        placement: Conversion and placement of the rows; None keeps NumPy arrays.
    """

    def __init__(
        self,
        dataset: Dataset,
        context: InputContext,
        options: InputOptions | None = None,
        agreement: Callable[[], StepAgreement] | None = None,
        seed: int | None = None,
        placement: StepPlacement | None = None,
    ) -> None:
        super().__init__(context, agreement, placement)
        check_instance("dataset", dataset, Dataset)
        self._options = options or InputOptions()
        self._given = dataset
        plan = dataset.plan
        if context.num_replicas_in_sync > 1:
            check_is_batched(plan)
        if context.num_input_pipelines > 1 or self._options.split == "balanced":
            # All workers must read the same batches in the same order.
            plan = with_deterministic_order(plan)
        if seed is not None and dataset.options().seed is None:
            plan = WithOptions(input=plan, options=Options(seed=seed))
        shard = auto_shard(plan, context)
        self._policy, self._splits_each_batch = shard.policy, shard.splits_each_batch
        self._plan = plan
        #: Datasets by number of streams and index of the stream.
        self._datasets = {self._initial_key(): Dataset(self._read_ahead(shard.plan))}
        self._size = global_batch_size(plan)

    def _read_ahead(self, plan: Node) -> Node:
        """Return the plan with the read-ahead that the options request.

        A global batch counts as a batch per replica, held in addition to the current step.
        """
        size = self._options.experimental_per_replica_buffer_size
        return Prefetch(input=plan, buffer_size=size, only_if_slow=True) if size else plan

    @property
    def _num_streams(self) -> int:
        """Default number of streams, without a state."""
        return 1 if self._splits_each_batch else self._context.num_input_pipelines

    def _initial_key(self) -> tuple[int, int]:
        return self._num_streams, self._context.input_pipeline_id if self._num_streams > 1 else 0

    def _open_input(self, open_: OpenDataset) -> InputStreams:
        context = self._context
        return InputStreams(
            partial(self._open_stream, open_),
            context.input_pipeline_id,
            context.num_input_pipelines,
            self._num_streams,
            "copies" if is_read_by_all(self._plan) else "shared",
        )

    def _open_stream(self, open_: OpenDataset, assignment: StreamAssignment) -> StepInput:
        dataset = self._stream_dataset(assignment)
        elements, check = open_(dataset), partial(check_keeps_order, dataset.plan)
        replicas, num_local = self._context.num_replicas_in_sync, self._num_local
        if replicas == 1:
            return SingleReplicaInput(elements)
        if self._options.split == "ceil":
            is_contiguous = self._placement.keeps_order
            return SplitBatchInput(
                elements,
                replicas,
                num_local,
                assignment.num_readers,
                assignment.reader_index,
                check,
                is_contiguous,
            )
        return BalancedBatchInput(
            elements,
            lambda size: rotated_batch_sizes(
                size, replicas, assignment.num_readers_before * num_local
            ),
            num_local,
            assignment.num_readers,
            assignment.reader_index,
            self._size,
            check,
        )

    def _stream_dataset(self, assignment: StreamAssignment) -> Dataset:
        """Return the dataset of an assigned stream.

        Raises:
            FailedPreconditionError: If the dataset cannot be divided into this number of streams.
        """
        if (assignment.num_streams, assignment.stream) not in self._datasets:
            shard = auto_shard(
                self._plan,
                InputContext(assignment.num_streams, assignment.stream, assignment.num_streams),
            )
            if shard.splits_each_batch or (
                assignment.num_streams > 1 and shard.policy is AutoShardPolicy.OFF
            ):
                raise FailedPreconditionError(
                    f"the state is of a dataset sharded into {assignment.num_streams} streams, "
                    "but this dataset cannot be sharded; restore the state into the same "
                    "dataset, with the same options"
                )
            self._datasets[assignment.num_streams, assignment.stream] = Dataset(
                self._read_ahead(shard.plan)
            )
        return self._datasets[assignment.num_streams, assignment.stream]

    def _replica_plan(self) -> Node:
        return self._given.plan

    def _replica_spec(self) -> Spec:
        spec = self._given.element_spec
        if self._context.num_replicas_in_sync == 1:
            return spec
        is_only_worker = self._context.num_input_pipelines == 1
        return piece_spec(spec, self._num_local if is_only_worker else None)

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        size = self._given.cardinality()
        if size in (INFINITE, UNKNOWN) or self._context.num_replicas_in_sync == 1:
            return size
        if self._options.split == "balanced" or self._policy in (
            AutoShardPolicy.FILE,
            AutoShardPolicy.HINT,
        ):
            return UNKNOWN
        if self._splits_each_batch or self._context.num_input_pipelines == 1:
            return size
        return UNKNOWN  # it depends on the number of rows in the last batch


class DistributedDatasetsFromFunction(ReplicaDataset):
    """Datasets that a function created for each worker or replica; elements are not split.

    Created by `strategy.distribute_datasets_from_function(dataset_fn)`.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def dataset_fn(context):
    ...     return hr.Dataset.range(8).batch(context.get_per_replica_batch_size(4))
    >>> first = next(iter(strategy.distribute_datasets_from_function(dataset_fn)))
    >>> [rows.tolist() for rows in first.values]
    [[0, 1], [2, 3]]

    Args:
        datasets: One dataset whose elements the replicas receive in turn, or one for each replica.
        context: Index of this worker, and number of replicas.
        agreement: As in `DistributedDataset`.
        placement: Conversion and placement of the rows; None keeps NumPy arrays.
    """

    def __init__(
        self,
        datasets: list[Dataset],
        context: InputContext,
        agreement: Callable[[], StepAgreement] | None = None,
        placement: StepPlacement | None = None,
    ) -> None:
        super().__init__(context, agreement, placement)
        for dataset in datasets:
            if not isinstance(dataset, Dataset):
                raise TypeError(
                    f"`dataset_fn` must return a Dataset, but returned {dataset!r:.80} of type "
                    f"{type(dataset).__name__}"
                )
        self._datasets = datasets

    def _open_input(self, open_: OpenDataset) -> InputStreams:
        open_stream = partial(self._open_stream, open_)
        worker, workers = self._context.input_pipeline_id, self._context.num_input_pipelines
        if len(self._datasets) > 1:  # one per replica, and all replicas are in this process
            return InputStreams(open_stream)
        return InputStreams(open_stream, worker, workers, workers, "own")

    def _open_stream(self, open_: OpenDataset, assignment: StreamAssignment) -> StepInput:
        opened = [open_(dataset) for dataset in self._datasets]
        if len(opened) > 1:
            return PerReplicaInput(opened)
        (elements,) = opened
        return (
            SingleReplicaInput(elements)
            if self._num_local == 1
            else RoundRobinInput(elements, self._num_local)
        )

    def _replica_plan(self) -> Node:
        return self._datasets[0].plan

    def _replica_spec(self) -> Spec:
        spec = self._datasets[0].element_spec
        return spec if self._is_always_full() else round_robin_spec(spec)

    def _is_always_full(self) -> bool:
        """Return whether every step has an element for every replica."""
        if self._agreement is not None or self._context.num_input_pipelines > 1:
            return False
        sizes = {dataset.cardinality() for dataset in self._datasets}
        if len(self._datasets) > 1:
            return len(sizes) == 1 and UNKNOWN not in sizes
        (size,) = sizes
        return (
            self._num_local == 1
            or size == INFINITE
            or (size != UNKNOWN and not size % self._num_local)
        )

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        sizes = [dataset.cardinality() for dataset in self._datasets]
        if INFINITE in sizes:
            return INFINITE
        if UNKNOWN in sizes or self._context.num_input_pipelines > 1:
            return UNKNOWN
        return max(sizes) if len(sizes) > 1 else -(-sizes[0] // self._num_local)


def _dataset_for_epoch(dataset: Dataset, number: int | None) -> DatasetIterator:
    if number is None:
        number = next_epoch(dataset)
    return DatasetIterator(dataset.plan, number, lambda: dataset.element_spec)
