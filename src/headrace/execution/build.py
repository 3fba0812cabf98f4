"""Turn a plan into an iterator."""

from __future__ import annotations

import os
import secrets

# Imported for what they register.
from headrace.execution import (  # noqa: F401
    batching,
    buffering,
    combining,
    elements,
    elementwise,
    interleave,
    options,
    ordering,
    shuffle,
)
from headrace.execution.context import Context, SplitProvider
from headrace.execution.iterator import ElementIterator, make_iterator
from headrace.plan.node import Node
from headrace.plan.splits import split_sources

__all__ = ["draw_seed", "start"]


def start(
    plan: Node,
    *,
    seed: int | None = None,
    epoch: int = 0,
    splits: SplitProvider | None = None,
) -> ElementIterator:
    """Return an iterator over the plan's elements; nothing is opened before the first read.

    Args:
        plan: The plan, rewritten or not.
        seed: What random steps without a seed of their own draw from; None: drawn now.
        epoch: Which iteration over the plan this is; shuffles differ from one to the next.
        splits: Who deals out the plan's sources; None: they are read whole.
    """
    numbers = {id(node): i for i, node in enumerate(split_sources(plan))}
    context = Context(
        seed=draw_seed() if seed is None else seed,
        epoch=(epoch,),
        splits=splits,
        source_numbers=numbers if splits is not None else {},
        parallelism=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2,
    )
    return make_iterator(plan, context)


def draw_seed() -> int:
    """Return a seed that nobody can guess, small enough for any JSON reader."""
    return secrets.randbits(52)
