"""The step whose function has a value of its own, which it hands on from element to element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_callable
from headrace.element.ownership import owned
from headrace.element.spec import Spec
from headrace.element.structure import Element
from headrace.plan.node import Node

__all__ = ["Scan"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scan(Node):
    """Replace each element by the second part of `fn(value, element)`; the first is the next value.

    The value before the first element is `initial_state`.
    """

    kind: ClassVar[str] = "scan"
    keeps_count: ClassVar[bool] = True
    own_spec: ClassVar[bool] = True

    input: Node
    initial_state: Element
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        check_callable("scan_func", self.fn)
        if self.initial_state is not None:
            # Its arrays are copied: whoever gave them may write to them.
            object.__setattr__(self, "initial_state", owned(self.initial_state))

    def spec(self, *inputs: Spec) -> Spec | None:
        return None
