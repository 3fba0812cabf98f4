"""Steps that join elements into batches, padded or not, and take batches apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_flag
from headrace.element.pad import Padding, checked_shapes, checked_values
from headrace.element.spec import Spec, batched, unbatched
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "Batch",
    "PaddedBatch",
    "Unbatch",
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Batch(Node):
    """Stack `size` consecutive elements into one; the last batch may be smaller."""

    kind: ClassVar[str] = "batch"
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    input: Node
    size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        self.keep_int("size", minimum=1, name="batch_size")

    def spec(self, *inputs: Spec) -> Spec | None:
        return batched(inputs[0], self.size if self.drop_remainder else None)

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        return inputs[0] // self.size if self.drop_remainder else -(-inputs[0] // self.size)

    def unit_below(self, unit: int) -> int | None:
        return unit * self.size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Unbatch(Node):
    """Split each element along its first axis into elements of its own."""

    kind: ClassVar[str] = "unbatch"
    within_units: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True

    input: Node

    def spec(self, *inputs: Spec) -> Spec | None:
        return unbatched(inputs[0])

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


# --- The step that joins elements of several shapes into batches ----------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PaddedBatch(Node):
    """Stack `size` consecutive elements into one, each component padded to one shape."""

    kind: ClassVar[str] = "padded_batch"
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True

    input: Node
    size: int
    padded_shapes: Any = None
    padding_values: Any = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        self.keep_int("size", minimum=1, name="batch_size")
        check_flag("drop_remainder", self.drop_remainder, or_none=False)
        object.__setattr__(self, "padded_shapes", checked_shapes(self.padded_shapes))
        object.__setattr__(self, "padding_values", checked_values(self.padding_values))

    @property
    def padding(self) -> Padding:
        """How elements are made alike."""
        return Padding(self.padded_shapes, self.padding_values)

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.padding.spec(inputs[0], self.size if self.drop_remainder else None)

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        return inputs[0] // self.size if self.drop_remainder else -(-inputs[0] // self.size)

    def unit_below(self, unit: int) -> int | None:
        return unit * self.size
