"""The normal form of a plan: what is executed, dealt out, and what saved states are places in.

It is made from the plan as written, always and for nested plans too, so that a state does not
depend on which other rewrites ran:

1. Steps that draw random numbers are numbered: counting only those, inputs first, left to right.
2. Options hold for the whole plan, a later setting over an earlier one. `WithOptions` disappears.
3. A source of one element an index that can be read in any order is `Gather(source, Indices(n))`.
   One whose indices hold several elements (files, a generator) is `Read(source, Indices(n))`. One
   that cannot be read in parts (a remote dataset) stays as it is.
4. A step that stands in several places is as many steps, each with a number of its own. Only what
   lies below one `cache` has the same numbers in all places: the cache holds one thing.
5. Steps that choose elements without a look (shuffle, repeat, take, skip, shard) move below the
   one-to-one steps (map, prefetch, gather). Batch, zip, enumerate and concatenate do where only
   gathers and prefetches stand over their index parts; concatenate where both gather finitely many
   elements of one spec: one index part then counts on from the size of the other's source.

The last of them touches the elements of an in-memory source once, when a whole batch is gathered,
and calls no function for an element that is left out:

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
    NUMBERS,
    DrawnSource,
    SideBySide,
    draws,
    end_to_end,
    member_count,
    side_by_side,
)
from headrace.plan.combining import Concatenate, Zip
from headrace.plan.elements import FromSource, Gather, Indices, Read
from headrace.plan.node import AUTOTUNE, Node
from headrace.plan.options import Options, WithOptions
from headrace.plan.ordering import Enumerate
from headrace.plan.source import INFINITE, IndexedSource
from headrace.plan.traverse import element_spec, fold, merged_options, walk

__all__ = ["NO_OPTIONS", "Normal", "normalize"]


@dataclass(frozen=True)
class Normal:
    """A plan in its normal form."""

    plan: Node
    """Without `WithOptions`. Steps that draw have numbers, and each node stands in one place."""
    options: Options
    """What was set anywhere in the plan. For a nested plan, what the outer plan sets wins:
    `nested.options.merged_with(outer.options)`."""


def normalize(plan: Node) -> Normal:
    """Return the normal form of a plan as written. The normal form of a normal form is itself."""
    if isinstance(plan, FromSource) and plan.source.written is None:
        # Most nested plans are a source and no more.
        return Normal(_begin(plan, 0).whole(), NO_OPTIONS)
    normalizer = _Normalizer()
    whole = fold(plan, normalizer.visit).whole()
    return Normal(whole, merged_options(plan) if normalizer.has_options else NO_OPTIONS)


NO_OPTIONS = Options()
"""Those of most plans: nothing is set. Not to be changed."""


class _Normalizer:
    def __init__(self) -> None:
        #: Whether options may be set somewhere in the plan.
        self.has_options = False
        self._number = 0
        self._caches: dict[CacheKey, Node] = {}
        #: Specs of index parts, by the `id` of nodes that are kept.
        self._known: dict[int, Spec | None] = {}
        self._kept: list[Node] = []

    def visit(self, node: Node, inputs: list[_Stream]) -> _Stream:
        first = inputs[0].first if inputs else self._number
        if isinstance(node, FromSource):
            if node.source.written is not None:
                self._number += _steps_that_draw(node)
                self.has_options = True
            if draws(node):
                self._number += 1
            return _begin(node, first)
        if isinstance(node, WithOptions):
            self.has_options = True
            return inputs[0]
        if isinstance(node, Cache) and node.key in self._caches:
            self._number = first
            return _Stream(_copy(self._caches[node.key]), None, first)
        if node.draws and node.number is None:  # a normal form has its numbers
            node = node.with_number(self._number)
            self._number += 1
        if isinstance(node, Concatenate):
            return self._join(node, inputs[0], inputs[1])
        stream = _arrange(node, inputs, first)
        if isinstance(node, Cache):
            self._caches[node.key] = stream.below
        return stream

    def _join(self, node: Concatenate, one: _Stream, other: _Stream) -> _Stream:
        """Return one index part over which both inputs are gathered, if their rows are alike."""
        first, second = _gathered(one), _gathered(other)
        if first is None or second is None or not self._are_alike(first, one, second, other):
            return _Stream(node.over([one.whole(), other.whole()]), None, one.first)
        # The one with fewer members counts on from the other: a long chain is not copied each time.
        if member_count(first) >= member_count(second):
            source = end_to_end(first, second)
            below = node.over([one.below, _shifted(other.below, first.size)])
        else:
            source = end_to_end(second, first)
            below = node.over([_shifted(one.below, second.size), other.below])
        gather = Gather(source=source, input=below, location=node.location)
        return _Stream(below, _with_prefetch(gather, [one, other]), one.first)

    def _are_alike(
        self, first: IndexedSource, one: _Stream, second: IndexedSource, other: _Stream
    ) -> bool:
        if INFINITE in (first.size, second.size):
            return False
        if isinstance(first, SideBySide) or isinstance(second, SideBySide):
            return False  # an index is a structure, perhaps with numbers that cannot be shifted
        if first.element_spec is None or first.element_spec != second.element_spec:
            return False
        # One number an index, or batches of the same length.
        self._kept += (one.below, other.below)
        specs = [element_spec(stream.below, known=self._known) for stream in (one, other)]
        return specs[0] == specs[1]


def _arrange(node: Node, inputs: list[_Stream], first: int) -> _Stream:
    """Return a step over its inputs, each where it belongs."""
    if node.one_to_one:
        return _Stream(inputs[0].below, (node, inputs[0].tops), first)
    sources = [source for stream in inputs if (source := _gathered(stream)) is not None]
    rises = isinstance(node, Batch | Zip | Enumerate) and len(sources) == len(inputs)
    if not node.chooses and not rises:
        return _Stream(node.over([stream.whole() for stream in inputs]), None, first)
    below = node.over([stream.below for stream in inputs])
    if node.chooses:
        return _Stream(below, inputs[0].tops, first)
    if isinstance(node, Batch):
        return _Stream(below, _over_batches(inputs[0].tops, node.size), first)
    if isinstance(node, Zip):
        source = side_by_side(node.structure, sources)
    else:
        source = side_by_side(_PAIR, [NUMBERS, *sources])
    gather = Gather(source=source, input=below, location=node.location)
    return _Stream(below, _with_prefetch(gather, inputs), first)


def _over_batches(tops: _Tops, size: int) -> _Tops:
    """Return a gather, perhaps with prefetches, that has batches of `size` below it."""
    if tops is None:
        return None
    step, rest = tops
    if isinstance(step, Prefetch) and step.buffer_size > 0:  # as many elements as before
        step = step.with_parameters(buffer_size=-(-step.buffer_size // size))
    return step, _over_batches(rest, size)


def _with_prefetch(gather: Gather, inputs: list[_Stream]) -> _Tops:
    """Return a gather, and above it one prefetch for all those that its inputs have."""
    found: list[Prefetch] = []
    for stream in inputs:
        tops = stream.tops
        while tops is not None:
            step, tops = tops
            if isinstance(step, Prefetch):
                found.append(step)
    if not found:
        return gather, None
    sizes = [step.buffer_size for step in found]
    size = AUTOTUNE if AUTOTUNE in sizes else max(sizes)
    return found[0].with_parameters(buffer_size=size), (gather, None)


def _shifted(plan: Node, count: int) -> Node:
    """Return an index part that counts from `count` on."""

    def shifted(node: Node, inputs: list[Node]) -> Node:
        if isinstance(node, Indices):
            return node.with_parameters(start=node.start + count)
        return node.over(inputs)

    return fold(plan, shifted)


_Tops: TypeAlias = "tuple[Node, _Tops] | None"
"""One-to-one steps as a linked list, the uppermost first."""


class _Stream(NamedTuple):
    """A plan in two parts: one-to-one steps on top, over what steps that choose apply to.

    Kept apart, a step that chooses moves below all of them at once.
    """

    below: Node
    tops: _Tops
    first: int
    """How many steps before it draw."""

    def whole(self) -> Node:
        """Return the plan in one part."""
        if self.tops is None:
            return self.below
        if self.tops[1] is None:
            return self.tops[0].over([self.below])
        steps = []
        tops: _Tops = self.tops
        while tops is not None:
            step, tops = tops
            steps.append(step)
        node = self.below
        for step in reversed(steps):
            node = step.over([node])
        return node


def _begin(node: FromSource, first: int) -> _Stream:
    source = node.source
    if not source.splittable:
        return _Stream(_copy(node), None, first)
    indices = _NO_INDICES.with_parameters(size=source.size, location=node.location)
    if isinstance(source, DrawnSource) and not source.is_decided:
        source = source.numbered(first)
    if isinstance(source, IndexedSource):
        gather = Gather(source=source, input=indices, location=node.location)
        return _Stream(indices, (gather, None), first)
    return _Stream(Read(source=source, input=indices, location=node.location), None, first)


def _steps_that_draw(node: FromSource) -> int:
    """Return how many steps draw in the plan that a source stands for."""
    written = node.source.written
    if written is None:
        return 0
    return sum(
        _steps_that_draw(step) + draws(step) if isinstance(step, FromSource) else step.draws
        for step in walk(written)
    )


def _gathered(stream: _Stream) -> IndexedSource | None:
    """Return what is gathered, if only a gather stands over an index part, or prefetches too."""
    tops = stream.tops
    while tops is not None:
        step, tops = tops
        if isinstance(step, Gather):
            return step.source if tops is None else None
        if not isinstance(step, Prefetch):
            return None
    return None


def _copy(plan: Node) -> Node:
    """Return the same steps as nodes of their own."""
    return fold(plan, lambda node, inputs: node.with_inputs(inputs))


_NO_INDICES = Indices(size=0)
_PAIR = flatten((0, 0))[1]
