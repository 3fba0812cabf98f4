"""Several ordered consumers: consumer i of n reads elements i, i + n, ... of the stream.

Each consumer reads in order with a separate job, and does not wait for the others: a slow or lost
consumer delays no other. What the workers produce for it depends on the plan:

* If each split is one element, they produce only the consumer's own elements (`ShardElements` moves
  into the index plan). Elements at the end that are too few for a round are read by each consumer.
* With a cost function, they produce the whole stream for each consumer, which computes the costs of
  all rows of a round, and takes its rows. All consumers compute the same division.
* Otherwise they produce the whole stream, and each consumer takes its part.

All consumers use one seed, which the dispatcher gives to those that start
(`dispatcher.jobs`). A position is that of a single process before the next round. So it
is the same for all consumers after the same number of elements, and any number of consumers can
resume from it. Once errors of that round were raised, it also has their number, and the element
that the last one came before or in place of: `"raised": [element, errors]`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered_elements import UNORDERED_STATE_MESSAGE
from headrace.plan.determinism import derive_seeds
from headrace.plan.fingerprint import fingerprint_with_steps
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.source import INFINITE, UNKNOWN, Position, Reader, Source
from headrace.plan.traverse import cardinality, element_spec, walk
from headrace.plan.user_function import step_name
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.rewrites.partition import PartitionMode, PlanPartition, partition_plan
from headrace.service.client.exhausted_jobs import ExhaustedJobCheck
from headrace.service.client.options import ReadOptions
from headrace.service.client.replay import ReplayRegistry
from headrace.service.client.source import RemoteSource
from headrace.service.client.visitation import (
    explain_unusable_position,
    find_exclusive_reason,
    partition_for,
)
from headrace.service.modes.ordered.consumer_options import consumer_spec
from headrace.service.modes.ordered.ordered_partition import OrderedPartition
from headrace.service.modes.ordered.ordered_readers import (
    ConsumerConfig,
    ConsumerReader,
    FullStreamReader,
    RaisedErrors,
    drops_remainder,
    make_consumer_plan,
)

__all__ = [
    "OrderedConsumerSource",
    "check_buckets",
    "find_undivided_step",
    "is_divisible",
    "make_consumer_source",
]

_log = logging.getLogger(__name__)


def check_buckets(plan: Node) -> None:
    """Reject bucketing steps: which elements they join depends on the whole stream.

    Raises:
        FailedPreconditionError: If the plan has such a step.
    """
    for node in walk(plan):
        if isinstance(node, BucketBySequenceLength | GroupByWindow):
            raise FailedPreconditionError(
                f"{step_name(node)} is not supported with `ordered=True` and several consumers: "
                "the elements that it joins depend on the whole stream. Leave out `ordered=True` "
                "(all batches of a round are then from one bucket), or move that step after "
                "`distribute`"
            )


def is_divisible(plan: Node) -> bool:
    """Return whether workers can produce only a consumer's own elements."""
    partition = partition_plan(plan, ordered=True)
    consumer_partition = partition_plan(make_consumer_plan(plan, 2, 0), ordered=True)
    return _is_one_to_one(partition, plan) and isinstance(
        consumer_partition.client_stage, ReadSplits
    )


def find_undivided_step(plan: Node) -> str:
    """Return the first step that prevents workers from producing only a consumer's elements.

    Empty if no step does.
    """
    if is_divisible(plan):
        return ""
    for input_plan in plan.inputs:
        if found := find_undivided_step(input_plan):
            return found
    return step_name(plan)


def _is_one_to_one(partition: PlanPartition, plan: Node) -> bool:
    client_stage, total = partition.client_stage, cardinality(plan)
    if not isinstance(client_stage, ReadSplits) or client_stage.cycle_length != 1:
        return False
    # The last split is empty if its rows are too few for a batch.
    is_short = drops_remainder(plan) and total == client_stage.num_splits - 1
    return is_short or total in (INFINITE, client_stage.num_splits)


def explain_repeated_work(consumer: ConsumerConfig, undivided_step: str) -> str:
    """Return how often workers compute each element and why; empty if only once.

    Args:
        consumer: Which consumer reads.
        undivided_step: Result of `find_undivided_step`.
    """
    count, readers = consumer.num_consumers, consumer.num_readers
    by_each = "consumer" if readers == 1 else f"of the {readers} readers of each consumer"
    if consumer.cost_fn:
        reason = "each computes `cost_fn` for all rows of a round, and keeps its rows"
    elif undivided_step:
        reason = (
            f"the position of an element after {undivided_step} does not determine its inputs. "
            "Move that step after `distribute`, or leave out `ordered=True`"
        )
    elif readers > 1:
        return f"{readers} times, once for each reader of one consumer"
    else:
        return ""
    return f"{count * readers} times, once for each {by_each}: {reason}"


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderedConsumerSource(Source):
    """Source of one of several consumers (`plan.source.Source`).

    Attributes:
        consumer: Which consumer this is.
        remote_plan: The plan as a single process would read it.
        spec: Spec of one element, or None.
        make_source: Returns the source of a plan that is read in order for this consumer: that of
            its job, or, with False, one for this client alone.
        undivided_step: Result of `find_undivided_step`.
        ordered_partition: Partition of the plan. Consumers may differ in it, because each has its
            own job.
        fixed_seeds: See `plan.source.Source`.
    """

    consumer: ConsumerConfig
    remote_plan: Node | None
    spec: Spec | None
    make_source: Callable[[Node, bool], RemoteSource]
    undivided_step: str
    ordered_partition: OrderedPartition = field(repr=False)
    fixed_seeds: tuple[int, ...] = ()
    _counter: IterationCounter = field(repr=False)
    _occurrence: int = field(default=0, repr=False)
    _job_check: ExhaustedJobCheck = field(repr=False)
    _seed: int | None = field(default=None, repr=False)
    _replay_registry: ReplayRegistry = field(default_factory=ReplayRegistry, repr=False)

    @property
    def element_spec(self) -> Spec | None:
        return self.spec

    @property
    def size(self) -> int:
        return self.count if self.count in (0, INFINITE) else 1

    @property
    def count(self) -> int:
        """Number of elements, INFINITE or UNKNOWN."""
        assert self.remote_plan is not None
        total = cardinality(self.remote_plan)
        if total in (INFINITE, UNKNOWN):
            return total
        rounds, remainder = divmod(total, self.consumer.num_consumers)
        return rounds + (remainder > 0 and self.consumer.remainder != "drop")

    @property
    def elements_per_index(self) -> int | None:
        return 1 if self.count == INFINITE else None

    @property
    def element_count(self) -> int | None:
        return None if self.count in (INFINITE, UNKNOWN) else self.count

    @property
    def splittable(self) -> bool:
        return False

    @property
    def explanation(self) -> str:
        reason = explain_repeated_work(self.consumer, self.undivided_step)
        computation = (
            f"each element is computed {reason}"
            if reason
            else "each element is computed once, for the one of "
            f"{self.consumer.num_consumers} consumers that reads it"
        )
        return f"{self.ordered_partition.explain()}\n  consumers: {computation}"

    @property
    def ordered_partition_mode(self) -> str:
        return self.ordered_partition.mode

    @property
    def has_ordered_partition(self) -> bool:
        return True

    @property
    def replay_buffers(self) -> ReplayRegistry:
        """Registry that retains only errors, because positions can be reopened."""
        return self._replay_registry

    def with_seed(self, seed: int) -> Source:
        return dataclasses.replace(self, _seed=seed)

    def detach(self) -> RemoteSource:
        assert self.remote_plan is not None
        return self.make_source(self.remote_plan, False).with_fixed_seeds(self.fixed_seeds).detach()

    def with_occurrence(self, occurrence: int) -> OrderedConsumerSource:
        return dataclasses.replace(self, _occurrence=occurrence)

    def explain_unusable_position(self, mode: str, *, is_single_process: bool) -> str:
        assert self.remote_plan is not None
        return explain_unusable_position(
            self.remote_plan, cast(PartitionMode, mode), is_single_process=is_single_process
        )

    def with_fixed_seeds(self, seeds: tuple[int, ...]) -> OrderedConsumerSource:
        return dataclasses.replace(self, fixed_seeds=seeds)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        assert self.remote_plan is not None
        assert self._seed is not None
        if "positions" in (position or ()):
            raise FailedPreconditionError(UNORDERED_STATE_MESSAGE)
        if not self.undivided_step and not self.consumer.cost_fn:
            consumer = self.consumer
            return ConsumerReader(
                self._part_source, consumer, self.remote_plan, position, pass_number, self._seed
            )
        source = self._part_source(self.remote_plan, True).with_seed(self._seed)
        input = source.open(0, 1, position, pass_number=pass_number)
        return FullStreamReader(input, self.consumer, RaisedErrors.from_position(position))

    def _part_source(self, plan: Node, is_job: bool) -> RemoteSource:
        """Return the source of a derived plan, with the seeds of the whole plan."""
        source = self.make_source(plan, is_job).with_fixed_seeds(self.fixed_seeds)
        source = dataclasses.replace(source, _replay_registry=self._replay_registry)
        if is_job:
            source = dataclasses.replace(source, _job_check=self._job_check)
        return source

    def explain_exhausted(self, number: int) -> str:
        return self._job_check.exhausted_message(number)


def make_consumer_source(
    plan: Node,
    options: ReadOptions,
    *,
    spec: Spec | None,
    compression: str | None,
    register: Callable[[Node], str],
) -> OrderedConsumerSource:
    """Return the source of a consumer.

    Args:
        plan: The plan.
        options: Reading options, including which consumer this is.
        spec: Spec of one element.
        compression: "AUTO", or None.
        register: Registers a plan with the service; returns its id.

    Raises:
        FailedPreconditionError: If the plan cannot be read this way; the message has the reason.
    """
    index, consumers = options.consumer_index, options.num_consumers
    assert index is not None
    assert consumers is not None
    check_buckets(plan)
    plan_digest, steps = fingerprint_with_steps(plan)
    terms = [
        f"num_consumers={consumers}, readers_per_consumer={options.readers_per_consumer}, "
        f"remainder={options.remainder!r}, cost_fn={options.cost_fn_id or None}, "
        f"dataset {plan_digest}",
        *(f"{name} {digest}" for name, digest in steps),
    ]
    job_options = dataclasses.replace(
        options,
        num_consumers=None,
        consumer_index=None,
        readers_per_consumer=1,
        reader_index=0,
        remainder="drop",
        cost_fn_id="",
        cost_fn=b"",
        group=options.job_name or "",
        group_options="\n".join(terms),
    )

    ordered_partition = OrderedPartition(plan)
    readers = options.readers_per_consumer
    reader = f", reader {options.reader_index} of {readers}" if readers > 1 else ""
    job_name = f"{options.job_name} (consumer {index} of {consumers}{reader})"

    def read(part: Node, is_named: bool) -> RemoteSource:
        partition = partition_for(part, job_options)
        assert partition is not None
        total = cardinality(part)
        return RemoteSource(
            options=job_options,
            dataset_id=register(part),
            cardinality=total,
            # Its own job ends with the client: no other client starts at that position.
            job_name=job_name if is_named else None,
            spec=element_spec(part),
            compression=compression,
            partition_mode=partition.mode,
            num_splits=partition.num_splits,
            exclusive_reason=find_exclusive_reason(partition) or "ordered reading",
            remote_plan=part,
            ordered_partition=ordered_partition if part is plan else OrderedPartition(part),
        )

    consumer = ConsumerConfig(
        index, consumers, options.remainder, options.cost_fn, options.readers_per_consumer
    )
    undivided = find_undivided_step(plan)
    if reason := explain_repeated_work(consumer, undivided):
        _log.warning(
            "all elements of job %r are computed %s (`explain()` shows the plan)",
            options.job_name,
            reason,
        )
    register(plan)  # rejects a plan that cannot be sent now
    counter = IterationCounter()
    return OrderedConsumerSource(
        consumer=consumer,
        remote_plan=plan,
        spec=consumer_spec(spec, options.remainder),
        make_source=read,
        undivided_step=undivided,
        ordered_partition=ordered_partition,
        fixed_seeds=tuple(derive_seeds(plan, options.job_name or "")),
        _counter=counter,
        _job_check=ExhaustedJobCheck(counter),
    )
