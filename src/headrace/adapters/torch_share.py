"""Which part of a dataset a rank reads, and which of that each process of a DataLoader.

    element     0   1   2   3   4   5   6   7   8        two ranks, two processes each
    rank 0      a       b       a       b                 process a: 0, 4; b: 2, 6
    rank 1          a       b       a       b             process a: 1, 5; b: 3, 7
    nobody                                      8         the last round is not complete

Rule 1. What ranks read together is every element once, but for a last round that is not complete:
        ranks whose steps wait for each other must end together.
Rule 2. A rank's processes take its elements in turn. A DataLoader asks them in turn, so it gives
        them in the order that they have without processes.
Rule 3. A dataset that comes from a data service is not shared by ranks: its jobs say who gets what.
Rule 4. A state counts the rounds, so that another number of ranks goes on from it.

Where nobody knows how many elements there are, a step of the plan (`Rounds`) reads each round to
its end, so that ranks end together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError
from headrace.execution.build import opens_files
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.buffering import Prefetch
from headrace.plan.combining import Interleave
from headrace.plan.determinism import free_steps
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy, WithOptions
from headrace.plan.ordering import Shard, ShardBlocks, Skip, Take
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import cardinality, merged_options, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.normal import normalize
from headrace.rewrites.shard import shard_files, shard_hints

__all__ = [
    "ALL",
    "Part",
    "Rounds",
    "comes_from_a_service",
    "draws_without_seed",
    "is_by_hand",
    "is_read_ahead",
    "may_end_apart",
    "repeated_work",
    "shared",
]


@dataclass(frozen=True)
class Part:
    """Part `index` of so many."""

    count: int = 1
    index: int = 0


ALL = Part()


def shared(
    plan: Node, ranks: Part, processes: Part, *, drop_remainder: bool, start: int = 0
) -> Node:
    """Return what one process of one rank reads of a plan.

    Args:
        plan: As written.
        ranks: Which rank this is; `ALL`: the plan is not shared by ranks.
        processes: Which process of a DataLoader this is, of its rank's.
        drop_remainder: Whether the last round is left out if not every rank has an element there.
        start: How many elements of the plan were read before, by all ranks together.

    Raises:
        FailedPreconditionError: It goes on from a place that only its own ranks have; its order is
            another each time; or it comes from a data service by a job of this process alone, and
            several would read it.
    """
    if comes_from_a_service(plan):
        _check_job(plan, processes)
        _check_start(start, "it comes from a data service")
        return plan
    policy = merged_options(plan).auto_shard_policy
    everyone = Part(ranks.count * processes.count, processes.index * ranks.count + ranks.index)
    if everyone.count > 1 and policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        _check_start(start, f"AutoShardPolicy.{policy.name} shares it")
        if policy is AutoShardPolicy.HINT:
            return shard_hints(plan, everyone.count, everyone.index)
        return shard_files(plan, everyone.count, everyone.index, opens_files)
    if everyone.count > 1 or start:
        plan = _by_elements(plan, ranks, processes, drop_remainder, start)
        _check_order(plan, everyone)
    return plan


def _by_elements(
    plan: Node, ranks: Part, processes: Part, drop_remainder: bool, start: int
) -> Node:
    """Return every n-th element of a plan, with as few steps below the choice as can be.

    What makes one element of one, and a batch of as many rows, stays above, so that it runs for
    these elements alone:

        Batch(Map(rows))   ->   Batch(Map(ShardBlocks(rows)))
    """
    size = cardinality(plan)
    above: list[Node] = []
    plan = _lifted(plan, above)
    block, short = 1, False
    if isinstance(plan, Batch | PaddedBatch):
        block, short = plan.size, not plan.drop_remainder
        above.append(plan)
        plan = _lifted(plan.input, above)
    if start:
        plan = Skip(input=plan, count=start * block)
    if ranks.count > 1 and drop_remainder and size == UNKNOWN:
        plan = Rounds(input=plan, count=ranks.count, index=ranks.index, block=block, short=short)
    elif ranks.count > 1:
        if drop_remainder and size != INFINITE:
            rounds = max(0, size - start) // ranks.count
            plan = Take(input=plan, count=rounds * ranks.count * block)
        plan = _part_of(plan, ranks, block)
    plan = _part_of(plan, processes, block)
    for step in reversed(above):
        plan = step.with_inputs([plan])
    return plan


def _lifted(plan: Node, above: list[Node]) -> Node:
    """Return what lies below the steps that make one element of one, and note these."""
    while plan.one_to_one:
        above.append(plan)
        (plan,) = plan.inputs
    return plan


def _part_of(plan: Node, part: Part, block: int) -> Node:
    if part.count == 1:
        return plan
    if block == 1:
        return Shard(input=plan, num_shards=part.count, index=part.index)
    return ShardBlocks(input=plan, num_shards=part.count, index=part.index, block=block)


def may_end_apart(plan: Node, ranks: Part) -> bool:
    """Say whether ranks may end at different steps, as where each reads files of its own."""
    policy = merged_options(plan).auto_shard_policy
    return ranks.count > 1 and policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)


def is_by_hand(plan: Node, ranks: Part) -> bool:
    """Say whether a plan is what `shard(world size, rank)` made for this rank.

    Raises:
        FailedPreconditionError: It has a shard of as many, and of another index, which may be a
            rank's or a split of the data.
    """
    found = [node for node in walk(plan) if isinstance(node, Shard)]
    indices = {node.index for node in found if node.num_shards == ranks.count}
    if indices and ranks.index not in indices:
        raise FailedPreconditionError(
            f"the dataset has a step shard({ranks.count}, {min(indices)}), and this is rank "
            f"{ranks.index} of {ranks.count}: if the step shares the data among ranks, give it "
            "this rank; if it is a split of the data, call loader(..., shard=(num_shards, index)), "
            "or shard=False for all of it on every rank"
        )
    return bool(indices)


def comes_from_a_service(plan: Node) -> bool:
    """Say whether a data service makes elements of a plan."""
    return any(_remote_sources(plan))


def is_read_ahead(plan: Node) -> bool:
    """Say whether what comes next of a plan is being made already, on threads or elsewhere."""
    while isinstance(plan, WithOptions | Shard | Skip | Take):
        plan = plan.input
    return isinstance(plan, Prefetch) or (
        isinstance(plan, FromSource) and plan.source.keeper is not None
    )


def draws_without_seed(plan: Node) -> bool:
    """Say whether a step of a plan draws, and was given no seed."""
    return any(
        node.draws and getattr(node, "seed", None) is None and hasattr(node, "seed")
        for node in walk(plan)
    )


def _remote_sources(plan: Node) -> Iterator[Any]:
    for node in walk(plan):
        if isinstance(node, FromSource) and node.source.keeper is not None:
            yield node.source


def _check_job(plan: Node, processes: Part) -> None:
    if processes.count == 1:
        return
    if any(getattr(source, "job_name", None) is None for source in _remote_sources(plan)):
        raise FailedPreconditionError(
            f"each of the {processes.count} worker processes of the DataLoader would read the "
            "whole dataset from the data service: use num_workers=0, for the service has worker "
            "processes of its own, or give `distribute` a job_name, so that they share its job"
        )


def _check_order(plan: Node, everyone: Part) -> None:
    """Refuse a plan whose elements are shared by their numbers, where these are not the same."""
    normal = normalize(plan)
    free = free_steps(normal.plan, normal.options.deterministic)
    found = next((step for step in _below_shares(normal.plan) if id(step) in free), None)
    if found is not None:
        raise FailedPreconditionError(
            f"{step_name(found)} gives elements as they are ready (deterministic=False), so the "
            f"{everyone.count} processes that share the dataset would not agree which element is "
            "whose: leave that out, or share the input with shard() before it"
        )


def repeated_work(plan: Node) -> str:
    """Return the name of a step that everybody runs for the elements of all; "": there is none.

    Args:
        plan: What `shared` returned.
    """
    for step in _below_shares(normalize(plan).plan):
        if isinstance(step, Map | Interleave):
            return step_name(step)
    return ""


def _below_shares(plan: Node) -> Iterator[Node]:
    """Yield the steps of a plan in normal form whose elements all readers must count."""
    for node in walk(plan):
        if isinstance(node, Shard | ShardBlocks | Rounds):
            yield from walk(node.input)


def _check_start(start: int, why: str) -> None:
    if start:
        raise FailedPreconditionError(
            "the state was taken by another rank, or among another number of them, and this "
            f"dataset cannot go on from it: {why}; restore it on the rank that saved it, of as many"
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rounds(Node):
    """Keep block `index` of each `count` in a row; a last round that is not complete is dropped.

    It is a shard whose readers all get equally many blocks, each without a word to the others:
    every one reads a round to its end before it gives its block.
    """

    kind: ClassVar[str] = "rounds"
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True

    input: Node
    count: int
    index: int
    block: int = 1
    """Elements in a block."""
    short: bool = False
    """Whether a round is complete, too, if its last block has fewer elements."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        self.keep_int("count", minimum=1)
        self.keep_int("index", minimum=0)
        self.keep_int("block", minimum=1)

    def cardinality(self, *inputs: int) -> int:
        """Return INFINITE, or UNKNOWN: where it is known, a shard will do."""
        return INFINITE if inputs[0] == INFINITE else UNKNOWN


@make_iterator.register(Rounds)
class _RoundsIterator(ElementIterator):
    """Reads a round, then gives its block.

    Its state is where the round begins, how much of it failed already, and how much of the block
    was given. What fails is raised when it is read, and counts as none.
    """

    def __init__(self, node: Rounds, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._first, self._stop = node.index * node.block, (node.index + 1) * node.block
        self._size = node.count * node.block
        self._least = self._size - node.block + 1 if node.short else self._size
        self._begin(self._input.get_state())

    def _begin(self, start: State, failed: int = 0, given: int = 0) -> None:
        """Stand in a round of which nothing is read yet."""
        self._start = start
        self._failed = failed
        #: Failures that were raised before, and are met again.
        self._known = failed
        self._read = 0
        self._kept: list[Chunk] = []
        #: Elements of the block that were given.
        self._given = given
        self._is_read = False

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input.reads_ahead_freely

    def next_chunk(self, limit: int) -> Chunk | None:
        while not (self._is_read and self._kept):
            if self._is_read:  # all of it was given before a restore
                self._begin(self._input.get_state())
            if not self._read_round():
                return None
        chunk = self._kept[0].slice(0, limit)
        self._kept = _after(self._kept, chunk.size)
        before = self.get_state()
        self._given += chunk.size
        if not self._kept:
            self._begin(self._input.get_state())
        after = self.get_state()
        size, given = chunk.size, before["given"]
        return chunk.with_states(
            lambda index: after if index == size else {**before, "given": given + index}
        )

    def _read_round(self) -> bool:
        """Read a round to its end, and keep the block; False: there is none."""
        while self._read < self._size:
            try:
                chunk = self._input.next_chunk(self._size - self._read)
            except Exception:
                if self._known:
                    self._known -= 1
                    continue
                self._failed += 1
                raise
            if chunk is None:
                if self._read < self._least:
                    return False
                break
            kept = chunk.slice(self._first - self._read, self._stop - self._read)
            if kept.size:
                self._kept.append(kept)
            self._read += chunk.size
        self._kept = _after(self._kept, self._given)
        self._is_read = True
        return True

    def get_state(self) -> State:
        return {"input": self._start, "failed": self._failed, "given": self._given}

    def set_state(self, state: State) -> None:
        self._input.set_state(state["input"])
        self._begin(state["input"], state["failed"], state["given"])

    def close(self) -> None:
        self._input.close()


def _after(chunks: list[Chunk], count: int) -> list[Chunk]:
    """Return what comes after so many elements."""
    rest = []
    for chunk in chunks:
        if count < chunk.size:
            rest.append(chunk.slice(count, chunk.size))
        count = max(0, count - chunk.size)
    return rest
