"""Steps that look at one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_callable
from headrace.element.spec import Spec
from headrace.plan.node import Node, is_free
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Filter", "Map", "TakeWhile"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Map(Node):
    """Replace each element by `fn(element)`; a tuple element is passed as several arguments."""

    kind: ClassVar[str] = "map"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
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
        self.keep_calls(self.num_parallel_calls, self.deterministic)

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.output_spec

    def frees_order(self, deterministic: bool | None) -> bool:
        return is_free(self.deterministic, deterministic)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Filter(Node):
    """Keep the elements for which `predicate` is true."""

    kind: ClassVar[str] = "filter"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    speed_only: ClassVar[tuple[str, ...]] = ("columnar",)

    input: Node
    predicate: Callable[..., Any]
    columnar: bool = False
    """Set by a rewrite that proved `predicate` to work on whole columns."""

    def __post_init__(self) -> None:
        check_callable("predicate", self.predicate)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TakeWhile(Node):
    """Yield the elements before the first for which `predicate` is false."""

    kind: ClassVar[str] = "take_while"
    speed_only: ClassVar[tuple[str, ...]] = ("columnar",)

    input: Node
    predicate: Callable[..., Any]
    columnar: bool = False
    """Set by a rewrite that proved `predicate` to work on whole columns."""

    def __post_init__(self) -> None:
        check_callable("predicate", self.predicate)

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN
