"""Partition of a plan into a worker stage, which runs split by split, and a client stage.

    plan -> partition_plan -> PlanPartition(worker_stage, client_stage)

`worker_stage` contains partition boundaries (`rewrites.partition_boundaries`) and is assigned in
splits. In ordered modes, `client_stage` opens one split after another
(`plan.partition_nodes.ReadSplits`); otherwise it is an ordinary plan:

* A step that works within one split runs on workers. An interleave that takes turns between splits
  stays in the client; the datasets that its function opens are read by workers, one per split.
* One-to-one steps and filters above an interleave are pushed down into it. Each element keeps the
  ordinal that it had before the filters, so that dropped elements count in the turns.
* One-to-one steps above steps that select by position are pushed down below them. For a shuffle of
  values this requires that the processed elements it then holds in the client fit a bound. An
  element that fails in them is selected like the others, and its error is raised above
  (`RaiseDeferredErrors`).
* `repeat` and `concatenate` above others are in both stages: on workers they define the splits.

In "unordered" mode, steps that propagate element ids also run on workers: batches, shuffles of
values, buckets. For a batch that drops its remainder, workers keep their remainders, and the client
unbatches and batches again. If the client stage needs several streams, an ordered mode is used
anyway; the same holds for an `enumerate` over splits of a fixed number of elements
(`range(n).map(f)`), whose numbers are those of a single process.

Example: `range(4).shuffle(4).flat_map(load).filter(keep).batch(2)`. In canonical form the shuffle
orders indices of the range:

    Indices(4) -> Shuffle -> GatherIndices -> Interleave(load) -> Filter(keep) -> Batch(2)

There are four splits, one per shuffled index. Split 2 contains the kept elements of `load(x)` for
the third index x of the shuffled order; their element ids are (2, 0), (2, 1), ...

    mode        worker stage                                       client stage
    ordered     Indices ... Filter -> PartitionBoundary            ReadSplits -> Batch
    unordered   Indices ... Filter -> PartitionBoundary -> Batch   ReadSplits

The ordered state after five elements, if splits 0 and 1 have two each, is split 2, ordinal 1. In
unordered mode a batch has the ids of its rows, and the state is the set of delivered ids.

Rule 1. Both sides partition identically: the result depends only on the plan and on the mode.
Rule 2. Both stages together have the elements of the plan; in ordered modes, bit for bit in its
        order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias, cast

from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch, Unbatch
from headrace.plan.combining import Concatenate, Interleave
from headrace.plan.determinism import collect_fixed_seeds, find_unordered_steps, with_fixed_seeds
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.ordering import Enumerate, Repeat, Shuffle
from headrace.plan.partition_nodes import (
    PartitionBoundary,
    RaiseDeferredErrors,
    ReadSplits,
    TagUpstreamErrors,
)
from headrace.plan.random_map import DrawRandomWords
from headrace.plan.traverse import cardinality, element_spec, fold, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.canonicalize import CanonicalPlan
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition_boundaries import (
    PLACEHOLDER,
    PlanFragment,
    find_leaf_split_sizes,
    id_propagating_fragment,
    leaf_fragment,
    split_local_fragment,
)
from headrace.rewrites.shuffle_memory import bytes_from_spec, shuffle_buffer_bytes
from headrace.rewrites.split_ranges import (
    SplitRange,
    compute_split_ranges,
    count_splits,
    counts_source_rows,
    leaf_positions,
)
from headrace.rewrites.split_space import compute_split_space

__all__ = [
    "DEFAULT_MAX_SHUFFLE_BYTES",
    "PartitionMode",
    "PlanPartition",
    "StagePlacement",
    "partition_plan",
    "partition_with_mode",
]

PartitionMode: TypeAlias = Literal[
    "unordered",
    "ordered",
    "ordered + pushed down",
    "ordered + deferred errors",
    "ordered + pushed down + deferred errors",
]
"""How a plan is partitioned: all that a worker needs to know. "pushed down": one-to-one steps run
below shuffles of values. "deferred errors": elements that fail in steps pushed down below
selecting steps are selected like the others; states saved without it dropped them before.
"""

DEFAULT_MAX_SHUFFLE_BYTES = 1 << 30
"""Maximum bytes of processed elements that shuffles of values may hold in a client."""


class StagePlacement(NamedTuple):
    """Where a step runs, and why."""

    step: str
    runs_on: Literal["workers", "client", "both"]
    reason: str = ""


@dataclass(frozen=True)
class PlanPartition:
    """The worker stage and the client stage of a plan."""

    worker_stage: Node
    """Plan that workers run, with its partition boundaries."""
    client_stage: Node
    """Plan that the client runs; it reads the splits through `ReadSplits`."""
    mode: PartitionMode
    """Partition mode; stored in states."""
    num_splits: int
    """Number of splits of `worker_stage`, or INFINITE."""
    options: Options
    """Options of the whole plan."""
    placements: tuple[StagePlacement, ...] = ()
    """Placement of each step, inputs first; for `explain`."""
    client_shuffle_bytes: int | None = 0
    """Bytes of processed elements that shuffles of values hold in the client if one-to-one steps
    are pushed down below them.

    0 if there are no such steps, None if the size of an element is unknown.
    """
    worker_mode_override: PartitionMode | None = None
    """Mode sent to workers instead of `mode`, or None.

    It has the same `worker_stage`, and workers of earlier versions know it too.
    """

    @property
    def worker_mode(self) -> PartitionMode:
        """Mode that is sent to workers."""
        return self.worker_mode_override or self.mode

    @property
    def is_ordered(self) -> bool:
        """Whether elements arrive in the order of a single process."""
        return self.mode != "unordered"

    @property
    def wants_element_numbers(self) -> bool:
        """Whether a step of the client stage needs element numbers."""
        return any(node.uses_element_numbers for node in walk(self.client_stage))


def partition_plan(
    plan: Node,
    *,
    ordered: bool,
    max_shuffle_bytes: int = DEFAULT_MAX_SHUFFLE_BYTES,
    element_bytes: Callable[[Node], int | None] | None = None,
    step_seeds: Sequence[int] = (),
) -> PlanPartition:
    """Return the partition of a plan as written.

    Args:
        plan: The plan.
        ordered: Whether elements must arrive in the order of a single process.
        max_shuffle_bytes: Maximum bytes in shuffles of values in the client for pushing one-to-one
            steps below them.
        element_bytes: Returns the size of an element of a step in bytes, or None if unknown. By
            default computed from the plan's specs. Only called if the result depends on it.
        step_seeds: As for `execution.build.build_iterator`.

    Raises:
        FailedPreconditionError: If the plan reads a source that cannot be read in parts.
    """
    prepared = _prepare(plan, step_seeds)
    if not ordered:
        partition = partition_with_mode(prepared, "unordered")
        if not partition.is_ordered:
            return partition
    pushed_down = partition_with_mode(prepared, "ordered + pushed down + deferred errors")
    not_pushed_down = partition_with_mode(prepared, "ordered + deferred errors")
    if pushed_down.placements == not_pushed_down.placements:
        return pushed_down
    shuffle_bytes = shuffle_buffer_bytes(prepared.plan, element_bytes or bytes_from_spec)
    fits = shuffle_bytes is not None and shuffle_bytes <= max_shuffle_bytes
    return replace(pushed_down if fits else not_pushed_down, client_shuffle_bytes=shuffle_bytes)


def _prepare(plan: Node, step_seeds: Sequence[int]) -> CanonicalPlan:
    return prepare(with_fixed_seeds(plan, step_seeds or collect_fixed_seeds(plan)))


def partition_with_mode(prepared: CanonicalPlan, mode: PartitionMode) -> PlanPartition:
    """Return the partition of a plan in canonical form.

    Raises:
        FailedPreconditionError: If the plan reads a source that cannot be read in parts.
    """
    split_space = compute_split_space(prepared.plan)
    if split_space is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be divided, so it has no splits to assign"
        )
    if split_space.is_single_split:
        client_stage = ReadSplits(num_splits=1, element_spec=element_spec(prepared.plan))
        placements = [StagePlacement(step_name(node), "workers") for node in walk(prepared.plan)]
        return PlanPartition(
            prepared.plan, client_stage, mode, 1, prepared.options, tuple(placements)
        )
    if mode == "unordered":
        partitioner = _Partitioner(prepared, ordered=False, pushes_below_shuffles=False)
        partition = partitioner.partition(mode)
        if partition is not None:
            return partition
        mode = "ordered + deferred errors"
    partition = _partition_ordered(prepared, mode)
    if not mode.endswith(_DEFERRED_ERRORS):
        return partition
    plain_mode = cast(PartitionMode, mode.removesuffix(_DEFERRED_ERRORS))
    if not any(
        isinstance(node, ReadSplits) and node.defers_errors for node in walk(partition.client_stage)
    ):
        return replace(partition, mode=plain_mode)
    is_same = _partition_ordered(prepared, plain_mode).placements == partition.placements
    return replace(partition, worker_mode_override=plain_mode) if is_same else partition


_DEFERRED_ERRORS = " + deferred errors"


def _partition_ordered(prepared: CanonicalPlan, mode: PartitionMode) -> PlanPartition:
    pushes_down, defers_errors = "pushed down" in mode, mode.endswith(_DEFERRED_ERRORS)
    partition = _Partitioner(
        prepared, ordered=True, pushes_below_shuffles=pushes_down, defers_errors=defers_errors
    ).partition(mode)
    assert partition is not None
    return partition


@dataclass
class _SplitStream:
    """Splits of the worker stage that one `ReadSplits` of the client stage reads."""

    plan: Node
    cycle_length: int = 1
    block_length: int = 1
    has_pushed_down: bool = False
    """Whether the plan contains steps that were pushed down."""
    defers_errors: bool = False
    """Whether some of those were above selecting steps."""

    def push_down(self, node: Node, *, is_selected: bool) -> None:
        """Add a step; `is_selected` if the client selects from the elements below it."""
        if is_selected and self.has_pushed_down and not self.defers_errors:
            self.plan = TagUpstreamErrors(input=self.plan, location=node.location)
        self.defers_errors = self.defers_errors or is_selected
        self.has_pushed_down = True
        self.plan = node.with_inputs([self.plan])


@dataclass
class _Subtree:
    """Partition of a subtree."""

    fragment: PlanFragment | None = None
    """Fragment that can run on workers.

    Set if the whole subtree works within splits or propagates element ids.
    """
    client_stage: Node = PLACEHOLDER
    split_plan: Node = PLACEHOLDER
    """The subtree's `repeat` and `concatenate` steps over its streams."""
    streams: list[_SplitStream] = field(default_factory=list)
    """Streams into which one-to-one steps can be pushed down; empty if they cannot."""
    is_direct: bool = False
    """Whether the stream is an interleave without steps above; filters are then pushed down too."""
    is_shuffled: bool = False
    """Whether steps that are pushed down pass a shuffle of values."""
    is_selected: bool = False
    """Whether steps that are pushed down pass selecting steps."""
    num_repeats: int = 0
    """Number of `repeat` steps that steps pushed down pass."""
    is_concatenated: bool = False
    """Whether steps that are pushed down pass a `concatenate`."""
    raises_deferred: bool = False
    """Whether the client stage already raises the deferred errors of pushed-down steps."""


class _Partitioner:
    def __init__(
        self,
        prepared: CanonicalPlan,
        *,
        ordered: bool,
        pushes_below_shuffles: bool,
        defers_errors: bool = False,
    ) -> None:
        self._plan = prepared.plan
        self._options = prepared.options
        self._ordered = ordered
        self._pushes_below_shuffles = pushes_below_shuffles
        self._defers_errors = defers_errors
        deterministic = prepared.options.deterministic
        self._unordered_steps = (
            frozenset[int]() if ordered else find_unordered_steps(prepared.plan, deterministic)
        )
        self._leaf_split_sizes = find_leaf_split_sizes(prepared.plan)
        self._streams: list[_SplitStream] = []
        self._placements: list[StagePlacement] = []
        #: Whether an `enumerate` needs the elements in order.
        self._needs_order = False

    def partition(self, mode: PartitionMode) -> PlanPartition | None:
        """Return the partition, or None if the plan cannot be read in any order."""
        root = self._close_subtree(fold(self._plan, self._visit))
        is_single_stream = isinstance(root.split_plan, ReadSplits)
        if not self._ordered and (self._needs_order or not is_single_stream):
            return None
        worker_stage = fold(root.split_plan, self._build_worker_step)
        split_space = compute_split_space(worker_stage)
        assert split_space is not None
        ranges = compute_split_ranges(
            root.split_plan, [count_splits(stream.plan) for stream in self._streams]
        )
        client_stage = fold(
            root.client_stage, lambda node, inputs: self._build_client_step(node, inputs, ranges)
        )
        return PlanPartition(
            worker_stage,
            client_stage,
            mode,
            split_space.size,
            self._options,
            tuple(self._placements),
        )

    # --- placement of each step -----------------------------------------------------------------

    def _visit(self, node: Node, inputs: list[_Subtree]) -> _Subtree:
        if id(node) in self._leaf_split_sizes:
            self._record_placement(node, "both", "index plan: computed from the seed and the epoch")
            return _Subtree(leaf_fragment(node, self._leaf_split_sizes[id(node)]))
        if not inputs or (
            inputs[0].fragment is not None and inputs[0].fragment.plan is PLACEHOLDER
        ):
            return _Subtree(PlanFragment(PLACEHOLDER))
        parts = [subtree.fragment for subtree in inputs if subtree.fragment is not None]
        if len(parts) == len(inputs):
            subtree = self._place_on_workers(node, parts)
            if subtree is not None:
                return subtree
            self._needs_order |= (
                isinstance(node, Enumerate) and parts[0].elements_per_split is not None
            )
        self._needs_order |= node.needs_input_order
        return self._place_on_client(node, [self._close_subtree(subtree) for subtree in inputs])

    def _place_on_workers(self, node: Node, fragments: list[PlanFragment]) -> _Subtree | None:
        """Return the subtree of a step that runs on workers with its inputs, or None."""
        is_unordered = id(node) in self._unordered_steps
        fragment = split_local_fragment(
            node, fragments, is_unordered=is_unordered, in_order=self._ordered
        )
        if fragment is not None:
            self._record_placement(node, "workers", "works within one split")
            return _Subtree(fragment)
        if self._ordered:
            if isinstance(node, Interleave) and fragments[0].elements_per_split == 1:
                self._record_placement(
                    node, "both", "workers open the datasets, the client interleaves them"
                )
                # The client takes turns; a worker reads the opened datasets one after the other.
                flat = node.with_parameters(
                    cycle_length=1, block_length=1, num_parallel_calls=None, deterministic=None
                )
                with_boundary = PartitionBoundary(
                    input=flat.with_inputs([fragments[0].plan]), location=node.location
                )
                stream = _SplitStream(with_boundary, node.cycle_length, node.block_length)
                subtree = self._open_stream(stream)
                subtree.is_direct = True
                return subtree
            return None
        if isinstance(node, Batch) and node.drop_remainder:
            return self._batch_on_both(node, fragments)
        fragment = id_propagating_fragment(node, fragments)
        if fragment is not None:
            self._record_placement(node, "workers", "propagates element ids")
            return _Subtree(fragment)
        return None

    def _batch_on_both(self, node: Batch, fragments: list[PlanFragment]) -> _Subtree:
        """Return batches whose remainders from all workers are joined in the client."""
        self._record_placement(node, "both", "the client joins the remainders of all workers")
        batches = id_propagating_fragment(node.with_parameters(drop_remainder=False), fragments)
        assert batches is not None
        subtree = self._close_subtree(_Subtree(batches))
        rows = Unbatch(input=subtree.client_stage, location=node.location)
        return _Subtree(client_stage=node.with_inputs([rows]), split_plan=subtree.split_plan)

    def _place_on_client(self, node: Node, inputs: list[_Subtree]) -> _Subtree:
        """Push a step down into its streams, or place it in the client stage."""
        first = inputs[0]
        if self._can_push_down(node, first):
            if isinstance(node, DrawRandomWords):
                node = node.with_parameters(repeats_above=first.num_repeats)
            for stream in first.streams:
                stream.push_down(node, is_selected=first.is_selected)
            if self._defers_errors and first.is_selected and not first.raises_deferred:
                first.client_stage = RaiseDeferredErrors(
                    input=first.client_stage, location=node.location
                )
                first.raises_deferred = True
            self._record_placement(
                node, "workers", "pushed down below steps that run in the client"
            )
            return first
        self._record_placement(node, "client", self._explain_client_step(node, first))
        defines_splits = isinstance(node, Repeat | Concatenate)
        subtree = _Subtree(
            client_stage=node.with_inputs([input_.client_stage for input_ in inputs]),
            split_plan=node.with_inputs([input_.split_plan for input_ in inputs])
            if defines_splits
            else first.split_plan,
        )
        passes_through = (
            node.selects_by_position or node.is_transparent or isinstance(node, Concatenate)
        )
        # Deferred errors are raised in one place: either above all selecting steps, or below.
        input_raises = {input_.raises_deferred for input_ in inputs}
        passes_through &= len(input_raises) == 1 and not (
            node.selects_by_position and first.raises_deferred
        )
        if passes_through and all(input_.streams for input_ in inputs):
            subtree.streams = [stream for input_ in inputs for stream in input_.streams]
            subtree.is_selected = node.selects_by_position or any(
                input_.is_selected for input_ in inputs
            )
            subtree.num_repeats = first.num_repeats + isinstance(node, Repeat)
            subtree.is_concatenated = isinstance(node, Concatenate) or first.is_concatenated
            subtree.raises_deferred = first.raises_deferred
            subtree.is_direct = node.is_transparent and first.is_direct
            subtree.is_shuffled = isinstance(node, Shuffle) or any(
                input_.is_shuffled for input_ in inputs
            )
        return subtree

    def _can_push_down(self, node: Node, subtree: _Subtree) -> bool:
        if not subtree.streams:
            return False
        if isinstance(node, DrawRandomWords):
            # The client does not know element numbers; words take little memory in a shuffle.
            return not subtree.is_concatenated
        if not self._ordered:
            return False
        if isinstance(node, Map):
            return self._pushes_below_shuffles or not subtree.is_shuffled
        return isinstance(node, Filter) and subtree.is_direct

    def _explain_client_step(self, node: Node, subtree: _Subtree) -> str:
        if isinstance(node, Map) and subtree.streams and subtree.is_shuffled:
            return "its results would exceed the memory limit of the client's shuffle buffer"
        if isinstance(node, Repeat | Concatenate):
            return "defines the order of the splits"
        if not self._ordered:
            return "needs the whole stream, or divides elements made from several splits"
        return "needs the elements of several splits in order"

    def _record_placement(
        self, node: Node, runs_on: Literal["workers", "client", "both"], reason: str = ""
    ) -> None:
        self._placements.append(StagePlacement(step_name(node), runs_on, reason))

    # --- streams --------------------------------------------------------------------------------

    def _close_subtree(self, subtree: _Subtree) -> _Subtree:
        """Return a subtree whose worker steps are all in streams."""
        return (
            subtree
            if subtree.fragment is None
            else self._open_stream(_SplitStream(subtree.fragment.with_boundary))
        )

    def _open_stream(self, stream: _SplitStream) -> _Subtree:
        splits = ReadSplits(num_splits=0, stream=len(self._streams))
        self._streams.append(stream)
        return _Subtree(client_stage=splits, split_plan=splits, streams=[stream])

    def _build_worker_step(self, node: Node, inputs: list[Node]) -> Node:
        return (
            self._streams[node.stream].plan
            if isinstance(node, ReadSplits)
            else node.with_inputs(inputs)
        )

    def _build_client_step(
        self, node: Node, inputs: list[Node], ranges: dict[int, SplitRange]
    ) -> Node:
        if not isinstance(node, ReadSplits):
            return node.with_inputs(inputs)
        positions_per_split, positions_per_epoch = leaf_positions(self._streams[node.stream].plan)
        stream, (size, offset, strides) = self._streams[node.stream], ranges[node.stream]
        return node.with_parameters(
            num_splits=size,
            first_split=offset,
            strides=strides,
            cycle_length=stream.cycle_length,
            block_length=stream.block_length,
            positions_per_split=positions_per_split,
            positions_per_epoch=positions_per_epoch,
            counts_source_rows=counts_source_rows(stream.plan),
            defers_errors=self._defers_errors and stream.defers_errors,
            element_spec=element_spec(stream.plan),
            count=cardinality(stream.plan),
            location=stream.plan.location,
        )
