"""Turn a plan into an iterator."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError

# Imported for what they register.
from headrace.execution import (  # noqa: F401
    batching,
    buffering,
    caching,
    choosing,
    combining,
    elements,
    elementwise,
    interleave,
    ordering,
    reading,
    root,
    scanning,
    shuffle,
    windows,
)
from headrace.execution import units as _units  # noqa: F401
from headrace.execution.context import (
    Context,
    Iteration,
    UnitSource,
    check_meetings,
    with_occurrences,
)
from headrace.execution.dealer import DealtPositions, NextUnits, UnitPart
from headrace.execution.dealt import DealtPlan, ManyUnits
from headrace.execution.iterator import ElementIterator, make_iterator
from headrace.execution.ledger import Ledger
from headrace.execution.root import OneUnit
from headrace.plan.combining import Interleave
from headrace.plan.determinism import fixed_seeds, free_steps, with_fixed_seeds
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.traverse import fold, leaves, lending_steps, transform, walk
from headrace.plan.user_function import UserFunction, step_name
from headrace.rewrites.cut import Cut, Half, cut_as
from headrace.rewrites.normal import NO_OPTIONS, Normal
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of
from headrace.rewrites.roots import with_roots, without_roots
from headrace.rewrites.shard import reads_files

__all__ = [
    "LocalUnits",
    "Watch",
    "build_nested",
    "draw_seed",
    "opens_files",
    "start",
    "start_above",
    "start_halves",
]

Watch: TypeAlias = Callable[[Node, ElementIterator], ElementIterator]


def start(
    plan: Node,
    *,
    seed: int | None = None,
    fixed: Sequence[int] = (),
    pass_number: tuple[int, ...] = (0,),
    iteration: Iteration | None = None,
    units: NextUnits | None = None,
    origins: bool = False,
    half: Half | None = None,
    contain_exits: bool = False,
    only_reads: bool = False,
    is_look: bool = False,
    watch: Watch | None = None,
) -> ElementIterator:
    """Return an iterator over the plan's elements; nothing is opened before the first read.

    Args:
        plan: The plan as written.
        seed: What random steps without a seed of their own draw from; None: that of the plan's
            options, or else drawn now.
        fixed: `plan.determinism.fixed_seeds`, of a saved state; (): those of the plan.
        pass_number: Which iteration over the plan this is; shuffles differ from one to the next.
        iteration: Numbers what nested datasets read of shared jobs, where the plan may be started
            again within one iteration; None: it is not.
        units: Deals out the plan: returns the units (`rewrites.positions`) to read next. None: it
            is read whole.
        origins: Whether chunks are to say which elements of which units they are of
            (`origins.origins_of`). Units may be dealt in part then.
        half: Runs the lower half of the plan, as it is cut in this way (`rewrites.cut`); its units
            are dealt. None: the whole plan.
        contain_exits: Whether SystemExit and the like from a user's function become a
            UserFunctionError: where other work goes on in the same process.
        only_reads: Whether whoever takes the elements writes into none of them: what sources and
            caches keep is lent then, where it would be copied, and is not to be written to.
        is_look: Whether nothing is taken that another reader would have got (`Source.apart`), by
            nested datasets neither.
        watch: Returns what stands in the place of a node's iterator (`Watched`); for nested
            datasets, too. None: what was made stays as it is.

    Raises:
        FailedPreconditionError: There are `units`, but the plan cannot be dealt out; there are to
            be origins, but a step works on the whole stream; or it has thousands of steps one
            above the other.
    """
    if is_look:
        plan = _apart(plan)
    check_meetings(plan)
    plan = with_occurrences(plan)
    prepared = prepare(with_fixed_seeds(plan, fixed or fixed_seeds(plan)))
    wants_places = False
    if half is not None:
        made = cut_as(prepared, half)
        prepared = Normal(made.below, made.options)
        wants_places = made.wants_places
        if not origins:
            prepared = Normal(without_roots(prepared.plan), prepared.options)
    free = _free_in(prepared.plan, prepared.options, half)
    if origins:
        prepared = _with_origins(prepared, free)
        free = _free_in(prepared.plan, prepared.options, half)
    _allow_for_depth(prepared.plan)
    if seed is None:
        seed = prepared.options.seed
    context = Context(
        build=_build_apart if is_look else build_nested,
        seed=draw_seed() if seed is None else seed,
        passes=pass_number,
        iteration=iteration or Iteration(),
        options=prepared.options,
        free=free,
        lending=lending_steps(prepared.plan) if only_reads else frozenset(),
        contain_exits=contain_exits,
        wants_places=wants_places,
        parallelism=_cores(),
    )
    if watch is not None:
        context = dataclasses.replace(context, watch=watch)
    if units is not None:
        return _start_dealt(prepared.plan, context, units, origins)
    return make_iterator(prepared.plan, context)


def start_above(
    made: Cut,
    source: UnitSource,
    *,
    seed: int,
    pass_number: tuple[int, ...] = (0,),
    watch: Watch | None = None,
) -> ElementIterator:
    """Return an iterator over the upper half of a plan.

    Args:
        made: How the plan is cut.
        source: Where the elements of units come from.
        seed: That of the lower half.
        pass_number: That of the lower half.
        watch: As for `start`.
    """
    _allow_for_depth(made.above)
    context = Context(
        build=build_nested,
        seed=seed,
        passes=pass_number,
        options=made.options,
        free=_free_in(made.above, made.options, made.half),
        unit_source=source,
        units_have_places=made.wants_places,
        parallelism=_cores(),
    )
    if watch is not None:
        context = dataclasses.replace(context, watch=watch)
    return make_iterator(made.above, context)


def start_halves(
    plan: Node,
    half: Half,
    *,
    seed: int,
    fixed: Sequence[int] = (),
    pass_number: tuple[int, ...] = (0,),
) -> ElementIterator:
    """Return an iterator over both halves of a plan in this process.

    So a place that was saved over a service is gone on from without one.

    Args:
        plan: The plan as written.
        half: How it was cut where the state was saved.
        seed: As for `start`.
        fixed: As for `start`.
        pass_number: As for `start`.
    """
    made = cut_as(prepare(with_fixed_seeds(plan, fixed or fixed_seeds(plan))), half)

    def start_half(next_units: NextUnits) -> DealtPlan:
        iterator = start(
            plan,
            seed=seed,
            fixed=fixed,
            pass_number=pass_number,
            units=next_units,
            origins=True,
            half=half,
        )
        assert isinstance(iterator, DealtPlan)
        return iterator

    return start_above(made, LocalUnits(start_half), seed=seed, pass_number=pass_number)


def _free_in(plan: Node, options: Options, half: Half | None) -> frozenset[int]:
    """Return the steps whose order is free (`plan.determinism`); none in an ordered half."""
    if half is not None and half != "in any order":
        return frozenset()
    return free_steps(plan, options.deterministic)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def _with_origins(prepared: Normal, free: frozenset[int]) -> Normal:
    """Return a plan with its roots, if it is dealt in several units."""
    deal = deal_of(prepared.plan)
    if deal is None or deal.whole:
        return prepared
    return Normal(with_roots(prepared.plan, free), prepared.options)


def _allow_for_depth(plan: Node) -> None:
    """See to it that Python lets each step of a deep plan call the one below it.

    Raises:
        FailedPreconditionError: It is too deep for the stack.
    """
    depth = fold(plan, lambda node, inputs: 1 + max(inputs, default=0), once=True)
    needed = _FRAMES_ABOVE + depth * _FRAMES_A_STEP
    if needed <= sys.getrecursionlimit():
        return
    if depth > _DEEPEST:
        raise FailedPreconditionError(
            f"the dataset has {depth} steps one above the other, and at most {_DEEPEST} can be "
            "run; join steps: several functions of `map` in one, several datasets by "
            "`from_tensor_slices(...).flat_map(...)`"
        )
    sys.setrecursionlimit(needed)


_FRAMES_ABOVE = 1000
_FRAMES_A_STEP = 8
_DEEPEST = 3000


def _start_dealt(plan: Node, context: Context, units: NextUnits, origins: bool) -> ElementIterator:
    deal = deal_of(plan)
    if deal is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be read in parts, so it cannot be dealt out"
        )
    if deal.whole:
        if origins:  # ordinals are counted at its end, so it has one order
            context = dataclasses.replace(context, free=frozenset())
        return OneUnit(lambda: make_iterator(plan, context), units, names_units=origins)
    numbers = {id(node): number for number, node in enumerate(leaves(plan))}
    dealer = DealtPositions(deal, units, context.passes, Ledger() if origins else None)
    context = dataclasses.replace(context, dealer=dealer, leaves=numbers)
    if origins:
        context = dataclasses.replace(context, names_units=True)
    return ManyUnits(lambda: make_iterator(plan, context), dealer)


def build_nested(plan: Node, context: Context) -> ElementIterator:
    """Return an iterator over the elements of a dataset that a user's function returned.

    Args:
        plan: Its plan as written.
        context: What `Context.nested` gives for it.
    """
    if not isinstance(plan, FromSource):
        check_meetings(plan)
        plan = with_occurrences(plan)
    prepared = prepare(plan, is_nested=True)
    own = prepared.options
    if own is not NO_OPTIONS:
        # What the outer plan sets wins, and its seed alone is saved with states.
        seed = own.seed if own.seed is not None and context.options.seed is None else context.seed
        options = own.merged_with(context.options)
        context = dataclasses.replace(context, options=options, seed=seed)
    return make_iterator(prepared.plan, context)


def _build_apart(plan: Node, context: Context) -> ElementIterator:
    return build_nested(_apart(plan), context)


def _apart(plan: Node) -> Node:
    """Return a plan over sources from which nothing is taken that somebody else would have got."""
    return transform(
        plan,
        lambda node: (
            FromSource(source=node.source.apart()) if isinstance(node, FromSource) else node
        ),
    )


def draw_seed() -> int:
    """Return a seed that nobody can guess, small enough for any JSON reader."""
    return secrets.randbits(52)


# --- Units that are made in this process: the lower half of a plan, run unit by unit --------------


class LocalUnits:
    """Reads each unit by an iterator of its own (`context.UnitSource`).

    Args:
        start_half: Starts the lower half of the plan with origins, dealt by what it is given.
    """

    def __init__(self, start_half: Callable[[NextUnits], DealtPlan]) -> None:
        self._start_half = start_half

    def open(self, unit: int, first: int) -> LocalReader:
        """Return a reader of a unit from an ordinal on, before which nothing has failed."""
        part = UnitPart(unit, ((first, None),), has_failures=False)
        waiting: Iterator[UnitPart] = iter([part])
        return LocalReader(self._start_half(lambda: next(waiting, None)))


class LocalReader:
    """Reads one unit."""

    def __init__(self, iterator: DealtPlan) -> None:
        self._iterator = iterator
        self._elements: int | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        """Return the next elements, with their origins; None at the end."""
        return self._iterator.next_chunk(limit)

    @property
    def elements(self) -> int:
        """How many elements the unit had, once its end was read."""
        if self._elements is None:
            self._elements = sum([ended.elements for ended in self._iterator.take_ended()])
        return self._elements

    def close(self) -> None:
        """Close the iterator."""
        self._iterator.close()


# --- Whether a step opens files: only a call of its function tells --------------------------------


def opens_files(node: Interleave) -> bool:
    """Say whether the dataset that a step opens for its first element reads files.

    The function is called once, as are those below it. For `rewrites.shard`.
    """
    found = _first(node.input)
    if found is None:
        return False
    function = UserFunction(node.fn, step_name(node), contain_exits=True)
    try:
        dataset = function(found[0])
    except BaseException as error:
        raise function.blame(error, 0, found[0]) from error
    plan = getattr(dataset, "plan", None)
    if not isinstance(plan, Node):
        return False  # an error of its own when it is read
    return reads_files(plan) or any(
        isinstance(step, Interleave) and opens_files(step) for step in walk(plan)
    )


def _first(plan: Node) -> list[Any] | None:
    iterator = start(plan, seed=0)
    try:
        chunk = iterator.next_chunk(1)
        return None if chunk is None else chunk.rows()
    finally:
        iterator.close()
