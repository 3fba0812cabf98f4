"""A plan as text for people: as written, as it is run, and how it would be dealt out."""

from __future__ import annotations

from headrace.plan.free_order import free_steps
from headrace.plan.index_part import leaves
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.plan.traverse import outline
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of

__all__ = ["explain"]


def explain(plan: Node) -> str:
    """Return a plan as written and as it is run, with what a reader may wonder about."""
    prepared = prepare(plan)
    run, wish = prepared.plan, prepared.options.deterministic
    free = free_steps(run, wish)
    notes = {id(leaf): "the index part, with all below it" for leaf in leaves(run)}
    notes |= {
        id(node): "keeps its order all the same: a step above reads it again after a restore"
        for node in _wishing(run, wish)
        if id(node) not in free
    }
    return (
        f"as written\n{outline(plan, 1)}\n"
        f"as run\n{outline(run, 1, notes)}\n"
        f"units that a service would deal out: {_units(run)}"
    )


def _wishing(plan: Node, deterministic: bool | None) -> list[Node]:
    """Return the steps whose order the user has freed."""
    found: list[Node] = []
    pending = [plan]
    while pending:
        node = pending.pop()
        if node.frees_order(deterministic):
            found.append(node)
        pending += node.inputs
    return found


def _units(plan: Node) -> str:
    deal = deal_of(plan)
    if deal is None:
        return "none, for it reads a source that cannot be read in parts"
    if deal.whole:
        return "1, the whole plan, for it zips streams that cannot be dealt by themselves"
    return "without end" if deal.size == INFINITE else str(deal.size)
