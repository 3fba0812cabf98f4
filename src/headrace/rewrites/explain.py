"""Plans as readable text: as written, as executed, and how they are split."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.plan.determinism import find_overruled_steps, find_unordered_steps
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.plan.traverse import find_leaves, outline, walk
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition import PlanPartition
from headrace.rewrites.split_space import compute_split_space

__all__ = ["explain", "explain_partition"]


def explain(plan: Node) -> str:
    """Return a plan as written and as executed, with explanatory notes."""
    prepared = prepare(plan)
    run, wish = prepared.plan, prepared.options.deterministic
    notes = {id(leaf): "the index part, with all below it" for leaf in find_leaves(run)}
    free = find_unordered_steps(run, wish)
    for step, keeper in find_overruled_steps(run, wish).items():
        notes[step] = (
            f"keeps its order all the same: {_explain_kept_order(keeper, id(keeper) in free)}"
        )
    return f"as written\n{outline(plan, 1)}\nas run\n{outline(run, 1, notes)}\n" + (
        _explain_remote_plans(plan)
        or f"units that a service would deal out: {_format_split_count(run)}"
    )


def _explain_remote_plans(plan: Node) -> str:
    """Return the explanations of sources that run a plan remotely with their own splits."""
    sources = [node.source for node in walk(plan) if isinstance(node, FromSource)]
    return "\n".join(
        f"over the service\n{each.explanation}" for each in sources if each.explanation
    )


def explain_partition(partition: PlanPartition, notes: Sequence[str] = ()) -> str:
    """Return a description of a partition: where each step runs, why, and what limits it.

    Args:
        partition: The partition.
        notes: Further notes on its limits.
    """
    order = "of one process" if partition.is_ordered else "in which workers finish"
    steps = "".join(
        f"\n    {placed.runs_on:7}  {placed.step}{f': {placed.reason}' if placed.reason else ''}"
        for placed in partition.placements
    )
    held = ""
    if partition.client_shuffle_bytes is None:
        held = "\n  shuffles hold elements of unknown size, so steps above them stay at the client"
    elif partition.client_shuffle_bytes:
        held = (
            f"\n  shuffles at the client: {partition.client_shuffle_bytes:,} bytes of finished "
            "elements"
        )
    said = "".join(f"\n    {note}" for note in notes)
    return (
        f"order: that {order}"
        f"\n  where each step runs, inputs first{steps}"
        f"\n  on workers\n{outline(partition.worker_stage, 2)}"
        f"\n  at the client\n{outline(partition.client_stage, 2)}"
        f"{held}{said}"
    )


def _explain_kept_order(order_keeper: Node, is_free: bool) -> str:
    """Return why a step keeps the order of one below it."""
    if is_free:
        return (
            f"the {order_keeper.kind} above, whose order is free, knows its elements by their "
            "order; "
            "deterministic=True there would free this one instead"
        )
    return f"the {order_keeper.kind} above reads it again after a restore"


def _format_split_count(plan: Node) -> str:
    deal = compute_split_space(plan)
    if deal is None:
        return "none, for it reads a source that cannot be read in parts"
    if deal.is_single_split:
        return "1, the whole plan, for it joins streams that cannot be dealt by themselves"
    return "without end" if deal.size == INFINITE else str(deal.size)
