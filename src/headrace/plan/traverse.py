"""Walk a plan: in order, bottom up, as text. Nothing here recurses: plans are deep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from headrace.element.spec import Spec
from headrace.plan.elements import FromSource
from headrace.plan.node import Node, distinct
from headrace.plan.options import Options, WithOptions

__all__ = [
    "cardinality",
    "element_spec",
    "fold",
    "merged_options",
    "outline",
    "transform",
    "walk",
]

T = TypeVar("T")


def walk(plan: Node) -> Iterator[Node]:
    """Yield all nodes, inputs before the step that takes them, left to right.

    A node that stands in the plan several times comes as often.
    """
    pending = [(plan, False)]
    while pending:
        node, is_ready = pending.pop()
        if is_ready:
            yield node
        else:
            pending.append((node, True))
            pending.extend((input_, False) for input_ in reversed(node.inputs))


def fold(plan: Node, visit: Callable[[Node, list[T]], T], *, once: bool = False) -> T:
    """Return `visit(plan, results)`, where `results` are those of its inputs, found in this way.

    Args:
        plan: The plan.
        visit: Called in `walk` order.
        once: Call it once for a node that stands in the plan several times, instead of as often.
    """
    if once:
        known: dict[int, T] = {}
        for node in distinct([plan]):
            known[id(node)] = visit(node, [known[id(input_)] for input_ in node.inputs])
        return known[id(plan)]
    results: list[T] = []
    pending = [(plan, -1)]  # a node, and the number of its inputs once they are done
    while pending:
        node, count = pending.pop()
        if count < 0:
            inputs = node.inputs
            pending.append((node, len(inputs)))
            pending.extend((input_, -1) for input_ in reversed(inputs))
        else:
            place = len(results) - count
            own = results[place:]
            del results[place:]
            results.append(visit(node, own))
    return results[0]


def transform(plan: Node, rule: Callable[[Node], Node]) -> Node:
    """Return the plan with `rule` applied to every node, inputs first.

    A node that stands in the plan several times does so in the result.
    """
    return fold(plan, lambda node, inputs: rule(node.over(inputs)), once=True)


def cardinality(plan: Node) -> int:
    """Return the number of elements, INFINITE, or UNKNOWN."""
    return fold(plan, lambda node, inputs: node.cardinality(*inputs), once=True)


def element_spec(
    plan: Node,
    infer: Callable[[Node], Spec | None] | None = None,
    known: dict[int, Spec | None] | None = None,
) -> Spec | None:
    """Return the spec of the plan's elements.

    Args:
        plan: The plan.
        infer: Called for a node whose spec only running can tell, and not for what lies below it
            unless that is another step's input. Without it such a plan has no spec, and None is
            returned; so it is where `infer` returns None for the plan.
        known: Specs by the `id` of their nodes, for several calls about one plan; added to.
    """
    known = {} if known is None else known
    pending = [plan]
    while pending:
        node = pending[-1]
        inputs = () if node.own_spec else node.inputs
        missing = [input_ for input_ in inputs if id(input_) not in known]
        if missing:
            pending.extend(reversed(missing))
            continue
        pending.pop()
        if id(node) in known:
            continue
        specs = [known[id(input_)] for input_ in inputs]
        spec = None if any(one is None for one in specs) else node.spec(*specs)
        if spec is None and infer is not None:
            spec = infer(node)
        known[id(node)] = spec
    return known[id(plan)]


def merged_options(plan: Node) -> Options:
    """Return the options that hold for the whole plan: a later setting wins over an earlier."""
    options = Options()
    for node in distinct([plan]):
        if isinstance(node, WithOptions):
            options = options.merged_with(node.options)
        elif isinstance(node, FromSource) and (written := node.source.written) is not None:
            options = options.merged_with(merged_options(written))
    return options


def outline(plan: Node, depth: int = 0, notes: Mapping[int, str] | None = None) -> str:
    """Return the plan as indented text, the last step first.

    Args:
        plan: The plan.
        depth: How far to indent it.
        notes: What to say of some nodes, by their `id`.
    """
    notes = notes or {}
    lines = []
    pending = [(plan, depth)]
    while pending:
        node, level = pending.pop()
        note = f"  <- {notes[id(node)]}" if id(node) in notes else ""
        lines.append("  " * min(level, _DEEPEST_INDENT) + node.describe() + note)
        pending.extend((input_, level + 1) for input_ in reversed(node.inputs))
    return "\n".join(lines)


_DEEPEST_INDENT = 60
"""In levels; without it the text of a long chain of steps would grow as its square."""
