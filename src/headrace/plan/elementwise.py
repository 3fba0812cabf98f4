"""Steps that look at one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.element.spec import Spec
from headrace.plan.node import AUTOTUNE, Node, check_callable, check_int
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Filter", "Map"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Map(Node):
    """Replace each element by `fn(element)`; a tuple element is passed as several arguments."""

    input: Node
    fn: Callable[..., Any]
    num_parallel_calls: int | None = None
    deterministic: bool | None = None
    output_spec: Spec | None = None
    """Set by a rewrite that proved `fn` to work on whole columns as it does on elements."""

    def __post_init__(self) -> None:
        check_callable("map_func", self.fn)
        if self.num_parallel_calls is not None:
            check_int("num_parallel_calls", self.num_parallel_calls, minimum=1, also=(AUTOTUNE,))
        if self.deterministic not in (None, True, False):
            raise TypeError(f"`deterministic` must be a bool or None, got {self.deterministic!r}")

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.output_spec


@dataclass(frozen=True, kw_only=True, eq=False)
class Filter(Node):
    """Keep the elements for which `predicate` is true."""

    input: Node
    predicate: Callable[..., Any]
    columnar: bool = False
    """Set by a rewrite that proved `predicate` to work on whole columns."""

    def __post_init__(self) -> None:
        check_callable("predicate", self.predicate)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN
