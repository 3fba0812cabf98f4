"""The seeds of steps that draw the same for ever, and were given no seed by the user.

Such a step draws its seed when it is made, so that its order is the same in all datasets that are
built on it, and wherever the plan is sent to. What was set by `Options.seed` wins.

A plan that a source runs elsewhere has such steps, too. Readers of a job with a name, each of which
made them for itself, have the seeds that follow from the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice

from headrace.plan.choosing import Sample
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.ordering import Shuffle
from headrace.plan.traverse import fold, merged_options, walk

__all__ = ["drawn_seeds", "fixed_seeds", "seeds_named", "with_fixed_seeds"]


def fixed_seeds(plan: Node) -> list[int]:
    """Return the seeds of a plan's steps that have one order for ever, in `walk` order.

    Args:
        plan: The plan as written.
    """
    own = drawn_seeds(plan)
    wish = merged_options(plan).seed if own else None
    if wish is None:
        return own
    return [_mixed(wish, place) for place in range(len(own))]


def with_fixed_seeds(plan: Node, seeds: Sequence[int]) -> Node:
    """Return the plan with what `fixed_seeds` returned for it, or for one with the same steps."""
    if list(seeds) == drawn_seeds(plan):
        return plan
    rest = iter(seeds)

    def changed(node: Node, inputs: list[Node]) -> Node:
        node = node.with_inputs(inputs)
        count = len(_seeds_of(node))
        if count and isinstance(node, FromSource):
            source = node.source.with_fixed_seeds(tuple(islice(rest, count)))
            return node.with_parameters(source=source)
        return node.with_parameters(drawn_seed=next(rest)) if count else node

    return fold(plan, changed)


def drawn_seeds(plan: Node) -> list[int]:
    """Return what those steps drew when they were made, whatever `Options.seed` says."""
    return [seed for node in walk(plan) for seed in _seeds_of(node)]


def seeds_named(plan: Node, name: str) -> list[int]:
    """Return the seeds of those steps where a name decides them."""
    return [_mixed(name, place) for place in range(len(drawn_seeds(plan)))]


def _seeds_of(node: Node) -> tuple[int, ...]:
    if isinstance(node, FromSource):
        return node.source.fixed_seeds
    seed = node.drawn_seed if isinstance(node, Shuffle | Sample) else None
    return () if seed is None else (seed,)


def _mixed(seed: int | str, place: int) -> int:
    digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 12  # small enough for any JSON reader
