"""The canonical form of a plan, the basis of execution, split assignment and saved states.

It is made from the plan as written, always and for nested plans too, so that a state does not
depend on which other rewrites ran:

1. Steps that draw random numbers are numbered among themselves, inputs first, left to right.
2. Options hold for the whole plan: a later setting overrides an earlier one, and `WithOptions` is
   removed.
3. A source with one element per index, readable in any order, becomes `GatherIndices(source,
   Indices(n))`. One whose indices hold several elements (files, a generator) becomes
   `ReadIndices(source, Indices(n))`. One that cannot be read in parts (a remote dataset) is
   unchanged.
4. A step that occurs in several places becomes several steps, each with its own number. Only the
   steps below one `cache` have the same numbers in all places, because the cache holds one value.
5. Steps that select elements by position (shuffle, repeat, take, skip, shard) move below the
   one-to-one steps (map, prefetch, gather). Batch, zip and enumerate do so if their inputs are
   gathers, possibly with prefetches, over index plans. Concatenate does so if, in addition, both
   inputs gather finitely many elements of the same spec: the indices of one input are then shifted
   by the size of the other's source.

By rule 5 each element of an in-memory source is copied once, when its batch is gathered, and no
function is called for a dropped element:

    Batch(Shuffle(Gather(s, indices)))  ->  Gather(s, Batch(Shuffle(indices)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from headrace.element.spec import Spec
from headrace.element.structure import flatten
from headrace.plan.batching import Batch
from headrace.plan.buffering import Cache, CacheKey, Prefetch
from headrace.plan.combined_sources import (
    INTEGERS,
    RandomizedSource,
    ZippedSource,
    concatenate_sources,
    count_members,
    reads_unresolved_source,
    zip_sources,
)
from headrace.plan.combining import Concatenate, Zip
from headrace.plan.elements import FromSource, GatherIndices, Indices, ReadIndices
from headrace.plan.node import AUTOTUNE, Node
from headrace.plan.options import Options, WithOptions
from headrace.plan.ordering import Enumerate
from headrace.plan.source import INFINITE, IndexedSource
from headrace.plan.traverse import element_spec, fold, merged_options, walk

__all__ = ["NO_OPTIONS", "CanonicalPlan", "canonicalize"]


@dataclass(frozen=True)
class CanonicalPlan:
    """A plan in its canonical form."""

    plan: Node
    """The plan without `WithOptions`. Random steps have numbers, and each node occurs once."""
    options: Options
    """Options set anywhere in the plan.

    For a nested plan, the outer plan's settings take precedence:
    `nested.options.merged_with(outer.options)`.
    """


def canonicalize(plan: Node) -> CanonicalPlan:
    """Return the canonical form of a plan as written. Idempotent."""
    if isinstance(plan, FromSource) and plan.source.remote_plan is None:
        # Most nested plans consist of a source only.
        return CanonicalPlan(_begin_source(plan, 0).join(), NO_OPTIONS)
    canonicalizer = _Canonicalizer()
    canonical = fold(plan, canonicalizer.visit).join()
    options = merged_options(plan) if canonicalizer.has_options else NO_OPTIONS
    return CanonicalPlan(canonical, options)


NO_OPTIONS = Options()
"""Options with nothing set, as in most plans. Must not be changed."""


class _Canonicalizer:
    def __init__(self) -> None:
        #: Whether options may be set somewhere in the plan.
        self.has_options = False
        self._number = 0
        self._caches: dict[CacheKey, Node] = {}
        #: Specs of index plans, by the `id` of their nodes.
        self._known_specs: dict[int, Spec | None] = {}
        #: Keeps those nodes alive, so that no other node gets the same `id`.
        self._retained: list[Node] = []

    def visit(self, node: Node, inputs: list[_TwoPartPlan]) -> _TwoPartPlan:
        num_random_before = inputs[0].num_random_before if inputs else self._number
        if isinstance(node, FromSource):
            if node.source.remote_plan is not None:
                self._number += _count_random_steps(node)
                self.has_options = True
            if reads_unresolved_source(node):
                self._number += 1
            return _begin_source(node, num_random_before)
        if isinstance(node, WithOptions):
            self.has_options = True
            return inputs[0]
        if isinstance(node, Cache) and node.key in self._caches:
            self._number = num_random_before
            return _TwoPartPlan(_copy(self._caches[node.key]), None, num_random_before)
        if node.is_random and node.number is None:  # a canonical form already has numbers
            node = node.with_number(self._number)
            self._number += 1
        if isinstance(node, Concatenate):
            return self._concatenate(node, inputs[0], inputs[1])
        placed = _place_step(node, inputs, num_random_before)
        if isinstance(node, Cache):
            self._caches[node.key] = placed.below
        return placed

    def _concatenate(
        self, node: Concatenate, first: _TwoPartPlan, second: _TwoPartPlan
    ) -> _TwoPartPlan:
        """Return one gather from the joined sources of both inputs if possible, else the step."""
        num_random_before = first.num_random_before
        source, other_source = _gathered_source(first), _gathered_source(second)
        if (
            source is None
            or other_source is None
            or not self._can_join_sources(source, first.below, other_source, second.below)
        ):
            return _TwoPartPlan(
                node.with_inputs([first.join(), second.join()]), None, num_random_before
            )
        # Shift the source with fewer members, so that a long chain is not copied each time.
        if count_members(source) >= count_members(other_source):
            joined = concatenate_sources(source, other_source)
            below = node.with_inputs([first.below, _shift_indices(second.below, source.size)])
        else:
            joined = concatenate_sources(other_source, source)
            below = node.with_inputs([_shift_indices(first.below, other_source.size), second.below])
        gather = GatherIndices(source=joined, input=below, location=node.location)
        return _TwoPartPlan(below, _merge_prefetches(gather, [first, second]), num_random_before)

    def _can_join_sources(
        self,
        source: IndexedSource,
        index_plan: Node,
        other_source: IndexedSource,
        other_index_plan: Node,
    ) -> bool:
        """Return whether two gathers can be one gather from concatenated sources."""
        if INFINITE in (source.size, other_source.size):
            return False
        if isinstance(source, ZippedSource) or isinstance(other_source, ZippedSource):
            return False  # an index is a structure, possibly with numbers that cannot be shifted
        if source.element_spec is None or source.element_spec != other_source.element_spec:
            return False
        # Both yield single indices, or both yield batches of indices of the same length.
        index_plans = (index_plan, other_index_plan)
        self._retained += index_plans
        specs = [element_spec(plan, known=self._known_specs) for plan in index_plans]
        return specs[0] == specs[1]


def _place_step(node: Node, inputs: list[_TwoPartPlan], num_random_before: int) -> _TwoPartPlan:
    """Return a step over its inputs, placed above or below the one-to-one steps."""
    if node.one_to_one:
        return _TwoPartPlan(inputs[0].below, (node, inputs[0].steps_above), num_random_before)
    sources = [source for input_ in inputs if (source := _gathered_source(input_)) is not None]
    moves_below_gathers = isinstance(node, Batch | Zip | Enumerate) and len(sources) == len(inputs)
    if not node.selects_by_position and not moves_below_gathers:
        return _TwoPartPlan(
            node.with_inputs([input_.join() for input_ in inputs]), None, num_random_before
        )
    below = node.with_inputs([input_.below for input_ in inputs])
    if node.selects_by_position:
        return _TwoPartPlan(below, inputs[0].steps_above, num_random_before)
    if isinstance(node, Batch):
        steps_above = _batch_steps_above(inputs[0].steps_above, node.size)
        return _TwoPartPlan(below, steps_above, num_random_before)
    if isinstance(node, Zip):
        source = zip_sources(node.structure, sources)
    else:
        source = zip_sources(_PAIR, [INTEGERS, *sources])
    gather = GatherIndices(source=source, input=below, location=node.location)
    return _TwoPartPlan(below, _merge_prefetches(gather, inputs), num_random_before)


def _batch_steps_above(steps: _StepChain, size: int) -> _StepChain:
    """Return a gather, possibly with prefetches, above batches of `size`."""
    if steps is None:
        return None
    step, steps_below = steps
    if isinstance(step, Prefetch) and step.buffer_size > 0:  # the same number of elements as before
        step = step.with_parameters(buffer_size=-(-step.buffer_size // size))
    return step, _batch_steps_above(steps_below, size)


def _merge_prefetches(gather: GatherIndices, inputs: list[_TwoPartPlan]) -> _StepChain:
    """Return a gather, below one prefetch that replaces all those of its inputs."""
    prefetches: list[Prefetch] = []
    for input_ in inputs:
        steps = input_.steps_above
        while steps is not None:
            step, steps = steps
            if isinstance(step, Prefetch):
                prefetches.append(step)
    if not prefetches:
        return gather, None
    sizes = [step.buffer_size for step in prefetches]
    size = AUTOTUNE if AUTOTUNE in sizes else max(sizes)
    return prefetches[0].with_parameters(buffer_size=size), (gather, None)


def _shift_indices(plan: Node, count: int) -> Node:
    """Return an index plan whose indices are larger by `count`."""

    def shift(node: Node, inputs: list[Node]) -> Node:
        if isinstance(node, Indices):
            return node.with_parameters(start=node.start + count)
        return node.with_inputs(inputs)

    return fold(plan, shift)


_StepChain: TypeAlias = "tuple[Node, _StepChain] | None"
"""One-to-one steps as a linked list, topmost first."""


class _TwoPartPlan(NamedTuple):
    """A plan in two parts: its topmost one-to-one steps, and the plan below them.

    A selecting step is inserted between the parts, so that it moves below all one-to-one steps at
    once.
    """

    below: Node
    steps_above: _StepChain
    num_random_before: int
    """Number of random steps that precede this plan's own."""

    def join(self) -> Node:
        """Return the plan as one tree."""
        if self.steps_above is None:
            return self.below
        if self.steps_above[1] is None:
            return self.steps_above[0].with_inputs([self.below])
        top_down = []
        steps: _StepChain = self.steps_above
        while steps is not None:
            step, steps = steps
            top_down.append(step)
        node = self.below
        for step in reversed(top_down):
            node = step.with_inputs([node])
        return node


def _begin_source(node: FromSource, num_random_before: int) -> _TwoPartPlan:
    source = node.source
    if not source.splittable:
        return _TwoPartPlan(_copy(node), None, num_random_before)
    indices = _NO_INDICES.with_parameters(size=source.size, location=node.location)
    if isinstance(source, RandomizedSource) and not source.has_fixed_seed:
        source = source.with_number(num_random_before)
    if isinstance(source, IndexedSource):
        gather = GatherIndices(source=source, input=indices, location=node.location)
        return _TwoPartPlan(indices, (gather, None), num_random_before)
    return _TwoPartPlan(
        ReadIndices(source=source, input=indices, location=node.location), None, num_random_before
    )


def _count_random_steps(node: FromSource) -> int:
    """Return the number of random steps in the remote plan of a source."""
    remote_plan = node.source.remote_plan
    if remote_plan is None:
        return 0
    return sum(
        _count_random_steps(step) + reads_unresolved_source(step)
        if isinstance(step, FromSource)
        else step.is_random
        for step in walk(remote_plan)
    )


def _gathered_source(plan: _TwoPartPlan) -> IndexedSource | None:
    """Return the source if the steps above are one gather and any prefetches, else None."""
    steps = plan.steps_above
    while steps is not None:
        step, steps = steps
        if isinstance(step, GatherIndices):
            return step.source if steps is None else None
        if not isinstance(step, Prefetch):
            return None
    return None


def _copy(plan: Node) -> Node:
    """Return a copy with new nodes."""
    return fold(plan, lambda node, inputs: node.copy_with_inputs(inputs))


_NO_INDICES = Indices(size=0)
_PAIR = flatten((0, 0))[1]
