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
    "is_index_part",
    "leaves",
    "lending_steps",
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


# --- The index part of a plan: its subtrees of index steps only, which are arithmetic -------------
#
# An index part calls no function of the user's and reads nothing. Its elements follow from (seed,
# pass), they are counted without reading, and the state of an iterator over it is one integer. The
# plan is taken in its normal form (`rewrites.normal`).


def is_index_part(plan: Node) -> bool:
    """Say whether `plan` is index steps only, down to the numbers that it starts from."""
    return all(node.index_step for node in distinct([plan]))


def leaves(plan: Node) -> tuple[Node, ...]:
    """Return the roots of the largest index parts, in `walk` order.

    A leaf's number is its place here. An index part that stands in the plan several times is as
    many leaves: each is read for itself.
    """
    found: list[Node] = []
    inside = _index_steps(plan)
    pending = [plan]
    while pending:
        node = pending.pop()
        if id(node) in inside:
            found.append(node)
        else:
            pending.extend(reversed(node.inputs))
    return tuple(found)


def _index_steps(plan: Node) -> set[int]:
    """Return the `id` of each node that is the root of an index part."""
    inside: set[int] = set()
    for node in distinct([plan]):
        if node.index_step and all(id(input_) in inside for input_ in node.inputs):
            inside.add(id(node))
    return inside


# --- Which steps may lend what they hold ----------------------------------------------------------
#
# Elements belong to their consumer, so a source and a cache give copies of what they keep. A worker
# that sends elements on only reads them. Then nobody writes into an element but a user's function
# that it is passed to, and what is passed to none need not be copied.


def lending_steps(plan: Node) -> frozenset[int]:
    """Return the `id` of each step whose elements are passed to no function of the user's.

    Args:
        plan: A plan whose elements are only read.
    """
    found: dict[bool, set[int]] = {True: set(), False: set()}
    pending = [(plan, True)]
    while pending:
        node, is_only_read = pending.pop()
        if id(node) in found[is_only_read]:
            continue
        found[is_only_read].add(id(node))
        below = is_only_read and node.only_reads
        pending.extend((input_, below) for input_ in node.inputs)
    # What stands in two places is lent in neither, unless it may be in both.
    return frozenset(found[True] - found[False])
