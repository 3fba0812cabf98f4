"""How often elements are visited where something is lost, and what runs where: what a plan can do.

With DYNAMIC, each element comes exactly once. Workers run as much of the plan as can be named by
units and ordinals (`rewrites.cut`), and the client runs the rest. Static shares are read again, at
least once. A lost copy ends where it is.
"""

from __future__ import annotations

import dataclasses

from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch, Unbatch
from headrace.plan.buffering import Cache
from headrace.plan.combining import Interleave
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.traverse import walk
from headrace.plan.units import Units
from headrace.plan.user_function import step_name
from headrace.plan.windows import GroupByWindow
from headrace.rewrites.cut import Cut, Half, cut, cut_as
from headrace.rewrites.explain import explain_cut
from headrace.rewrites.normal import normalize
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of
from headrace.service.client.options import ReadingOptions
from headrace.service.config import ShardingPolicy

__all__ = [
    "account_of",
    "cannot_begin",
    "cut_for",
    "has_origins",
    "is_cut",
    "whole_stream_step",
    "with_visitation",
]


def cut_for(plan: Node, options: ReadingOptions) -> Cut | None:
    """Return how a plan is cut for reading; None: workers run all of it.

    In order, what `in_order` decides may be another half, of which all else is the same.

    Raises:
        FailedPreconditionError: It is to be read in order, and cannot be read in parts; or a step
            that opens datasets would run here over what comes in order.
    """
    if not is_cut(options):
        return None
    if not options.ordered and deal_of(normalize(plan).plan) is None:
        return None  # the dispatcher says why not
    made = cut(plan, ordered=options.ordered)
    if made.is_ordered and made.wants_places:
        raise FailedPreconditionError(_would_open(made))
    if made.is_ordered and options.visitation == "at_most_once":
        step = next((each.step for each in made.placed if each.where == "client"), "a step")
        raise FailedPreconditionError(
            f"visitation='at_most_once' is not supported for this dataset, because {step} needs "
            "the elements in the order of one process: leave `visitation` out, or put that step "
            "after `distribute`"
        )
    is_whole = isinstance(made.above, Units) and not made.is_ordered
    return None if is_whole else made


def cannot_begin(plan: Node, half: Half, *, is_of_one_process: bool) -> str:
    """Return why reading cannot begin at a place: `plan.source.Source.cannot_begin_at`."""
    made = cut_as(prepare(plan), half)
    if not made.is_ordered:
        return ""
    if made.wants_places:
        return (
            "a state of a reading in order is gone on from in that order, but "
            f"{_would_open(made)}, or restore it in one process"
        )
    caches = [node for node in walk(made.above) if isinstance(node, Cache)]
    if caches and is_of_one_process:
        return (
            f"the state was saved in one process by {step_name(caches[0])}, which keeps nothing "
            "where it runs over what workers send, so that the place is none there: restore it in "
            "one process, or put that step after `distribute`"
        )
    return ""


def _would_open(made: Cut) -> str:
    (step, *_) = [node for node in walk(made.above) if isinstance(node, _OPENS_DATASETS)]
    return (
        f"{step_name(step)} would open datasets in this process, over elements that workers send "
        "in order, which is not supported: put that step after `distribute`"
    )


def account_of(plan: Node, options: ReadingOptions) -> str:
    """Return what is to be said of how a plan is run in any order; "": nothing."""
    if not is_cut(options) or deal_of(normalize(plan).plan) is None:
        return ""
    return explain_cut(cut(plan, ordered=False))


def is_cut(options: ReadingOptions) -> bool:
    """Whether plans are cut in two, where that is needed."""
    is_dealt = options.processing_mode is ShardingPolicy.DYNAMIC
    return is_dealt and options.num_consumers is None and not options.trainer_id


def has_origins(plan: Node) -> bool:
    """Whether workers can run all of a plan, and its elements be named by units and ordinals."""
    if deal_of(normalize(plan).plan) is None:
        return True
    return isinstance(cut(plan, ordered=False).above, Units)


def whole_stream_step(made: Cut) -> str:
    """Return what in the upper half of a plan is about the whole stream; "": nothing."""
    if made.is_ordered:
        return "reading in order"
    steps = [node for node in walk(made.above) if not isinstance(node, _OF_ANY_PART)]
    return step_name(steps[0]) if steps else ""


_OPENS_DATASETS = (Interleave, GroupByWindow)
_OF_ANY_PART = (Units, Batch, Unbatch, Map, Filter)
"""Steps that mean the same over any part of a stream; of a batch each client may drop one."""


def with_visitation(options: ReadingOptions) -> ReadingOptions:
    """Return options that say how often elements are visited."""
    if options.visitation is not None or not is_cut(options):
        return options
    return dataclasses.replace(options, visitation="exactly_once")
