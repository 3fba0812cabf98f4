"""How often elements are visited where something is lost: what a plan can do, and its default.

With DYNAMIC, each element comes exactly once where each is of one unit, or made of elements of
units (`rewrites.roots`); else at most once. Static shares are read again, at least once. A lost
copy ends where it is.
"""

from __future__ import annotations

import dataclasses

from headrace.errors import FailedPreconditionError
from headrace.plan.free_order import free_steps
from headrace.plan.node import Node
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of
from headrace.rewrites.roots import with_roots
from headrace.service.client.options import ReadingOptions
from headrace.service.config import ShardingPolicy

__all__ = ["check_origins", "has_origins", "with_visitation"]


def check_origins(plan: Node) -> None:
    """Refuse a plan whose elements cannot be named by units and ordinals.

    Raises:
        FailedPreconditionError: It says which step works on the whole stream.
    """
    prepared = prepare(plan)
    deal = deal_of(prepared.plan)
    if deal is not None and not deal.whole:
        with_roots(prepared.plan, free_steps(prepared.plan, prepared.options.deterministic))


def has_origins(plan: Node) -> bool:
    """Whether the elements of a plan can be named by units and ordinals."""
    try:
        check_origins(plan)
    except FailedPreconditionError:
        return False
    return True


def with_visitation(options: ReadingOptions, *, origins: bool) -> ReadingOptions:
    """Return options that say how often elements are visited.

    Args:
        options: As given.
        origins: Whether the dataset's elements can be named.
    """
    is_open = options.visitation is None and options.processing_mode is ShardingPolicy.DYNAMIC
    if not is_open or options.num_consumers is not None or options.trainer_id:
        return options
    return dataclasses.replace(options, visitation="exactly_once" if origins else "at_most_once")
