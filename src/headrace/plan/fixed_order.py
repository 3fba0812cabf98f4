"""The seeds of steps that draw the same for ever, and were given no seed by the user.

Such a step draws its seed when it is made, so that its order is the same in all datasets that are
built on it, and wherever the plan is sent to. What was set by `Options.seed` wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from headrace.plan.choosing import Sample
from headrace.plan.node import Node
from headrace.plan.ordering import Shuffle
from headrace.plan.traverse import fold, merged_options, walk

__all__ = ["fixed_seeds", "with_fixed_seeds"]


def fixed_seeds(plan: Node) -> list[int]:
    """Return the seeds of a plan's steps that have one order for ever, in `walk` order.

    Args:
        plan: The plan as written.
    """
    own = _own_seeds(plan)
    wish = merged_options(plan).seed if own else None
    if wish is None:
        return own
    return [_mixed(wish, place) for place in range(len(own))]


def with_fixed_seeds(plan: Node, seeds: Sequence[int]) -> Node:
    """Return the plan with what `fixed_seeds` returned for it, or for one with the same steps."""
    if list(seeds) == _own_seeds(plan):
        return plan
    rest = iter(seeds)

    def changed(node: Node, inputs: list[Node]) -> Node:
        node = node.with_inputs(inputs)
        if _seed_of(node) is not None:
            node = node.with_parameters(drawn_seed=next(rest))
        return node

    return fold(plan, changed)


def _own_seeds(plan: Node) -> list[int]:
    return [seed for node in walk(plan) if (seed := _seed_of(node)) is not None]


def _seed_of(node: Node) -> int | None:
    return node.drawn_seed if isinstance(node, Shuffle | Sample) else None


def _mixed(seed: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 12  # small enough for any JSON reader
