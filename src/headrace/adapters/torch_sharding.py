"""Sharding of a dataset by rank, and of a rank's shard by worker process of a DataLoader.

    element     0   1   2   3   4   5   6   7   8        two ranks, two processes each
    rank 0      a       b       a       b                 process a: 0, 4; b: 2, 6
    rank 1          a       b       a       b             process a: 1, 5; b: 3, 7
    dropped                                     8         the last round is incomplete

Rule 1. All ranks together read every element once, except for an incomplete last round: ranks whose
        training steps wait for each other must end together.
Rule 2. A rank's worker processes take its elements in turn. A DataLoader polls them in turn, so it
        yields the same order as without worker processes.
Rule 3. A dataset of a data service is not sharded by rank: its job distributes the elements. One
        that ends in `in_processes` is, like a local one, because each rank has its own processes.
Rule 4. A state counts rounds, so it can be restored with another number of ranks.

If the number of elements is unknown, a step of the plan (`ShardFullRounds`) reads each round
completely before it yields, so that ranks end together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.adapters.torch_full_rounds import ShardFullRounds
from headrace.errors import FailedPreconditionError
from headrace.execution.build import opens_files
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.buffering import Prefetch
from headrace.plan.combining import Interleave
from headrace.plan.determinism import find_unordered_steps
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy, WithOptions
from headrace.plan.ordering import ShardBlocks, ShardElements, Skip, Take
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import cardinality, merged_options, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.canonicalize import canonicalize
from headrace.rewrites.process_pools import ProcessPool, inline_pools, shard_in_pools
from headrace.rewrites.shard import shard_files, shard_hints

__all__ = [
    "WHOLE_DATASET",
    "DataShard",
    "draws_without_seed",
    "find_repeated_step",
    "is_read_ahead",
    "is_sharded_manually",
    "may_end_at_different_steps",
    "reads_data_service",
    "shard_plan",
]


@dataclass(frozen=True)
class DataShard:
    """Shard `index` of `count`."""

    count: int = 1
    index: int = 0


WHOLE_DATASET = DataShard()


def shard_plan(
    plan: Node,
    rank_shard: DataShard,
    worker_shard: DataShard,
    *,
    drop_remainder: bool,
    start: int = 0,
) -> Node:
    """Return the plan that one worker process of one rank reads.

    Args:
        plan: Plan of the whole dataset.
        rank_shard: Shard of the rank; `WHOLE_DATASET` if the plan is not sharded by rank.
        worker_shard: Part of the rank's shard that this worker process reads.
        drop_remainder: Whether to drop the last round unless every rank has an element in it.
        start: Number of elements that all ranks together have read before.

    Raises:
        FailedPreconditionError: If `start` is not 0 but the position is only known per rank; if the
            order of elements differs between readers; or if several processes would read a job of
            a data service that is not shared.
    """
    if reads_data_service(plan):
        _check_job(plan, worker_shard)
        _check_start(start, "it reads from a data service")
        return plan
    policy = merged_options(plan).auto_shard_policy
    count = rank_shard.count * worker_shard.count
    index = worker_shard.index * rank_shard.count + rank_shard.index
    if count > 1 and policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        _check_start(start, f"it is sharded with AutoShardPolicy.{policy.name}")
        if policy is AutoShardPolicy.HINT:
            return shard_in_pools(plan, lambda opened: shard_hints(opened, count, index))
        return shard_in_pools(plan, lambda opened: shard_files(opened, count, index, opens_files))
    if count > 1 or start:
        plan = shard_in_pools(
            plan,
            lambda opened: _shard_elements(opened, rank_shard, worker_shard, drop_remainder, start),
        )
        _check_order(plan, count)
    return plan


def _shard_elements(
    plan: Node, rank_shard: DataShard, worker_shard: DataShard, drop_remainder: bool, start: int
) -> Node:
    """Return a plan for every n-th element, with the shard step as early as possible.

    Steps that map one element to one, and a batch of n rows, stay after it, so that they run only
    for the elements of the shard:

        Batch(Map(rows))   ->   Batch(Map(ShardBlocks(rows)))

    A pool of worker processes cannot run a step below `ShardFullRounds`, nor one-to-one steps above
    it, so that step stays above the pool.
    """
    size = cardinality(plan)
    needs_rounds = rank_shard.count > 1 and drop_remainder and size == UNKNOWN
    above: list[Node] = []
    plan = _strip_one_to_one(plan, above, enters_pools=not needs_rounds)
    block, short = 1, False
    if isinstance(plan, Batch | PaddedBatch):
        block, short = plan.size, not plan.drop_remainder
        above.append(plan)
        plan = _strip_one_to_one(plan.input, above, enters_pools=not needs_rounds)
    if start:
        plan = Skip(input=plan, count=start * block)
    if needs_rounds:
        plan = ShardFullRounds(
            input=plan,
            count=rank_shard.count,
            index=rank_shard.index,
            block=block,
            allows_short_block=short,
        )
    elif rank_shard.count > 1:
        if drop_remainder and size != INFINITE:
            rounds = max(0, size - start) // rank_shard.count
            plan = Take(input=plan, count=rounds * rank_shard.count * block)
        plan = _add_shard(plan, rank_shard, block)
    plan = _add_shard(plan, worker_shard, block)
    for step in reversed(above):
        plan = step.copy_with_inputs([plan])
    return plan


def _strip_one_to_one(plan: Node, above: list[Node], *, enters_pools: bool) -> Node:
    """Return the plan below its last one-to-one steps, and append these to `above`."""
    while plan.one_to_one and (enters_pools or not isinstance(plan, ProcessPool)):
        above.append(plan)
        (plan,) = plan.inputs
    return plan


def _add_shard(plan: Node, shard: DataShard, block: int) -> Node:
    if shard.count == 1:
        return plan
    if block == 1:
        return ShardElements(input=plan, num_shards=shard.count, index=shard.index)
    return ShardBlocks(input=plan, num_shards=shard.count, index=shard.index, block_size=block)


def may_end_at_different_steps(plan: Node, rank_shard: DataShard) -> bool:
    """Return whether ranks may end at different steps, for instance if each reads its own files."""
    policy = merged_options(plan).auto_shard_policy
    return rank_shard.count > 1 and policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)


def is_sharded_manually(plan: Node, rank_shard: DataShard) -> bool:
    """Return whether a plan contains `shard(world_size, rank)` for this rank.

    Raises:
        FailedPreconditionError: If it has a shard of the same count but another index, which may be
            another rank's shard or a split of the data.
    """
    found = [node for node in walk(inline_pools(plan)) if isinstance(node, ShardElements)]
    indices = {node.index for node in found if node.num_shards == rank_shard.count}
    if indices and rank_shard.index not in indices:
        raise FailedPreconditionError(
            f"the dataset has a step shard({rank_shard.count}, {min(indices)}), but this is rank "
            f"{rank_shard.index} of {rank_shard.count}: if the step shards the data by rank, pass "
            "it this rank; if it is a split of the data, call loader(..., shard=(num_shards, "
            "index)), or shard=False to read all of it on every rank"
        )
    return bool(indices)


def reads_data_service(plan: Node) -> bool:
    """Return whether a plan reads from a data service; worker processes of a pool are none."""
    return any(_remote_sources(plan))


def is_read_ahead(plan: Node) -> bool:
    """Return whether elements are prepared ahead, by threads, processes or a data service."""
    while isinstance(plan, WithOptions | ShardElements | Skip | Take):
        plan = plan.input
    return isinstance(plan, Prefetch) or (
        isinstance(plan, FromSource) and plan.source.replay_buffers is not None
    )


def draws_without_seed(plan: Node) -> bool:
    """Return whether a step of a plan is random and has no seed."""
    return any(
        node.is_random and getattr(node, "seed", None) is None and hasattr(node, "seed")
        for node in walk(inline_pools(plan))
    )


def _remote_sources(plan: Node) -> Iterator[Any]:
    for node in walk(plan):
        if not isinstance(node, FromSource) or node.source.is_process_pool:
            continue
        if node.source.replay_buffers is not None:
            yield node.source


def _check_job(plan: Node, worker_shard: DataShard) -> None:
    if worker_shard.count == 1:
        return
    if any(getattr(source, "job_name", None) is None for source in _remote_sources(plan)):
        raise FailedPreconditionError(
            f"each of the {worker_shard.count} worker processes of the DataLoader would read the "
            "whole dataset from the data service: use num_workers=0, because the service has its "
            "own workers, or pass a job_name to `distribute`, so that the processes share its job"
        )


def _check_order(plan: Node, num_readers: int) -> None:
    """Raise an error if elements are sharded by number but their order differs between readers."""
    canonical = canonicalize(plan)
    unordered = find_unordered_steps(canonical.plan, canonical.options.deterministic)
    step = next(
        (step for step in _steps_below_shards(canonical.plan) if id(step) in unordered), None
    )
    if step is not None:
        raise FailedPreconditionError(
            f"{step_name(step)} yields elements as they are ready (deterministic=False), so the "
            f"order differs between the {num_readers} processes that shard the dataset by element "
            "number: make it deterministic, or call shard() before it"
        )


def find_repeated_step(plan: Node) -> str:
    """Return the name of a step that every reader runs for all elements; "" if there is none.

    Args:
        plan: A plan returned by `shard_plan`.
    """
    for step in _steps_below_shards(canonicalize(inline_pools(plan)).plan):
        if isinstance(step, Map | Interleave):
            return step_name(step)
    return ""


def _steps_below_shards(plan: Node) -> Iterator[Node]:
    """Yield the steps of a canonical plan below its shard steps, which every reader runs."""
    for node in walk(plan):
        if isinstance(node, ShardElements | ShardBlocks | ShardFullRounds):
            yield from walk(node.input)


def _check_start(start: int, reason: str) -> None:
    if start:
        raise FailedPreconditionError(
            "the state was taken by another rank, or with another number of ranks, but this "
            f"dataset cannot continue from it, because {reason}; restore it on the same rank of "
            "the same number of ranks"
        )
