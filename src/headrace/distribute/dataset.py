"""Datasets whose elements are given to replicas, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.arguments import check_instance
from headrace.data.ahead import next_pass
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.batch_feeds import (
    Balanced,
    Split,
    check_is_batched,
    check_keeps_order,
    empty_step,
    global_batch_size,
    spec_in_form_of,
    spec_in_turn,
    spec_of_pieces,
)
from headrace.distribute.feeds import Feed, InTurn, Own, Step, Whole
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.iterator import Delivery, DistributedIterator, OnHost
from headrace.distribute.rebatch import rotated_batch_sizes
from headrace.distribute.streams import Part, Streams, auto_shard, is_read_whole
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.plan.buffering import Prefetch
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy, Options, WithOptions
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import element_spec
from headrace.rewrites.read_alike import in_order

__all__ = ["Distributed", "DistributedDataset", "DistributedDatasetsFromFunction"]

Open: TypeAlias = Callable[[Dataset], DatasetIterator]
"""Opens a pass over a dataset."""


class Distributed(ABC):
    """What distributed datasets of all kinds have."""

    def __init__(
        self,
        context: InputContext,
        agreement: Callable[[], StepAgreement] | None,
        delivery: Delivery | None,
    ) -> None:
        self._context = context
        self._delivery = delivery or OnHost()
        self._here = context.replicas_here
        #: One replica that is alone gets elements as they are.
        self._wraps = self._here > 1 or context.num_input_pipelines > 1
        self._agreement = agreement
        #: Spec of what a replica gets, once a step without rows was made of it.
        self._spec_of_empty: Spec | None = None

    @abstractmethod
    def _feed(self, open_: Open) -> Streams:
        """Return what reads a pass whose datasets are opened so."""

    @abstractmethod
    def _spec_of_values(self) -> Spec:
        """Spec of what one replica gets."""

    @abstractmethod
    def _plan_of_values(self) -> Node:
        """Plan whose elements are nested as what a replica gets."""

    @property
    def element_spec(self) -> Spec:
        """Spec of what a step gives, with a `PerReplicaSpec` for each leaf of several replicas."""
        everywhere = self._context.num_replicas_in_sync
        return self._delivery.spec(self._spec_of_values(), self._here, everywhere, self._wraps)

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""

    def __len__(self) -> int:
        size = self.cardinality()
        if size < 0:
            what = "infinite" if size == INFINITE else "known only by reading it"
            raise TypeError(f"the number of steps of this distributed dataset is {what}")
        return size

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        return self.open_pass()

    def open_pass(self, number: int | None = None) -> DistributedIterator:
        """Return an iterator over a pass, for whoever counts passes.

        Args:
            number: That of the pass, by which shuffles differ; None: the next one.
        """
        agreement = self._agreement and self._agreement()
        opened: list[DatasetIterator] = []

        def open_(dataset: Dataset) -> DatasetIterator:
            opened.append(_pass_over(dataset, number))
            return opened[-1]

        def check_jobs() -> None:
            for elements in opened:
                elements.check_job()

        # Without an agreement the other workers may have the elements that are missing here.
        knows_others = agreement is not None or self._context.num_input_pipelines == 1
        return DistributedIterator(
            self._feed(open_),
            self._wraps,
            lambda: self.element_spec,
            agreement,
            self._empty,
            self._delivery,
            check_jobs if knows_others else None,
        )

    def _empty(self, spec_elsewhere: Spec | None) -> Step:
        if self._spec_of_empty is None:  # a look at an element may cost as much as a step
            self._spec_of_empty = (
                self._spec_of_values()
                if spec_elsewhere is None
                else spec_in_form_of(element_spec(self._plan_of_values()), spec_elsewhere)
            )
        return empty_step(self._spec_of_empty, self._here)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self._here} of {self._context.num_replicas_in_sync}>"

    if not TYPE_CHECKING:  # or every name would pass for a method

        def __getattr__(self, name: str) -> Any:
            words = f"{type(self).__name__} has no attribute {name!r}"
            if not name.startswith("_") and hasattr(Dataset, name):
                words += "; transform the Dataset first, and distribute the result: " + (
                    f"strategy.distribute_dataset(dataset.{name}(...))"
                )
            raise AttributeError(words, name=name, obj=self)


class DistributedDataset(Distributed):
    """A dataset of global batches, of which each replica gets a part in each step.

    `strategy.distribute_dataset(dataset)` makes it.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> for step in strategy.distribute_dataset(hr.Dataset.range(8).batch(4)):
    ...     print([rows.tolist() for rows in step.values])
    [[0, 1], [2, 3]]
    [[4, 5], [6, 7]]

    Args:
        dataset: What all workers have alike.
        context: Which worker this is, and how many replicas there are.
        options: How to share it.
        agreement: Makes for each iterator what it asks at each step, so that all workers end
            together; None: there are no others.
        seed: Of what the dataset draws without a seed of its own: the same on all workers.
        delivery: What becomes of the rows; None: arrays of NumPy.
    """

    def __init__(
        self,
        dataset: Dataset,
        context: InputContext,
        options: InputOptions | None = None,
        agreement: Callable[[], StepAgreement] | None = None,
        seed: int | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        super().__init__(context, agreement, delivery)
        check_instance("dataset", dataset, Dataset)
        self._options = options or InputOptions()
        self._given = dataset
        plan = dataset.plan
        if context.num_replicas_in_sync > 1:
            check_is_batched(plan)
        if context.num_input_pipelines > 1 or self._options.split == "balanced":
            plan = in_order(plan)  # workers read alike, and the rest of a batch comes after it
        if seed is not None and dataset.options().seed is None:
            plan = WithOptions(input=plan, options=Options(seed=seed))
        share = auto_shard(plan, context)
        self._policy, self._by_batch = share.policy, share.is_of_each_batch
        self._plan = plan
        #: What is read, by how many parts it was cut into and which of them this is.
        self._datasets = {self._key_here(): Dataset(self._read_ahead(share.plan))}
        self._size = global_batch_size(plan)

    def _read_ahead(self, plan: Node) -> Node:
        """Return the plan with as many batches read ahead as the options say.

        A global batch is a batch for each replica: so many does a worker hold besides the step's.
        """
        size = self._options.experimental_per_replica_buffer_size
        return Prefetch(input=plan, buffer_size=size, only_if_slow=True) if size else plan

    @property
    def _streams(self) -> int:
        """How many streams there are, where no state says otherwise."""
        return 1 if self._by_batch else self._context.num_input_pipelines

    def _key_here(self) -> tuple[int, int]:
        return self._streams, self._context.input_pipeline_id if self._streams > 1 else 0

    def _feed(self, open_: Open) -> Streams:
        context = self._context
        return Streams(
            partial(self._open_part, open_),
            context.input_pipeline_id,
            context.num_input_pipelines,
            self._streams,
            "copies" if is_read_whole(self._plan) else "shared",
        )

    def _open_part(self, open_: Open, part: Part) -> Feed:
        dataset = self._part(part)
        elements, check = open_(dataset), partial(check_keeps_order, dataset.plan)
        replicas, here = self._context.num_replicas_in_sync, self._here
        if replicas == 1:
            return Whole(elements)
        if self._options.split == "ceil":
            in_a_row = self._delivery.keeps_order
            return Split(elements, replicas, here, part.readers, part.reader, check, in_a_row)
        return Balanced(
            elements,
            lambda size: rotated_batch_sizes(size, replicas, part.before * here),
            here,
            part.readers,
            part.reader,
            self._size,
            check,
        )

    def _part(self, part: Part) -> Dataset:
        """Return the dataset of which a part is read.

        Raises:
            FailedPreconditionError: It cannot be cut into so many.
        """
        if (part.of, part.stream) not in self._datasets:
            share = auto_shard(self._plan, InputContext(part.of, part.stream, part.of))
            if share.is_of_each_batch or (part.of > 1 and share.policy is AutoShardPolicy.OFF):
                raise FailedPreconditionError(
                    f"the state was taken when the dataset was shared as {part.of} parts, and it "
                    "cannot be cut into parts here: is it the same dataset, with the same options?"
                )
            self._datasets[part.of, part.stream] = Dataset(self._read_ahead(share.plan))
        return self._datasets[part.of, part.stream]

    def _plan_of_values(self) -> Node:
        return self._given.plan

    def _spec_of_values(self) -> Spec:
        spec = self._given.element_spec
        if self._context.num_replicas_in_sync == 1:
            return spec
        alone = self._context.num_input_pipelines == 1
        return spec_of_pieces(spec, self._here if alone else None)

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
        if self._by_batch or self._context.num_input_pipelines == 1:
            return size
        return UNKNOWN  # how many pieces the last batch makes depends on its rows


class DistributedDatasetsFromFunction(Distributed):
    """Datasets that a function made for replicas or workers; replicas take elements as they are.

    `strategy.distribute_datasets_from_function(dataset_fn)` makes it.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def dataset_fn(context):
    ...     return hr.Dataset.range(8).batch(context.get_per_replica_batch_size(4))
    >>> first = next(iter(strategy.distribute_datasets_from_function(dataset_fn)))
    >>> [rows.tolist() for rows in first.values]
    [[0, 1], [2, 3]]

    Args:
        datasets: One, whose elements the replicas take in turn; or one for each of them.
        context: Which worker this is, and how many replicas there are.
        agreement: As of a `DistributedDataset`.
        delivery: What becomes of the rows; None: arrays of NumPy.
    """

    def __init__(
        self,
        datasets: list[Dataset],
        context: InputContext,
        agreement: Callable[[], StepAgreement] | None = None,
        delivery: Delivery | None = None,
    ) -> None:
        super().__init__(context, agreement, delivery)
        for dataset in datasets:
            if not isinstance(dataset, Dataset):
                raise TypeError(
                    f"`dataset_fn` must return a Dataset, but returned {dataset!r:.80} of type "
                    f"{type(dataset).__name__}"
                )
        self._datasets = datasets

    def _feed(self, open_: Open) -> Streams:
        open_part = partial(self._open_part, open_)
        worker, workers = self._context.input_pipeline_id, self._context.num_input_pipelines
        if len(self._datasets) > 1:  # for replicas, which are all here
            return Streams(open_part)
        return Streams(open_part, worker, workers, workers, "own")

    def _open_part(self, open_: Open, part: Part) -> Feed:
        opened = [open_(dataset) for dataset in self._datasets]
        if len(opened) > 1:
            return Own(opened)
        (elements,) = opened
        return Whole(elements) if self._here == 1 else InTurn(elements, self._here)

    def _plan_of_values(self) -> Node:
        return self._datasets[0].plan

    def _spec_of_values(self) -> Spec:
        spec = self._datasets[0].element_spec
        return spec if self._is_always_full() else spec_in_turn(spec)

    def _is_always_full(self) -> bool:
        """Whether every step has an element for every replica."""
        if self._agreement is not None or self._context.num_input_pipelines > 1:
            return False
        sizes = {dataset.cardinality() for dataset in self._datasets}
        if len(self._datasets) > 1:
            return len(sizes) == 1 and UNKNOWN not in sizes
        (size,) = sizes
        return self._here == 1 or size == INFINITE or (size != UNKNOWN and not size % self._here)

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        sizes = [dataset.cardinality() for dataset in self._datasets]
        if INFINITE in sizes:
            return INFINITE
        if UNKNOWN in sizes or self._context.num_input_pipelines > 1:
            return UNKNOWN
        return max(sizes) if len(sizes) > 1 else -(-sizes[0] // self._here)


def _pass_over(dataset: Dataset, number: int | None) -> DatasetIterator:
    if number is None:
        number = next_pass(dataset)
    return DatasetIterator(dataset.plan, number, lambda: dataset.element_spec)
