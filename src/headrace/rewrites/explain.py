"""A plan as text for people: as written, as it is run, and how it would be dealt out."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.plan.determinism import free_steps, kept_steps
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.plan.traverse import leaves, outline, walk
from headrace.rewrites.cut import Cut
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of

__all__ = ["explain", "explain_cut"]


def explain(plan: Node) -> str:
    """Return a plan as written and as it is run, with what a reader may wonder about."""
    prepared = prepare(plan)
    run, wish = prepared.plan, prepared.options.deterministic
    notes = {id(leaf): "the index part, with all below it" for leaf in leaves(run)}
    free = free_steps(run, wish)
    for step, keeper in kept_steps(run, wish).items():
        notes[step] = f"keeps its order all the same: {_why(keeper, id(keeper) in free)}"
    return (
        f"as written\n{outline(plan, 1)}\n"
        f"as run\n{outline(run, 1, notes)}\n"
        f"{_elsewhere(plan) or f'units that a service would deal out: {_units(run)}'}"
    )


def _elsewhere(plan: Node) -> str:
    """Return what sources say of plans that they run elsewhere, and deal out by themselves."""
    sources = [node.source for node in walk(plan) if isinstance(node, FromSource)]
    return "\n".join(f"over the service\n{each.account}" for each in sources if each.account)


def explain_cut(made: Cut, notes: Sequence[str] = ()) -> str:
    """Return how a plan is cut, as text: what runs where, why, and what bounds it.

    Args:
        made: How.
        notes: What else is to be said of what bounds it.
    """
    order = "of one process" if made.is_ordered else "in which workers finish"
    steps = "".join(
        f"\n    {placed.where:7}  {placed.step}{f': {placed.why}' if placed.why else ''}"
        for placed in made.placed
    )
    held = ""
    if made.held_bytes is None:
        held = "\n  shuffles hold elements of unknown size, so steps above them stay at the client"
    elif made.held_bytes:
        held = f"\n  shuffles at the client: {made.held_bytes:,} bytes of finished elements"
    said = "".join(f"\n    {note}" for note in notes)
    return (
        f"order: that {order}"
        f"\n  where each step runs, inputs first{steps}"
        f"\n  on workers\n{outline(made.below, 2)}"
        f"\n  at the client\n{outline(made.above, 2)}"
        f"{held}{said}"
    )


def _why(keeper: Node, is_free: bool) -> str:
    """Say why a step keeps the order of one below it."""
    if is_free:
        return (
            f"the {keeper.kind} above, whose order is free, knows its elements by their order; "
            "deterministic=True there would free this one instead"
        )
    return f"the {keeper.kind} above reads it again after a restore"


def _units(plan: Node) -> str:
    deal = deal_of(plan)
    if deal is None:
        return "none, for it reads a source that cannot be read in parts"
    if deal.whole:
        return "1, the whole plan, for it joins streams that cannot be dealt by themselves"
    return "without end" if deal.size == INFINITE else str(deal.size)
