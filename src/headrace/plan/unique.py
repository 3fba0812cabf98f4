"""Step that drops repeated elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.plan.node import Node
from headrace.plan.source import UNKNOWN

__all__ = ["Unique"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Unique(Node):
    """Yield each element that equals none before it."""

    kind: ClassVar[str] = "unique"
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN
