"""Step that batches elements of different lengths without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.arguments import check_flag
from headrace.element.ragged import ragged_spec
from headrace.element.spec import Spec
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["RaggedBatch"]


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
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        return inputs[0] // self.size if self.drop_remainder else -(-inputs[0] // self.size)

    def input_split_size(self, split_size: int) -> int | None:
        return split_size * self.size
