"""Opening of a task's plan: the only module of the worker that calls the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.compact_columns import ConsecutiveSplits, InterleavedSplits
from headrace.element.metadata import constituent_counts, constituent_ids
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.execution.assigned_iterators import AssignedPlanIterator, count_finished_splits
from headrace.execution.build import Instrument, build_iterator, opens_files
from headrace.execution.element_ids import (
    IdRun,
    as_single_run,
    round_robin_runs,
    sort_to_runs,
    to_runs,
)
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.split_provider import PartialSplit, Pause
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.serialize import load_plan
from headrace.plan.traverse import merged_options
from headrace.plan.user_function import UserFunction
from headrace.rewrites.partition import PartitionMode
from headrace.rewrites.shard import shard_elements, shard_files, shard_hints
from headrace.service.element_sets import END_ORDINAL, ElementIdRun
from headrace.service.messages import TaskDefinition
from headrace.service.modes.coordinated_reads.round_shaping import RoundShaper
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.registry import look_up

__all__ = [
    "ChunkElementIds",
    "count_complete_splits",
    "count_yielded_splits",
    "find_element_ids",
    "max_started_splits",
    "open_plan",
    "state_after",
    "take_ended_splits",
]


def open_plan(
    plan: bytes,
    definition: TaskDefinition,
    next_splits: Callable[[], SplitGrant | None] | None,
    *,
    worker: str,
    instrument: Instrument | None = None,
    cost_plan: bytes = b"",
) -> ElementIterator:
    """Return an iterator over a task's elements.

    Args:
        plan: The pickled plan, as written.
        definition: Definition with the epoch, the shard, and the seed for random steps without a
            fixed seed, unless the plan's options set one.
        next_splits: Returns the task's next splits; None reads the whole plan.
        worker: Address of the worker, for errors.
        instrument: See `execution.build.build_iterator`.
        cost_plan: The pickled plan of the cost function; empty if there is none.

    Raises:
        FailedPreconditionError: If the plan needs a module that is not installed, if another Python
            version pickled it, or if its kind of shard is unknown.
        NotFoundError: If it must be sharded by files and reads something else.
        InvalidArgumentError: If there are fewer files than workers.
    """
    try:
        node = load_plan(plan)
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(
            f"worker {worker} cannot load the dataset: {error}. Functions of modules are pickled "
            "by reference: make the module importable on the worker, or pickle it by value with "
            f'`modules=["{(error.name or "").partition(".")[0]}"]` of `distribute` or '
            "`register_dataset`"
        ) from error
    if (
        definition.shard_kind
        and definition.num_shards is not None
        and definition.shard_index is not None
    ):
        take_shard = look_up(_SHARD_FUNCTIONS, definition.shard_kind, definition, "shard kind")
        node = take_shard(node, definition.num_shards, definition.shard_index)
    plan_seed = merged_options(node).seed
    iterator = build_iterator(
        node,
        seed=definition.seed if plan_seed is None else plan_seed,
        step_seeds=definition.fixed_seeds,
        epochs=definition.epoch,
        next_splits=None if next_splits is None else partial(_next_engine_splits, next_splits),
        with_element_ids=definition.has_element_ids,
        mode=cast(PartitionMode, definition.partition_mode) if definition.partition_mode else None,
        contain_exits=True,
        is_read_only=True,  # the elements are only sent
        instrument=instrument,
    )
    return _shape_rounds(iterator, definition, cost_plan)


def _shape_rounds(
    iterator: ElementIterator, definition: TaskDefinition, cost_plan: bytes
) -> ElementIterator:
    """Return an iterator over the same elements, or over rounds with redistributed rows."""
    consumers, remainder = definition.num_consumers, definition.remainder
    if consumers is None or (remainder == "drop" and not cost_plan):
        return iterator
    cost_fn = None
    if cost_plan:
        step = load_plan(cost_plan)
        assert isinstance(step, Map), step
        cost_fn = UserFunction(step.fn, "cost_fn", contain_exits=True)
    return RoundShaper(
        iterator,
        consumers,
        remainder=remainder,
        cost_fn=cost_fn,
        count_begun=lambda: max_started_splits(iterator),
    )


def _next_engine_splits(
    next_splits: Callable[[], SplitGrant | None],
) -> tuple[int, int] | PartialSplit | Pause | None:
    """Return the next splits in the form of the engine."""
    grant = next_splits()
    if grant is not None and grant.is_pause:
        return Pause.PAUSE
    if grant is None or not grant.ordinals:
        return None if grant is None else grant.splits
    assert grant.splits is not None
    wanted_ordinals = tuple(
        (start, None if stop == END_ORDINAL else stop) for start, stop in grant.ordinals
    )
    return PartialSplit(split=grant.splits[0], wanted_ordinals=wanted_ordinals)


def _shard_by_file(plan: Node, num_shards: int, shard_index: int) -> Node:
    return shard_files(plan, num_shards, shard_index, opens_files)


def _shard_by_file_or_element(plan: Node, num_shards: int, shard_index: int) -> Node:
    try:
        return _shard_by_file(plan, num_shards, shard_index)
    except NotFoundError:
        return shard_elements(plan, num_shards, shard_index)


_SHARD_FUNCTIONS: dict[str, Callable[[Node, int, int], Node]] = {
    "files": _shard_by_file,
    "elements": shard_elements,
    "files_or_elements": _shard_by_file_or_element,
    "hints": shard_hints,
}
"""Functions that reduce a plan to one worker's shard."""


def state_after(chunk: Chunk) -> State:
    """Return the state after the last element of a chunk."""
    return chunk.state_at(chunk.size)


def max_started_splits(iterator: ElementIterator) -> int:
    """Return an upper bound, in assignment order, of the splits that have yielded elements."""
    return iterator.num_started if isinstance(iterator, AssignedPlanIterator | RoundShaper) else 0


class ChunkElementIds(NamedTuple):
    """Element ids of a chunk by split of the stream, as in `messages.ElementIds`."""

    runs: tuple[ElementIdRun, ...] = ()
    is_permuted: bool = False
    permutation: bytes = b""
    interleaving: tuple[tuple[int, ...], int, int, int] | None = None
    ids_per_element: tuple[int, ...] = ()


def find_element_ids(chunk: Chunk) -> ChunkElementIds:
    """Return the element ids of a chunk.

    If splits are interleaved, the ids are sorted by split, which needs fewer runs.
    """
    column = chunk.compact_metadata
    assert column is not None, "the iterator was built without element ids"
    if isinstance(column, ConsecutiveSplits):
        assert column.ordinal is not None, "the elements are from below the partition boundary"
        return ChunkElementIds((IdRun(column.first_split, column.size, column.ordinal, 1),))
    if isinstance(column, InterleavedSplits):
        is_permuted, runs = round_robin_runs(column)
        if not is_permuted:
            return ChunkElementIds(runs)
        return ChunkElementIds(
            runs, True, interleaving=(column.splits, column.turn_size, column.start, column.size)
        )
    assert isinstance(column, np.ndarray)
    splits, ordinals = constituent_ids(column)
    run = as_single_run(splits, ordinals)
    if run is not None:
        return ChunkElementIds((run,), ids_per_element=constituent_counts(column))
    steps = splits[1:] - splits[:-1]
    is_permuted = bool((steps < 0).any() or ((steps == 0) & (ordinals[1:] < ordinals[:-1])).any())
    ids_per_element = constituent_counts(column)
    if not is_permuted:
        return ChunkElementIds(to_runs(splits, ordinals), ids_per_element=ids_per_element)
    order, runs = sort_to_runs(splits, ordinals)
    return ChunkElementIds(runs, True, _pack_order(order), ids_per_element=ids_per_element)


def _pack_order(order: NDArray[np.integer[Any]]) -> bytes:
    return order.astype("<u4").tobytes()


def count_yielded_splits(iterator: ElementIterator) -> int:
    """Return the number of splits that were yielded completely at the last pause or the end."""
    return iterator.num_delivered if isinstance(iterator, AssignedPlanIterator) else 0


def take_ended_splits(iterator: ElementIterator) -> tuple[tuple[int, int, int], ...]:
    """Return (split, number of splits, elements per split) of the ends since the last call."""
    return iterator.take_finished() if isinstance(iterator, AssignedPlanIterator) else ()


def count_complete_splits(state: State, before: int) -> int:
    """Return the number of splits complete at a state, if `before` of them were complete earlier.

    A step that holds elements keeps the input state of the oldest of them, so the number in the
    state may decrease.
    """
    done = count_finished_splits(state)
    return before if done is None else max(before, done)
