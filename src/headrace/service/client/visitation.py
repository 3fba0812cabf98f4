"""Delivery guarantees, and the partition of plans that they require.

With DYNAMIC sharding, each element is delivered exactly once. Workers run the part of the plan
whose elements have ids of split and ordinal (`rewrites.partition`), and the client runs the
rest. Lost static shards are read again, so elements are delivered at least once. A lost copy of the
dataset ends where it is.
"""

from __future__ import annotations

import dataclasses

from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch, Unbatch
from headrace.plan.buffering import Cache
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.random_map import DrawRandomWords, RandomMap
from headrace.plan.traverse import walk
from headrace.plan.user_function import step_name
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.explain import explain_partition
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition import (
    PartitionMode,
    PlanPartition,
    partition_plan,
    partition_with_mode,
)
from headrace.rewrites.split_space import compute_split_space
from headrace.service.client.options import ReadOptions
from headrace.service.config import ShardingPolicy

__all__ = [
    "describe_partition",
    "explain_unusable_position",
    "find_exclusive_reason",
    "has_element_ids",
    "is_partitioned",
    "partition_for",
    "with_visitation",
]


def partition_for(plan: Node, options: ReadOptions) -> PlanPartition | None:
    """Return the partition of a plan; None if workers run all of it.

    In ordered reading, `OrderedPartition` may later choose another mode, without other differences.

    Raises:
        FailedPreconditionError: If ordered reading requires a partition that is impossible, a
            step that opens datasets would run in the client over ordered elements, or a `repeat`
            in the client would read a cache there again.
    """
    if not is_partitioned(options):
        return None
    if not options.ordered and compute_split_space(canonicalize(plan).plan) is None:
        return None  # the dispatcher reports the reason
    partition = partition_plan(plan, ordered=options.ordered)
    if partition.is_ordered and partition.wants_element_numbers:
        raise FailedPreconditionError(_opens_datasets_message(partition))
    message = _reread_cache_message(partition)
    if message:
        raise FailedPreconditionError(message)
    if partition.is_ordered and options.visitation == "at_most_once":
        step = next(
            (each.step for each in partition.placements if each.runs_on == "client"), "a step"
        )
        raise FailedPreconditionError(
            f"visitation='at_most_once' is not supported for this dataset, because {step} requires "
            "the order of a single process: leave `visitation` out, or move that step after "
            "`distribute`"
        )
    is_whole = isinstance(partition.client_stage, ReadSplits) and not partition.is_ordered
    return None if is_whole else partition


def explain_unusable_position(plan: Node, mode: PartitionMode, *, is_single_process: bool) -> str:
    """Return why reading cannot start at a position; see `Source.explain_unusable_position`."""
    partition = partition_with_mode(prepare(plan), mode)
    if not partition.is_ordered:
        return ""
    if partition.wants_element_numbers:
        return (
            "a state of an ordered reading can be resumed only in the same order, but "
            f"{_opens_datasets_message(partition)}, or restore the state in a single process"
        )
    caches = [node for node in walk(partition.client_stage) if isinstance(node, Cache)]
    if caches and is_single_process:
        return (
            f"the state was saved in a single process with {step_name(caches[0])}, which caches "
            "nothing when it runs on elements from workers, so the position does not exist here: "
            "restore the state in a single process, or move that step after `distribute`"
        )
    return ""


def _reread_cache_message(partition: PlanPartition) -> str:
    """Return why a cache cannot run in the client, or ""; workers deliver each element once."""
    for repeat in walk(partition.client_stage):
        if isinstance(repeat, Repeat) and repeat.count != 1:
            cache = next((node for node in walk(repeat) if isinstance(node, Cache)), None)
            if cache is not None:
                return (
                    f"{step_name(cache)} requires the elements of all workers, so it would run in "
                    f"this process, and {step_name(repeat)} would read them from the workers "
                    "again, which deliver each element once: move both after `distribute`"
                )
    return ""


def _opens_datasets_message(partition: PlanPartition) -> str:
    (step, *_) = [node for node in walk(partition.client_stage) if node.uses_element_numbers]
    if isinstance(step, DrawRandomWords):
        return (
            f"{step_name(step, RandomMap.kind)} would run in this process on ordered elements that "
            "several workers computed, without the numbers of the elements from which its random "
            "numbers follow, which is not supported: move it before the steps that join elements "
            "of several files (such as `batch`), or after `distribute`"
        )
    return (
        f"{step_name(step)} would open datasets in this process for ordered elements from workers, "
        "which is not supported: move that step after `distribute`"
    )


def describe_partition(plan: Node, options: ReadOptions) -> str:
    """Return a description of the partition for unordered reading; "" if there is none."""
    if not is_partitioned(options) or compute_split_space(canonicalize(plan).plan) is None:
        return ""
    return explain_partition(partition_plan(plan, ordered=False))


def is_partitioned(options: ReadOptions) -> bool:
    """Return whether plans are partitioned if necessary."""
    is_dynamic = options.processing_mode is ShardingPolicy.DYNAMIC
    return is_dynamic and options.num_consumers is None and not options.trainer_id


def has_element_ids(plan: Node) -> bool:
    """Return whether workers can run the whole plan and its elements have ids."""
    if compute_split_space(canonicalize(plan).plan) is None:
        return True
    return isinstance(partition_plan(plan, ordered=False).client_stage, ReadSplits)


def find_exclusive_reason(partition: PlanPartition) -> str:
    """Return the client-stage step that depends on the whole stream; "" if there is none."""
    if partition.is_ordered:
        return "ordered reading"
    steps = [
        node for node in walk(partition.client_stage) if not isinstance(node, _STREAM_INDEPENDENT)
    ]
    return step_name(steps[0]) if steps else ""


_STREAM_INDEPENDENT = (ReadSplits, Batch, Unbatch, Map, Filter)
"""Steps that can run on any part of a stream; `Batch` may drop one remainder per client."""


def with_visitation(options: ReadOptions) -> ReadOptions:
    """Return options with the default delivery guarantee filled in."""
    if options.visitation is not None or not is_partitioned(options):
        return options
    return dataclasses.replace(options, visitation="exactly_once")
