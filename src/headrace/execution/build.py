"""Turn a plan into an iterator."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

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
    padding,
    reading,
    scanning,
    shuffle,
    windows,
)
from headrace.execution.context import Context
from headrace.execution.dealer import DealtPositions, NextUnits
from headrace.execution.dealt import ManyUnits, OneUnit
from headrace.execution.iterator import ElementIterator, make_iterator
from headrace.plan.fixed_order import fixed_seeds, with_fixed_seeds
from headrace.plan.free_order import free_steps
from headrace.plan.index_part import leaves
from headrace.plan.lending import lending_steps
from headrace.plan.node import Node
from headrace.plan.traverse import fold
from headrace.rewrites.normal import NO_OPTIONS
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of

__all__ = ["Watch", "build_nested", "draw_seed", "start"]

Watch: TypeAlias = Callable[[Node, ElementIterator], ElementIterator]


def start(
    plan: Node,
    *,
    seed: int | None = None,
    fixed: Sequence[int] = (),
    pass_number: tuple[int, ...] = (0,),
    units: NextUnits | None = None,
    contain_exits: bool = False,
    only_reads: bool = False,
    watch: Watch | None = None,
) -> ElementIterator:
    """Return an iterator over the plan's elements; nothing is opened before the first read.

    Args:
        plan: The plan as written.
        seed: What random steps without a seed of their own draw from; None: that of the plan's
            options, or else drawn now.
        fixed: `plan.fixed_order.fixed_seeds`, of a saved state; (): those of the plan.
        pass_number: Which iteration over the plan this is; shuffles differ from one to the next.
        units: Deals out the plan: returns the units (`rewrites.positions`) to read next. None: it
            is read whole.
        contain_exits: Whether SystemExit and the like from a user's function become a
            UserFunctionError: where other work goes on in the same process.
        only_reads: Whether whoever takes the elements writes into none of them: what sources and
            caches keep is lent then, where it would be copied, and is not to be written to.
        watch: Returns what stands in the place of a node's iterator (`watch_point`); for nested
            datasets, too. None: what was made stays as it is.

    Raises:
        FailedPreconditionError: There are `units`, but the plan cannot be dealt out; or it has
            thousands of steps one above the other.
    """
    prepared = prepare(with_fixed_seeds(plan, fixed or fixed_seeds(plan)))
    _allow_for_depth(prepared.plan)
    if seed is None:
        seed = prepared.options.seed
    context = Context(
        build=build_nested,
        seed=draw_seed() if seed is None else seed,
        passes=pass_number,
        options=prepared.options,
        free=free_steps(prepared.plan, prepared.options.deterministic),
        lending=lending_steps(prepared.plan) if only_reads else frozenset(),
        contain_exits=contain_exits,
        parallelism=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2,
    )
    if watch is not None:
        context = dataclasses.replace(context, watch=watch)
    if units is not None:
        return _start_dealt(prepared.plan, context, units)
    return make_iterator(prepared.plan, context)


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


def _start_dealt(plan: Node, context: Context, units: NextUnits) -> ElementIterator:
    deal = deal_of(plan)
    if deal is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be read in parts, so it cannot be dealt out"
        )
    if deal.whole:
        return OneUnit(lambda: make_iterator(plan, context), units)
    numbers = {id(node): number for number, node in enumerate(leaves(plan))}
    dealer = DealtPositions(deal, units, context.passes)
    steps = make_iterator(plan, dataclasses.replace(context, dealer=dealer, leaves=numbers))
    return ManyUnits(steps, dealer)


def build_nested(plan: Node, context: Context) -> ElementIterator:
    """Return an iterator over the elements of a dataset that a user's function returned.

    Args:
        plan: Its plan as written.
        context: What `Context.nested` gives for it.
    """
    prepared = prepare(plan, is_nested=True)
    own = prepared.options
    if own is not NO_OPTIONS:
        # What the outer plan sets wins, and its seed alone is saved with states.
        seed = own.seed if own.seed is not None and context.options.seed is None else context.seed
        options = own.merged_with(context.options)
        context = dataclasses.replace(context, options=options, seed=seed)
    return make_iterator(prepared.plan, context)


def draw_seed() -> int:
    """Return a seed that nobody can guess, small enough for any JSON reader."""
    return secrets.randbits(52)
