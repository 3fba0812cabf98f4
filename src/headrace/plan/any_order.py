"""Steps over a source that gives its elements in no order: which of them have places there."""

from __future__ import annotations

from headrace.plan.batching import Batch
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.ordering import Enumerate, Shard, Skip, Take
from headrace.plan.source import Source
from headrace.plan.traverse import merged_options, walk
from headrace.plan.user_function import step_name

__all__ = ["holding_over"]

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
