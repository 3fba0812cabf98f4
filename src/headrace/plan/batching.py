"""Steps that batch elements (stacked, padded or ragged), and a step that unbatches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_flag
from headrace.element.pad import Padding, check_shapes, check_values
from headrace.element.ragged import ragged_spec
from headrace.element.spec import Spec, batch_spec, unbatch_spec
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "Batch",
    "PaddedBatch",
    "RaggedBatch",
    "Unbatch",
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Batch(Node):
    """Stack `size` consecutive elements into one; the last batch may be smaller."""

    kind: ClassVar[str] = "batch"
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

    input: Node
    size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        self.validate_int("size", minimum=1, public_name="batch_size")

    def spec(self, *inputs: Spec) -> Spec | None:
        return batch_spec(inputs[0], self.size if self.drop_remainder else None)

    def cardinality(self, *inputs: int) -> int:
        return _count_batches(inputs[0], self.size, self.drop_remainder)

    def input_split_size(self, split_size: int) -> int | None:
        return split_size * self.size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Unbatch(Node):
    """Split each element along its first axis into separate elements."""

    kind: ClassVar[str] = "unbatch"
    is_split_local: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node

    def spec(self, *inputs: Spec) -> Spec | None:
        return unbatch_spec(inputs[0])

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


# --- Batches of elements with different shapes ----------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PaddedBatch(Node):
    """Stack `size` consecutive elements into one, padding each component to a common shape."""

    kind: ClassVar[str] = "padded_batch"
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True

    input: Node
    size: int
    padded_shapes: Any = None
    padding_values: Any = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        self.validate_int("size", minimum=1, public_name="batch_size")
        check_flag("drop_remainder", self.drop_remainder, or_none=False)
        object.__setattr__(self, "padded_shapes", check_shapes(self.padded_shapes))
        object.__setattr__(self, "padding_values", check_values(self.padding_values))
        # Each worker of a data service would drop a remainder, so the step runs in the client.
        object.__setattr__(self, "propagates_ids", not self.drop_remainder)

    @property
    def padding(self) -> Padding:
        """Padding that gives elements the same shape."""
        return Padding(self.padded_shapes, self.padding_values)

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.padding.spec(inputs[0], self.size if self.drop_remainder else None)

    def cardinality(self, *inputs: int) -> int:
        return _count_batches(inputs[0], self.size, self.drop_remainder)

    def input_split_size(self, split_size: int) -> int | None:
        return split_size * self.size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RaggedBatch(Node):
    """Join `size` consecutive elements; arrays of varying length become a `RaggedArray`."""

    kind: ClassVar[str] = "ragged_batch"
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True

    input: Node
    size: int
    drop_remainder: bool = False
    fixed_lengths: tuple[str, ...] = ()
    """Paths of the arrays to stack. Decided when the plan is written, because the input of a step
    may have no known spec where the step runs, as in a data service's client."""

    def __post_init__(self) -> None:
        self.validate_int("size", minimum=1, public_name="batch_size")
        check_flag("drop_remainder", self.drop_remainder, or_none=False)
        # Each worker of a data service would drop a remainder, so the step runs in the client.
        object.__setattr__(self, "propagates_ids", not self.drop_remainder)

    def spec(self, *inputs: Spec) -> Spec | None:
        size = self.size if self.drop_remainder else None
        return ragged_spec(inputs[0], size, self.fixed_lengths)

    def cardinality(self, *inputs: int) -> int:
        return _count_batches(inputs[0], self.size, self.drop_remainder)

    def input_split_size(self, split_size: int) -> int | None:
        return split_size * self.size


def _count_batches(count: int, size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `count` elements, which may be INFINITE or UNKNOWN."""
    if count in (INFINITE, UNKNOWN):
        return count
    return count // size if drop_remainder else -(-count // size)
