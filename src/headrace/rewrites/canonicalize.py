"""The canonical form of a plan, the basis of execution, split assignment and saved states.

It is made from the plan as written, always and for nested plans too, so that a state does not
depend on which other rewrites ran:

1. Steps that draw random numbers are numbered: counting only those, inputs first, left to right.
2. Options hold for the whole plan, a later setting overrides an earlier one. `WithOptions` is
   removed.
3. A source with one element per index, readable in any order, becomes `GatherIndices(source,
   Indices(n))`. One whose indices hold several elements (files, a generator) becomes
   `ReadIndices(source, Indices(n))`. One that cannot be read in parts (a remote dataset) is
   unchanged.
4. A step that occurs in several places becomes several steps, each with its own number. Only the
   steps below one `cache` have the same numbers in all places, because the cache holds one value.
5. Steps that select elements by position (shuffle, repeat, take, skip, shard) move below the
   one-to-one steps (map, prefetch, gather). Batch, zip, enumerate and concatenate do so if there
   are only gathers and prefetches above their index plans; concatenate if both gather finitely
   many elements of one spec: one index plan then starts after the indices of the other's source.

Rule 5 means that an in-memory source is read once per element, when a whole batch is gathered, and
that no function is called for a dropped element:

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
    normalizer = _Canonicalizer()
    whole = fold(plan, normalizer.visit).join()
    return CanonicalPlan(whole, merged_options(plan) if normalizer.has_options else NO_OPTIONS)


NO_OPTIONS = Options()
"""Options with nothing set, as in most plans. Must not be changed."""


class _Canonicalizer:
    def __init__(self) -> None:
        #: Whether options may be set somewhere in the plan.
        self.has_options = False
        self._number = 0
        self._caches: dict[CacheKey, Node] = {}
        #: Specs of index plans, by the `id` of retained nodes.
        self._known_specs: dict[int, Spec | None] = {}
        self._retained: list[Node] = []

    def visit(self, node: Node, inputs: list[_TwoPartPlan]) -> _TwoPartPlan:
        first = inputs[0].num_random_before if inputs else self._number
        if isinstance(node, FromSource):
            if node.source.remote_plan is not None:
                self._number += _count_random_steps(node)
                self.has_options = True
            if reads_unresolved_source(node):
                self._number += 1
            return _begin_source(node, first)
        if isinstance(node, WithOptions):
            self.has_options = True
            return inputs[0]
        if isinstance(node, Cache) and node.key in self._caches:
            self._number = first
            return _TwoPartPlan(_copy(self._caches[node.key]), None, first)
        if node.is_random and node.number is None:  # a canonical form already has numbers
            node = node.with_number(self._number)
            self._number += 1
        if isinstance(node, Concatenate):
            return self._concatenate(node, inputs[0], inputs[1])
        stream = _place_step(node, inputs, first)
        if isinstance(node, Cache):
            self._caches[node.key] = stream.below
        return stream

    def _concatenate(
        self, node: Concatenate, one: _TwoPartPlan, other: _TwoPartPlan
    ) -> _TwoPartPlan:
        """Return one index plan that gathers both inputs, if their rows have the same spec."""
        first, second = _gathered_source(one), _gathered_source(other)
        if first is None or second is None or not self._have_same_rows(first, one, second, other):
            return _TwoPartPlan(
                node.with_inputs([one.join(), other.join()]), None, one.num_random_before
            )
        # Shift the source with fewer members, so that a long chain is not copied each time.
        if count_members(first) >= count_members(second):
            source = concatenate_sources(first, second)
            below = node.with_inputs([one.below, _shift_indices(other.below, first.size)])
        else:
            source = concatenate_sources(second, first)
            below = node.with_inputs([_shift_indices(one.below, second.size), other.below])
        gather = GatherIndices(source=source, input=below, location=node.location)
        return _TwoPartPlan(below, _merge_prefetches(gather, [one, other]), one.num_random_before)

    def _have_same_rows(
        self, first: IndexedSource, one: _TwoPartPlan, second: IndexedSource, other: _TwoPartPlan
    ) -> bool:
        if INFINITE in (first.size, second.size):
            return False
        if isinstance(first, ZippedSource) or isinstance(second, ZippedSource):
            return False  # an index is a structure, possibly with numbers that cannot be shifted
        if first.element_spec is None or first.element_spec != second.element_spec:
            return False
        # Either one number per index, or batches of the same length.
        self._retained += (one.below, other.below)
        specs = [element_spec(stream.below, known=self._known_specs) for stream in (one, other)]
        return specs[0] == specs[1]


def _place_step(node: Node, inputs: list[_TwoPartPlan], first: int) -> _TwoPartPlan:
    """Return a step over its inputs, placed above or below the one-to-one steps."""
    if node.one_to_one:
        return _TwoPartPlan(inputs[0].below, (node, inputs[0].steps_above), first)
    sources = [source for stream in inputs if (source := _gathered_source(stream)) is not None]
    rises = isinstance(node, Batch | Zip | Enumerate) and len(sources) == len(inputs)
    if not node.selects_by_position and not rises:
        return _TwoPartPlan(node.with_inputs([stream.join() for stream in inputs]), None, first)
    below = node.with_inputs([stream.below for stream in inputs])
    if node.selects_by_position:
        return _TwoPartPlan(below, inputs[0].steps_above, first)
    if isinstance(node, Batch):
        return _TwoPartPlan(below, _batch_steps_above(inputs[0].steps_above, node.size), first)
    if isinstance(node, Zip):
        source = zip_sources(node.structure, sources)
    else:
        source = zip_sources(_PAIR, [INTEGERS, *sources])
    gather = GatherIndices(source=source, input=below, location=node.location)
    return _TwoPartPlan(below, _merge_prefetches(gather, inputs), first)


def _batch_steps_above(tops: _StepsAbove, size: int) -> _StepsAbove:
    """Return a gather, possibly with prefetches, above batches of `size`."""
    if tops is None:
        return None
    step, rest = tops
    if isinstance(step, Prefetch) and step.buffer_size > 0:  # the same number of elements as before
        step = step.with_parameters(buffer_size=-(-step.buffer_size // size))
    return step, _batch_steps_above(rest, size)


def _merge_prefetches(gather: GatherIndices, inputs: list[_TwoPartPlan]) -> _StepsAbove:
    """Return a gather, below one prefetch that replaces all those of its inputs."""
    found: list[Prefetch] = []
    for stream in inputs:
        tops = stream.steps_above
        while tops is not None:
            step, tops = tops
            if isinstance(step, Prefetch):
                found.append(step)
    if not found:
        return gather, None
    sizes = [step.buffer_size for step in found]
    size = AUTOTUNE if AUTOTUNE in sizes else max(sizes)
    return found[0].with_parameters(buffer_size=size), (gather, None)


def _shift_indices(plan: Node, count: int) -> Node:
    """Return an index plan that starts at `count`."""

    def shifted(node: Node, inputs: list[Node]) -> Node:
        if isinstance(node, Indices):
            return node.with_parameters(start=node.start + count)
        return node.with_inputs(inputs)

    return fold(plan, shifted)


_StepsAbove: TypeAlias = "tuple[Node, _StepsAbove] | None"
"""One-to-one steps as a linked list, topmost first."""


class _TwoPartPlan(NamedTuple):
    """A plan in two parts: one-to-one steps, and the part below them, where selecting steps apply.

    A selecting step thereby moves below all one-to-one steps at once.
    """

    below: Node
    steps_above: _StepsAbove
    num_random_before: int
    """Number of random steps before it."""

    def join(self) -> Node:
        """Return the plan as one tree."""
        if self.steps_above is None:
            return self.below
        if self.steps_above[1] is None:
            return self.steps_above[0].with_inputs([self.below])
        steps = []
        tops: _StepsAbove = self.steps_above
        while tops is not None:
            step, tops = tops
            steps.append(step)
        node = self.below
        for step in reversed(steps):
            node = step.with_inputs([node])
        return node


def _begin_source(node: FromSource, first: int) -> _TwoPartPlan:
    source = node.source
    if not source.splittable:
        return _TwoPartPlan(_copy(node), None, first)
    indices = _NO_INDICES.with_parameters(size=source.size, location=node.location)
    if isinstance(source, RandomizedSource) and not source.has_fixed_seed:
        source = source.with_number(first)
    if isinstance(source, IndexedSource):
        gather = GatherIndices(source=source, input=indices, location=node.location)
        return _TwoPartPlan(indices, (gather, None), first)
    return _TwoPartPlan(
        ReadIndices(source=source, input=indices, location=node.location), None, first
    )


def _count_random_steps(node: FromSource) -> int:
    """Return the number of random steps in the remote plan of a source."""
    written = node.source.remote_plan
    if written is None:
        return 0
    return sum(
        _count_random_steps(step) + reads_unresolved_source(step)
        if isinstance(step, FromSource)
        else step.is_random
        for step in walk(written)
    )


def _gathered_source(stream: _TwoPartPlan) -> IndexedSource | None:
    """Return the source if only one gather and prefetches are above an index plan, else None."""
    tops = stream.steps_above
    while tops is not None:
        step, tops = tops
        if isinstance(step, GatherIndices):
            return step.source if tops is None else None
        if not isinstance(step, Prefetch):
            return None
    return None


def _copy(plan: Node) -> Node:
    """Return a copy with new nodes."""
    return fold(plan, lambda node, inputs: node.copy_with_inputs(inputs))


_NO_INDICES = Indices(size=0)
_PAIR = flatten((0, 0))[1]
