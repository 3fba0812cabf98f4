"""Steps that rewrites put into plans that are dealt out or run in two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.element.spec import Spec
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "FailsBelow",
    "Mark",
    "RaiseFailed",
    "Root",
    "Units",
]

# --- Where the client's half begins: elements that are made elsewhere, unit by unit ---------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Units(Node):
    """The elements of units of a dealt plan, made by its other half (`rewrites.cut`).

    One unit after the other, or several in turn, as an interleave takes them.
    """

    kind: ClassVar[str] = "units"
    own_spec: ClassVar[bool] = True

    size: int
    """Units in a pass, or INFINITE."""
    offset: int = 0
    """Units of the plan's stream before the first of these."""
    strides: tuple[int, ...] = ()
    """Units in one pass of each `repeat` above, the outermost first."""
    cycle_length: int = 1
    block_length: int = 1
    stream: int = 0
    """Which of the streams in the other half they are."""
    unit_positions: int = 0
    """Positions of the one leaf that a unit has; 0: there are several leaves."""
    positions: int = 0
    """Positions of that leaf in a pass, or INFINITE."""
    counts_rows: bool = False
    """Whether a unit has as many elements as are read of a source at its index."""
    holds_failures: bool = False
    """Whether what failed in a step that sank below those above, which choose, stands in the place
    of its element (`RaiseFailed`)."""
    element_spec: Spec | None = None
    count: int = UNKNOWN
    """Elements in a pass, where that is known."""

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.element_spec

    def cardinality(self, *inputs: int) -> int:
        return self.count

    def taken_over(self, state: Any) -> dict[str, Any] | None:
        """Return the place of a state that was saved by one process; None: it does not say.

        Between units it is exact. Within one it is where elements are counted as they are read.

        Args:
            state: That of the steps in place of which these units stand.
        """
        ordinal = 0
        if isinstance(state, dict) and not state.get("failed"):
            if "ordinal" in state:
                ordinal, state = state["ordinal"], state["index"]
                if ordinal and not self.counts_rows:
                    return None
            elif "input" in state and "failed" in state:  # of a batch that is a unit
                state = state["input"]
        if not isinstance(state, int) or not self.unit_positions:
            return None
        if state == self.positions:  # the last unit may have fewer
            return {"unit": self.size, "ordinal": 0}
        unit, within = divmod(state, self.unit_positions)
        return None if within else {"unit": unit, "ordinal": ordinal}

    def unit_at(self, passes: tuple[int, ...], index: int) -> int:
        """Return the number in the plan's stream of unit `index` of these in some passes.

        Args:
            passes: One number for each stride.
            index: From 0 to `size` - 1.
        """
        turns = zip(passes, self.strides, strict=True)
        before = sum([number * stride for number, stride in turns if stride != INFINITE])
        return self.offset + before + index


# --- The root of a dealt plan: the step from which on each element is named by its origin ---------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Mark(Node):
    """The same elements: a step that a rewrite alone puts in, to say something of where it is."""

    only_reads: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    carries: ClassVar[bool] = True

    input: Node


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Root(Mark):
    """The same elements, each with its origin. Put in by `rewrites.roots`."""

    kind: ClassVar[str] = "root"


# --- Where elements that fail on workers fail at the client ---------------------------------------
#
#     in one process:   map over shuffle            an element that fails was drawn
#     in two halves:    raise_failed over shuffle   over units whose map ran on workers
#
# What fails in a step that sank below those that choose is held in the place of its element, and is
# chosen with it. What fails below them is raised at once, as ever. Both steps are put in by a
# rewrite alone (`rewrites.cut`).


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RaiseFailed(Mark):
    """The same elements; an error that stands in the place of one is raised."""

    kind: ClassVar[str] = "raise_failed"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FailsBelow(Mark):
    """The same elements; errors say that they were raised below what the client chooses from."""

    kind: ClassVar[str] = "fails_below"
