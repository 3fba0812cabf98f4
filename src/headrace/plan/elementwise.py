"""Steps that look at one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_callable
from headrace.element.ownership import owned
from headrace.element.spec import Spec
from headrace.element.structure import Element
from headrace.plan.node import Node, is_free
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["PLAIN_VERDICTS", "Filter", "Map", "Scan", "TakeWhile", "is_true"]


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


# --- A step whose function hands a value of its own on from element to element --------------------


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


# --- What the predicate of a `filter` or a `take_while` says of an element ------------------------

PLAIN_VERDICTS = frozenset((bool, np.bool_))
"""Types of what comparisons return, which need no `is_true`."""


def is_true(verdict: Any) -> bool:
    """Return whether a predicate's result is true: a bool, a number, or an array of one of them.

    Raises:
        TypeError: It is something else, such as the None of a function without `return`.
    """
    kind = getattr(getattr(verdict, "dtype", None), "kind", "")
    is_number = isinstance(verdict, bool | int | float)
    # Scalars and arrays, of NumPy or of a framework; what holds several values refuses by itself.
    if is_number or (hasattr(verdict, "shape") and kind not in ("S", "U", "O")):
        return bool(verdict)
    raise TypeError(
        f"it returned {verdict!r:.80}, which is neither true nor false; return a bool, as in "
        "`return x > 0` or `return bool(...)`"
    )
