"""Determinism of a plan's order: fixed seeds, unordered steps, and states that cannot be saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

from headrace.plan.batching import Batch
from headrace.plan.combining import Sample
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Filter, Map
from headrace.plan.ignoring_errors import IgnoreErrors
from headrace.plan.node import Node
from headrace.plan.ordering import Enumerate, ShardElements, Shuffle, Skip, Take
from headrace.plan.random_map import DrawRandomWords
from headrace.plan.source import Source
from headrace.plan.traverse import fold, merged_options, walk
from headrace.plan.user_function import step_name

__all__ = [
    "collect_default_seeds",
    "collect_fixed_seeds",
    "derive_seeds",
    "explain_unsavable_state",
    "find_overruled_steps",
    "find_unordered_steps",
    "with_fixed_seeds",
]

# --- Fixed seeds: of steps with the same order in every epoch that got no seed from the user ------
#
# Such a step draws its default seed at construction, so that its order is the same in all datasets
# built on it and wherever the plan is sent. `Options.seed` takes precedence.
#
# The plan of a remote source has such steps, too. Each reader of a named job builds them for
# itself, so their seeds are derived from the job name.


def collect_fixed_seeds(plan: Node) -> list[int]:
    """Return the fixed seeds of a plan, in `walk` order.

    Args:
        plan: The plan as written.
    """
    default_seeds = collect_default_seeds(plan)
    seed = merged_options(plan).seed if default_seeds else None
    if seed is None:
        return default_seeds
    return [_mix_seed(seed, index) for index in range(len(default_seeds))]


def with_fixed_seeds(plan: Node, seeds: Sequence[int]) -> Node:
    """Return the plan with the seeds that `collect_fixed_seeds` returned for the same steps."""
    if list(seeds) == collect_default_seeds(plan):
        return plan
    remaining_seeds = iter(seeds)

    def set_seeds(node: Node, inputs: list[Node]) -> Node:
        node = node.copy_with_inputs(inputs)
        count = len(_fixed_seeds_of(node))
        if count and isinstance(node, FromSource):
            source = node.source.with_fixed_seeds(tuple(islice(remaining_seeds, count)))
            return node.with_parameters(source=source)
        return node.with_parameters(default_seed=next(remaining_seeds)) if count else node

    return fold(plan, set_seeds)


def collect_default_seeds(plan: Node) -> list[int]:
    """Return the seeds drawn at construction of the steps, whatever `Options.seed` is."""
    return [seed for node in walk(plan) for seed in _fixed_seeds_of(node)]


def derive_seeds(plan: Node, name: str) -> list[int]:
    """Return a fixed seed, derived from `name`, for each step that needs one."""
    return [_mix_seed(name, index) for index in range(len(collect_default_seeds(plan)))]


def _fixed_seeds_of(node: Node) -> tuple[int, ...]:
    if isinstance(node, FromSource):
        return node.source.fixed_seeds
    seed = node.default_seed if isinstance(node, Shuffle | Sample) else None
    return () if seed is None else (seed,)


def _mix_seed(seed: int | str, number: int) -> int:
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 12  # small enough for any JSON reader


# --- Unordered steps: those that may yield elements as they are ready -----------------------------
#
# `deterministic=False` frees the order of a step, but must not change which elements the dataset
# has. So it is ignored if a downstream step rereads the same elements in the same order to resume
# from a state. The number of threads does not matter: a state may be restored with another number,
# so the set of unordered steps follows from the plan and the options alone.


def find_unordered_steps(plan: Node, deterministic: bool | None) -> frozenset[int]:
    """Return the `id` of each unordered step.

    Args:
        plan: The plan in its canonical form, in which each step occurs once.
        deterministic: The plan's `Options.deterministic`.
    """
    return frozenset(
        id(node)
        for node, order_keeper in _find_order_requests(plan, deterministic)
        if order_keeper is None
    )


def find_overruled_steps(plan: Node, deterministic: bool | None) -> dict[int, Node]:
    """Return the `id` of each step that stays ordered despite the user's request, and the reason.

    Args:
        plan: As for `find_unordered_steps`.
        deterministic: As for `find_unordered_steps`.

    Returns:
        For each step, the downstream step that needs its order.
    """
    requested = _find_order_requests(plan, deterministic)
    return {id(node): order_keeper for node, order_keeper in requested if order_keeper is not None}


def _find_order_requests(
    plan: Node, deterministic: bool | None
) -> Iterator[tuple[Node, Node | None]]:
    """Yield each step that may be unordered, and the nearest step above that needs its order."""
    pending: list[tuple[Node, Node | None]] = [(plan, None)]
    while pending:
        node, order_keeper = pending.pop()
        is_requested = node.allows_unordered(deterministic)
        if is_requested:
            yield node, order_keeper
        # An unordered step identifies its input elements by their order.
        if node.rereads_input or (is_requested and order_keeper is None):
            order_keeper = node
        pending.extend((input_, order_keeper) for input_ in node.inputs)


# --- Steps over an unordered source: which of them can save a state -------------------------------

_STATELESS_STEPS = (
    *(FromSource, Map, DrawRandomWords, Filter, IgnoreErrors),
    *(Batch, Take, Skip, ShardElements, Enumerate),
)
"""Steps whose states refer to no element read before, so that nothing is read again."""


def explain_unsavable_state(plan: Node) -> str:
    """Return why a plan cannot save its state, or "" if it can.

    A step that buffers elements reads them again when it is restored. An unordered source would
    then return other elements.
    """
    nodes = list(walk(plan))
    if all(source.has_order for source in _sources(nodes)):
        return ""
    deterministic = merged_options(plan).deterministic
    for node in nodes:
        buffers_elements = not (node.is_transparent or isinstance(node, _STATELESS_STEPS))
        if buffers_elements or node.allows_unordered(deterministic):
            return (
                f"{step_name(node)} buffers elements that a data service delivers in arbitrary "
                "order, and reading again would return other elements. Put the step before "
                "`distribute`, or read with `ordered=True`"
            )
    return ""


def _sources(nodes: list[Node]) -> list[Source]:
    return [node.source for node in nodes if isinstance(node, FromSource)]
