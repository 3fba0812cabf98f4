"""Steps that rewrites insert into plans that are divided into splits or partitioned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.element.spec import Spec
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "Marker",
    "PartitionBoundary",
    "RaiseDeferredErrors",
    "ReadSplits",
    "TagUpstreamErrors",
]

# --- Start of the client stage: elements that workers compute, split by split ---------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReadSplits(Node):
    """The elements of splits that the worker stage computes (`rewrites.partition`).

    They are read one split after the other, or several in turn as in an interleave.
    """

    kind: ClassVar[str] = "read_splits"
    has_own_spec: ClassVar[bool] = True

    num_splits: int
    """Number of splits per epoch, or INFINITE."""
    first_split: int = 0
    """Number of splits in the plan's stream before these."""
    strides: tuple[int, ...] = ()
    """Number of splits in one epoch of each `repeat` above, outermost first."""
    cycle_length: int = 1
    block_length: int = 1
    stream: int = 0
    """Number of this stream among the streams of the worker stage."""
    positions_per_split: int = 0
    """Positions of the single leaf per split; 0 if there are several leaves."""
    positions_per_epoch: int = 0
    """Positions of that leaf per epoch, or INFINITE."""
    counts_source_rows: bool = False
    """Whether the number of elements of a split is that of the source's index."""
    defers_errors: bool = False
    """Whether an error of a step that was moved below the selecting steps takes the place of its
    element (`RaiseDeferredErrors`)."""
    element_spec: Spec | None = None
    count: int = UNKNOWN
    """Number of elements per epoch, if known."""

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.element_spec

    def cardinality(self, *inputs: int) -> int:
        return self.count

    def convert_state(self, state: Any) -> dict[str, Any] | None:
        """Return the position that corresponds to a state saved by a single process.

        The position is exact between splits. Within a split it is available if the split's elements
        correspond to those read from the source.

        Args:
            state: State of the steps that this step replaces.

        Returns:
            The position, or None if the state does not determine it.
        """
        ordinal = 0
        if isinstance(state, dict) and not state.get("failed"):
            if "ordinal" in state:
                ordinal, state = state["ordinal"], state["index"]
                if ordinal and not self.counts_source_rows:
                    return None
            elif "input" in state and "failed" in state:  # of a batch that is a split
                state = state["input"]
        if not isinstance(state, int) or not self.positions_per_split:
            return None
        if state == self.positions_per_epoch:  # the last split may be shorter
            return {"split": self.num_splits, "ordinal": 0}
        split, offset = divmod(state, self.positions_per_split)
        return None if offset else {"split": split, "ordinal": ordinal}

    def split_at(self, epochs: tuple[int, ...], index: int) -> int:
        """Return the index in the plan's stream of one of these splits in the given epochs.

        Args:
            epochs: Number of the epoch for each stride.
            index: Index within the epoch, from 0 to `num_splits` - 1.
        """
        turns = zip(epochs, self.strides, strict=True)
        before = sum([number * stride for number, stride in turns if stride != INFINITE])
        return self.first_split + before + index


# --- Partition boundary: the step above which each element has an element id ----------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Marker(Node):
    """The same elements; a step inserted by rewrites to mark a position in the plan."""

    is_read_only: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True

    input: Node


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PartitionBoundary(Marker):
    """The same elements, each with its element id. Inserted by `rewrites.partition_boundaries`."""

    kind: ClassVar[str] = "boundary"


# --- Errors of worker-side steps, raised in the client --------------------------------------------
#
#     single process:    map over shuffle                      an element that fails was drawn
#     two stages:        raise_deferred_errors over shuffle    over splits whose map ran on workers
#
# An error of a step that was moved below the selecting steps (such as `shuffle`) is held in place
# of its element and selected with it. An error further below is raised at once, as in a single
# process. Both steps are inserted by `rewrites.partition` only.


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RaiseDeferredErrors(Marker):
    """The same elements; an error held in place of an element is raised."""

    kind: ClassVar[str] = "raise_deferred_errors"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TagUpstreamErrors(Marker):
    """The same elements; errors are tagged as raised below the steps that select in the client."""

    kind: ClassVar[str] = "tag_upstream_errors"
