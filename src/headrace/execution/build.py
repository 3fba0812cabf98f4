"""Building of iterators from plans."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError

# Imported to register iterators.
from headrace.execution import (  # noqa: F401
    batching,
    boundary_iterators,
    buffering,
    caching,
    combining,
    concat_then_split,
    cost_batching,
    elements,
    elementwise,
    ignoring_errors,
    input_selection,
    interleave,
    ordering,
    packing,
    random_map,
    reading,
    scanning,
    shuffle,
    sliding_windows,
    unique,
    windows,
)
from headrace.execution import read_splits as _read_splits  # noqa: F401
from headrace.execution.assigned_iterators import AssignedPlanIterator, MultiSplitIterator
from headrace.execution.boundary_iterators import SingleSplitIterator
from headrace.execution.context import (
    Context,
    PlanIteration,
    SplitSource,
    check_coordinated_readers,
    number_occurrences,
)
from headrace.execution.error_counter import ErrorCounter
from headrace.execution.iterator import ElementIterator, make_iterator
from headrace.execution.split_progress import SplitProgress
from headrace.execution.split_provider import NextSplits, PartialSplit, PositionSplitProvider
from headrace.plan.combining import Interleave
from headrace.plan.determinism import collect_fixed_seeds, find_unordered_steps, with_fixed_seeds
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.source import IndexedSource
from headrace.plan.traverse import find_borrowing_steps, find_leaves, fold, transform, walk
from headrace.plan.user_function import UserFunction, step_name
from headrace.rewrites.canonicalize import NO_OPTIONS, CanonicalPlan
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition import PartitionMode, PlanPartition, partition_with_mode
from headrace.rewrites.partition_boundaries import insert_boundaries, without_boundaries
from headrace.rewrites.shard import reads_files
from headrace.rewrites.split_space import compute_split_space
from headrace.sources.memory import RangeSource, SlicesSource, TensorsSource

__all__ = [
    "InProcessSplitSource",
    "Instrument",
    "build_both_stages",
    "build_client_stage",
    "build_iterator",
    "build_nested",
    "draw_seed",
    "opens_files",
]

Instrument: TypeAlias = Callable[[Node, ElementIterator], ElementIterator]


def build_iterator(
    plan: Node,
    *,
    seed: int | None = None,
    step_seeds: Sequence[int] = (),
    epochs: tuple[int, ...] = (0,),
    iteration: PlanIteration | None = None,
    next_splits: NextSplits | None = None,
    with_element_ids: bool = False,
    mode: PartitionMode | None = None,
    contain_exits: bool = False,
    is_read_only: bool = False,
    is_preview: bool = False,
    instrument: Instrument | None = None,
    ignored_errors: ErrorCounter | None = None,
) -> ElementIterator:
    """Return an iterator over the plan's elements; nothing is opened before the first read.

    Args:
        plan: The plan as written.
        seed: Seed of random steps that have none; None uses the seed of the plan's options, or
            draws one.
        step_seeds: Fixed seeds (`plan.determinism`) of a saved state; () uses those of the plan.
        epochs: Epoch numbers; shuffles differ between epochs.
        iteration: Numbers the iterations of shared jobs in nested datasets; required if the plan is
            started again within one iteration.
        next_splits: Returns the next assigned splits (`rewrites.split_space`). None reads the whole
            plan.
        with_element_ids: Whether chunks carry element ids (`element_ids.element_id_runs`). Splits
            may then be assigned partially.
        mode: Runs only the worker stage of the plan, partitioned in this mode
            (`rewrites.partition`), with assigned splits. None runs the whole plan.
        contain_exits: Whether SystemExit and the like from a user's function become a
            UserFunctionError, for processes with other work.
        is_read_only: Whether the consumer never writes to elements. Sources and caches then return
            borrowed buffers instead of copies.
        is_preview: Whether to take no elements from other readers (`Source.detach`), including in
            nested datasets.
        instrument: Wraps the iterator of each node (`InstrumentedIterator`), also in nested
            datasets. None wraps nothing.
        ignored_errors: Counts the elements that `ignore_errors` drops, from 0.

    Raises:
        FailedPreconditionError: If `next_splits` is given, but the plan has no splits; if element
            ids are wanted, but a step works on the whole stream; or if thousands of steps are
            chained.
    """
    if is_preview:
        plan = _detach_sources(plan)
    check_coordinated_readers(plan)
    plan = number_occurrences(plan)
    prepared = prepare(with_fixed_seeds(plan, step_seeds or collect_fixed_seeds(plan)))
    wants_element_numbers = False
    if mode is not None:
        partition = partition_with_mode(prepared, mode)
        prepared = CanonicalPlan(partition.worker_stage, partition.options)
        wants_element_numbers = partition.wants_element_numbers
        if not with_element_ids:
            prepared = CanonicalPlan(without_boundaries(prepared.plan), prepared.options)
    unordered_steps = _find_unordered_steps(prepared.plan, prepared.options, mode)
    if with_element_ids:
        prepared = _insert_boundaries(prepared, unordered_steps)
        unordered_steps = _find_unordered_steps(prepared.plan, prepared.options, mode)
    _raise_recursion_limit(prepared.plan)
    if seed is None:
        seed = prepared.options.seed
    context = Context(
        build=_build_detached if is_preview else build_nested,
        seed=draw_seed() if seed is None else seed,
        epochs=epochs,
        iteration=iteration or PlanIteration(),
        options=prepared.options,
        unordered_steps=unordered_steps,
        borrowing_steps=find_borrowing_steps(prepared.plan) if is_read_only else frozenset(),
        contain_exits=contain_exits,
        wants_element_numbers=wants_element_numbers,
        is_whole_pipeline=mode in (None, "unordered"),
        ignored_errors=ignored_errors or ErrorCounter(),
        parallelism=_count_cores(),
    )
    if instrument is not None:
        context = dataclasses.replace(context, instrument=instrument)
    if next_splits is not None:
        return _build_assigned(prepared.plan, context, next_splits, with_element_ids)
    return make_iterator(prepared.plan, context)


def build_client_stage(
    partition: PlanPartition,
    source: SplitSource,
    *,
    seed: int,
    epochs: tuple[int, ...] = (0,),
    instrument: Instrument | None = None,
) -> ElementIterator:
    """Return an iterator over the client stage of a plan.

    Args:
        partition: The partitioned plan.
        source: Source of the elements of splits.
        seed: Seed of the worker stage.
        epochs: Epoch numbers of the worker stage.
        instrument: As for `build_iterator`.
    """
    _raise_recursion_limit(partition.client_stage)
    context = Context(
        build=build_nested,
        seed=seed,
        epochs=epochs,
        options=partition.options,
        unordered_steps=_find_unordered_steps(
            partition.client_stage, partition.options, partition.mode
        ),
        split_source=source,
        splits_have_numbers=partition.wants_element_numbers,
        parallelism=_count_cores(),
    )
    if instrument is not None:
        context = dataclasses.replace(context, instrument=instrument)
    return make_iterator(partition.client_stage, context)


def build_both_stages(
    plan: Node,
    mode: PartitionMode,
    *,
    seed: int,
    step_seeds: Sequence[int] = (),
    epochs: tuple[int, ...] = (0,),
    instrument: Instrument | None = None,
) -> ElementIterator:
    """Return an iterator that runs both stages of a plan in this process.

    It continues from a state that was saved with the data service, without a service.

    Args:
        plan: The plan as written.
        mode: Partition mode of the saved state.
        seed: As for `build_iterator`.
        step_seeds: As for `build_iterator`.
        epochs: As for `build_iterator`.
        instrument: As for `build_iterator`.
    """
    partition = partition_with_mode(
        prepare(with_fixed_seeds(plan, step_seeds or collect_fixed_seeds(plan))), mode
    )

    def build_worker_stage(next_splits: NextSplits) -> AssignedPlanIterator:
        iterator = build_iterator(
            plan,
            seed=seed,
            step_seeds=step_seeds,
            epochs=epochs,
            next_splits=next_splits,
            with_element_ids=True,
            mode=mode,
            instrument=instrument,
        )
        assert isinstance(iterator, AssignedPlanIterator)
        return iterator

    return build_client_stage(
        partition,
        InProcessSplitSource(build_worker_stage),
        seed=seed,
        epochs=epochs,
        instrument=instrument,
    )


def _find_unordered_steps(
    plan: Node, options: Options, mode: PartitionMode | None
) -> frozenset[int]:
    """Return the unordered steps (`plan.determinism`); none in an ordered mode."""
    if mode is not None and mode != "unordered":
        return frozenset()
    return find_unordered_steps(plan, options.deterministic)


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def _insert_boundaries(prepared: CanonicalPlan, unordered_steps: frozenset[int]) -> CanonicalPlan:
    """Return a plan with partition boundaries, if it has several splits."""
    split_space = compute_split_space(prepared.plan)
    if split_space is None or split_space.is_single_split:
        return prepared
    return CanonicalPlan(insert_boundaries(prepared.plan, unordered_steps), prepared.options)


def _raise_recursion_limit(plan: Node) -> None:
    """Raise Python's recursion limit if a deep plan needs it.

    Raises:
        FailedPreconditionError: If the plan is too deep for the stack.
    """
    depth = fold(plan, lambda node, inputs: 1 + max(inputs, default=0), once=True)
    needed = _BASE_FRAMES + depth * _FRAMES_PER_STEP
    if needed <= sys.getrecursionlimit():
        return
    if depth > _MAX_DEPTH:
        raise FailedPreconditionError(
            f"the dataset has {depth} nested steps, and at most {_MAX_DEPTH} can run; join "
            "steps: several functions into one `map`, several datasets with "
            "`from_tensor_slices(...).flat_map(...)`"
        )
    sys.setrecursionlimit(needed)


_BASE_FRAMES = 1000
_FRAMES_PER_STEP = 8
_MAX_DEPTH = 3000


def _build_assigned(
    plan: Node, context: Context, next_splits: NextSplits, with_element_ids: bool
) -> ElementIterator:
    split_space = compute_split_space(plan)
    if split_space is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be divided, so it has no splits to assign"
        )
    if split_space.is_single_split:
        if with_element_ids:  # ordinals require one fixed order
            context = dataclasses.replace(context, unordered_steps=frozenset())
        return SingleSplitIterator(
            lambda: make_iterator(plan, context), next_splits, tracks_splits=with_element_ids
        )
    leaf_numbers = {id(node): number for number, node in enumerate(find_leaves(plan))}
    split_provider = PositionSplitProvider(
        split_space, next_splits, context.epochs, SplitProgress() if with_element_ids else None
    )
    context = dataclasses.replace(context, split_provider=split_provider, leaf_numbers=leaf_numbers)
    if with_element_ids:
        context = dataclasses.replace(context, tracks_splits=True)
    return MultiSplitIterator(lambda: make_iterator(plan, context), split_provider)


def build_nested(plan: Node, context: Context) -> ElementIterator:
    """Return an iterator over the elements of a dataset that a user's function returned.

    Args:
        plan: Its plan as written.
        context: Result of `Context.nested`.
    """
    if isinstance(plan, FromSource):
        rows = _build_rows(plan, context)
        if rows is not None:
            return rows
    elif not _has_one_leaf(plan):
        check_coordinated_readers(plan)
        plan = number_occurrences(plan)
    prepared = prepare(plan, is_nested=True)
    own = prepared.options
    if own is not NO_OPTIONS:
        # Options of the outer plan take precedence, and only its seed is saved in states.
        seed = own.seed if own.seed is not None and context.options.seed is None else context.seed
        options = own.merged_with(context.options)
        context = dataclasses.replace(context, options=options, seed=seed)
    return make_iterator(prepared.plan, context)


def _has_one_leaf(plan: Node) -> bool:
    """Return whether each step of a plan has at most one input."""
    inputs = plan.inputs
    while len(inputs) == 1:
        inputs = inputs[0].inputs
    return not inputs


def _build_rows(plan: FromSource, context: Context) -> ElementIterator | None:
    """Return the iterator of a plan that is one source, the usual case, without preparing it.

    It is that of the canonical form, which is a `GatherIndices` over `Indices`.
    """
    source = plan.source
    if (
        type(source) not in _PLAIN_SOURCES
        or context.is_instrumented
        or context.split_provider is not None
    ):
        return None
    assert isinstance(source, IndexedSource)
    return elements.RowsIterator(source, 0, source.size, context, borrows=False)


_PLAIN_SOURCES = frozenset([RangeSource, SlicesSource, TensorsSource])
"""Sources of one element per index, without random numbers or a service."""


def _build_detached(plan: Node, context: Context) -> ElementIterator:
    return build_nested(_detach_sources(plan), context)


def _detach_sources(plan: Node) -> Node:
    """Return a plan over detached sources, which take no elements from other readers."""
    return transform(
        plan,
        lambda node: (
            FromSource(source=node.source.detach()) if isinstance(node, FromSource) else node
        ),
    )


def draw_seed() -> int:
    """Return an unpredictable seed, small enough for any JSON reader."""
    return secrets.randbits(52)


# --- Splits computed in this process: runs the worker stage of a plan split by split --------------


class InProcessSplitSource:
    """Reads each split with a separate iterator (`context.SplitSource`).

    Args:
        build_worker_stage: Starts the worker stage of the plan with element ids; its argument
            returns the splits to read.
    """

    def __init__(self, build_worker_stage: Callable[[NextSplits], AssignedPlanIterator]) -> None:
        self._build_worker_stage = build_worker_stage

    def open(self, split: int, first_ordinal: int) -> InProcessSplitReader:
        """Return a reader of a split from an ordinal before which nothing has failed."""
        partial_split = PartialSplit(split, ((first_ordinal, None),), may_have_failed=False)
        pending: Iterator[PartialSplit] = iter([partial_split])
        return InProcessSplitReader(self._build_worker_stage(lambda: next(pending, None)))


class InProcessSplitReader:
    """Reader of one split."""

    def __init__(self, iterator: AssignedPlanIterator) -> None:
        self._iterator = iterator
        self._num_elements: int | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next elements, with their element ids; None at the end."""
        return self._iterator.next_chunk(limit)

    @property
    def num_elements(self) -> int:
        """Number of elements of the split, after its end was read."""
        if self._num_elements is None:
            self._num_elements = sum(
                [ended.num_elements for ended in self._iterator.take_finished()]
            )
        return self._num_elements

    def close(self) -> None:
        """Close the iterator."""
        self._iterator.close()


# --- Whether a step opens files: only known by calling its function -------------------------------


def opens_files(node: Interleave) -> bool:
    """Return whether the dataset that a step opens for its first element reads files.

    The function is called once, as are those of steps below it. Used by `rewrites.shard`.
    """
    found = _read_first(node.input)
    if found is None:
        return False
    function = UserFunction(node.fn, step_name(node), contain_exits=True)
    try:
        dataset = function(found[0])
    except BaseException as error:
        raise function.wrap_error(error, 0, found[0]) from error
    plan = getattr(dataset, "plan", None)
    if not isinstance(plan, Node):
        return False  # raises its own error when it is read
    return reads_files(plan) or any(
        isinstance(step, Interleave) and opens_files(step) for step in walk(plan)
    )


def _read_first(plan: Node) -> list[Any] | None:
    iterator = build_iterator(plan, seed=0)
    try:
        chunk = iterator.next_chunk(1)
        return None if chunk is None else chunk.rows()
    finally:
        iterator.close()
