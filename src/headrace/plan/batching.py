"""Steps that join elements into batches and take batches apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.element.spec import Spec, batched, unbatched
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Batch", "Unbatch"]


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
