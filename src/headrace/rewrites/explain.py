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
    executed, deterministic = prepared.plan, prepared.options.deterministic
    notes = {id(leaf): "index plan, including its inputs" for leaf in find_leaves(executed)}
    unordered_steps = find_unordered_steps(executed, deterministic)
    for step, order_keeper in find_overruled_steps(executed, deterministic).items():
        notes[step] = (
            "ordered despite deterministic=False: "
            f"{_explain_kept_order(order_keeper, id(order_keeper) in unordered_steps)}"
        )
    return f"as written\n{outline(plan, 1)}\nas executed\n{outline(executed, 1, notes)}\n" + (
        _explain_remote_plans(plan) or f"number of splits: {_format_split_count(executed)}"
    )


def _explain_remote_plans(plan: Node) -> str:
    """Return the explanations of sources that run a plan remotely with their own splits."""
    sources = [node.source for node in walk(plan) if isinstance(node, FromSource)]
    return "\n".join(
        f"with the data service\n{each.explanation}" for each in sources if each.explanation
    )


def explain_partition(partition: PlanPartition, notes: Sequence[str] = ()) -> str:
    """Return a description of a partition: where each step runs, why, and what limits it.

    Args:
        partition: The partition.
        notes: Further notes on its limits.
    """
    order = "as in a single process" if partition.is_ordered else "as workers finish"
    steps = "".join(
        f"\n    {step.runs_on:7}  {step.step}{f': {step.reason}' if step.reason else ''}"
        for step in partition.placements
    )
    shuffles = ""
    if partition.client_shuffle_bytes is None:
        shuffles = (
            "\n  shuffles hold elements of unknown size, so steps above them run in the client"
        )
    elif partition.client_shuffle_bytes:
        shuffles = (
            f"\n  shuffles in the client: {partition.client_shuffle_bytes:,} bytes of processed "
            "elements"
        )
    further_notes = "".join(f"\n    {note}" for note in notes)
    return (
        f"order: {order}"
        f"\n  where each step runs, inputs first{steps}"
        f"\n  worker stage\n{outline(partition.worker_stage, 2)}"
        f"\n  client stage\n{outline(partition.client_stage, 2)}"
        f"{shuffles}{further_notes}"
    )


def _explain_kept_order(order_keeper: Node, is_unordered: bool) -> str:
    """Return why a step keeps the order of one below it."""
    if is_unordered:
        return (
            f"the unordered {order_keeper.method} above identifies its input by the order of its "
            "elements; with deterministic=True there, this step would be unordered instead"
        )
    return f"the {order_keeper.method} above reads its input again after a restore"


def _format_split_count(plan: Node) -> str:
    split_space = compute_split_space(plan)
    if split_space is None:
        return "none: the plan reads a source that cannot be divided"
    if split_space.is_single_split:
        return "1, the whole plan: it joins streams that cannot be assigned separately"
    return "infinite" if split_space.size == INFINITE else str(split_space.size)
