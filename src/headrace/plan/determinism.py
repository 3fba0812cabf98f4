"""Which elements come in which order: what is the same each time, and what is not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

from headrace.plan.batching import Batch
from headrace.plan.combining import Sample
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.ordering import Enumerate, Shard, Shuffle, Skip, Take
from headrace.plan.source import Source
from headrace.plan.traverse import fold, merged_options, walk
from headrace.plan.user_function import step_name

__all__ = [
    "drawn_seeds",
    "fixed_seeds",
    "free_steps",
    "holding_over",
    "kept_steps",
    "seeds_named",
    "with_fixed_seeds",
]

# --- The seeds of steps that draw the same for ever, and were given no seed by the user -----------
#
# Such a step draws its seed when it is made, so that its order is the same in all datasets that are
# built on it, and wherever the plan is sent to. What was set by `Options.seed` wins.
#
# A plan that a source runs elsewhere has such steps, too. Readers of a job with a name, each of
# which made them for itself, have the seeds that follow from the name.


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


# --- Which steps may yield elements as they are ready ---------------------------------------------
#
# The user's wish (`deterministic=False`) frees the order, and never which elements are left. So it
# counts only where no step above would have to read the same elements again, in the same order, to
# go on from a saved place. How many threads a step has does not count: a state is restored with
# other numbers of them, so which steps are free follows from the plan and the wish alone.


def free_steps(plan: Node, deterministic: bool | None) -> frozenset[int]:
    """Return the `id` of each step whose order is free.

    Args:
        plan: The plan in its normal form, where each step stands in one place.
        deterministic: The option of this name that holds for the plan.
    """
    return frozenset(id(node) for node, keeper in _wished(plan, deterministic) if keeper is None)


def kept_steps(plan: Node, deterministic: bool | None) -> dict[int, Node]:
    """Return the `id` of each step whose order was freed in vain, and the step above that keeps it.

    Args:
        plan: As for `free_steps`.
        deterministic: As for `free_steps`.
    """
    wished = _wished(plan, deterministic)
    return {id(node): keeper for node, keeper in wished if keeper is not None}


def _wished(plan: Node, deterministic: bool | None) -> Iterator[tuple[Node, Node | None]]:
    """Yield each step whose order the user has freed, and the nearest step above that keeps it."""
    pending: list[tuple[Node, Node | None]] = [(plan, None)]
    while pending:
        node, keeper = pending.pop()
        is_wished = node.frees_order(deterministic)
        if is_wished:
            yield node, keeper
        # A step that is free knows its own elements by their order.
        if node.reads_again or (is_wished and keeper is None):
            keeper = node
        pending.extend((input_, keeper) for input_ in node.inputs)


# --- Steps over a source that gives its elements in no order: which of them have places there -----

_HOLD_NOTHING = (FromSource, Map, Filter, Batch, Take, Skip, Shard, Enumerate)
"""Steps whose places name no element that was read before: those are not read again."""


def holding_over(plan: Node) -> str:
    """Return why a plan has no places; "": it has.

    A step that holds elements reads them again when it is restored. Over a source without order
    others would come then.
    """
    nodes = list(walk(plan))
    if all(source.has_order for source in _sources(nodes)):
        return ""
    wish = merged_options(plan).deterministic
    for node in nodes:
        holds = not (node.is_transparent or isinstance(node, _HOLD_NOTHING))
        if holds or node.frees_order(wish):
            return (
                f"{step_name(node)} holds elements, over a service that sends them in no order, "
                "and another time others would be there. Put that step before `distribute`, or "
                "read with `ordered=True`"
            )
    return ""


def _sources(nodes: list[Node]) -> list[Source]:
    return [node.source for node in nodes if isinstance(node, FromSource)]
