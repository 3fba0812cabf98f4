"""Steps that join elements into batches and take batches apart."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.element.spec import Spec, batched, unbatched
from headrace.plan.node import Node, check_int
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Batch", "Unbatch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Node):
    """Stack `size` consecutive elements into one; the last batch may be smaller."""

    input: Node
    size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        check_int("batch_size", self.size, minimum=1)

    def spec(self, *inputs: Spec) -> Spec | None:
        return batched(inputs[0], self.size if self.drop_remainder else None)

    def cardinality(self, *inputs: int) -> int:
        if inputs[0] in (INFINITE, UNKNOWN):
            return inputs[0]
        return inputs[0] // self.size if self.drop_remainder else -(-inputs[0] // self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Unbatch(Node):
    """Split each element along its first axis into elements of its own."""

    input: Node

    def spec(self, *inputs: Spec) -> Spec | None:
        return unbatched(inputs[0])

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN
