"""Steps that look at one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_callable, check_flag
from headrace.element.spec import Spec
from headrace.plan.node import AUTOTUNE, Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Filter", "Map"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Map(Node):
    """Replace each element by `fn(element)`; a tuple element is passed as several arguments."""

    kind: ClassVar[str] = "map"
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True
    own_spec: ClassVar[bool] = True
    speed_only: ClassVar[tuple[str, ...]] = ("num_parallel_calls", "output_spec")

    input: Node
    fn: Callable[..., Any]
    num_parallel_calls: int | None = None
    deterministic: bool | None = None
    output_spec: Spec | None = None
    """Set by a rewrite that proved `fn` to work on whole columns as it does on elements."""

    def __post_init__(self) -> None:
        check_callable("map_func", self.fn)
        if self.num_parallel_calls is not None:
            self.keep_int("num_parallel_calls", minimum=1, also=(AUTOTUNE,))
        check_flag("deterministic", self.deterministic)

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.output_spec

    def frees_order(self, deterministic: bool | None) -> bool:
        return (deterministic if self.deterministic is None else self.deterministic) is False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Filter(Node):
    """Keep the elements for which `predicate` is true."""

    kind: ClassVar[str] = "filter"
    speed_only: ClassVar[tuple[str, ...]] = ("columnar",)

    input: Node
    predicate: Callable[..., Any]
    columnar: bool = False
    """Set by a rewrite that proved `predicate` to work on whole columns."""

    def __post_init__(self) -> None:
        check_callable("predicate", self.predicate)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN
