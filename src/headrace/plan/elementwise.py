"""Steps that process one element at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_callable
from headrace.element.ownership import take_ownership
from headrace.element.spec import Spec
from headrace.element.structure import Element
from headrace.plan.node import Node, is_unordered_requested
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["PLAIN_RESULT_TYPES", "Filter", "Map", "Scan", "TakeWhile", "is_true"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Map(Node):
    """Replace each element by `fn(element)`; a tuple element is passed as several arguments."""

    kind: ClassVar[str] = "map"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("num_parallel_calls", "output_spec")

    input: Node
    fn: Callable[..., Any]
    num_parallel_calls: int | None = None
    deterministic: bool | None = None
    output_spec: Spec | None = None
    """Set by a rewrite that proved `fn` elementwise, so that it may run on whole columns."""

    def __post_init__(self) -> None:
        check_callable("map_func", self.fn)
        self.validate_parallelism(self.num_parallel_calls, self.deterministic)

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.output_spec

    def allows_unordered(self, deterministic: bool | None) -> bool:
        return is_unordered_requested(self.deterministic, deterministic)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Filter(Node):
    """Keep the elements for which `predicate` is true."""

    kind: ClassVar[str] = "filter"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("columnar",)

    input: Node
    predicate: Callable[..., Any]
    columnar: bool = False
    """Set by a rewrite that proved `predicate` elementwise."""

    def __post_init__(self) -> None:
        check_callable("predicate", self.predicate)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TakeWhile(Node):
    """Yield elements until `predicate` is false; drop that element and the rest."""

    kind: ClassVar[str] = "take_while"
    performance_fields: ClassVar[tuple[str, ...]] = ("columnar",)

    input: Node
    predicate: Callable[..., Any]
    columnar: bool = False
    """Set by a rewrite that proved `predicate` elementwise."""

    def __post_init__(self) -> None:
        check_callable("predicate", self.predicate)

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN


# --- A step that carries a state from element to element ------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scan(Node):
    """Replace each element by the second result of `fn(state, element)`; the first is the state.

    The first call gets `initial_state`.
    """

    kind: ClassVar[str] = "scan"
    preserves_count: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True

    input: Node
    initial_state: Element
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        check_callable("scan_func", self.fn)
        if self.initial_state is not None:
            # Copy the arrays: the caller may write to them later.
            object.__setattr__(self, "initial_state", take_ownership(self.initial_state))

    def spec(self, *inputs: Spec) -> Spec | None:
        return None


# --- Predicate results of `filter` and `take_while` -----------------------------------------------

PLAIN_RESULT_TYPES = frozenset((bool, np.bool_))
"""Result types of comparisons, which need no `is_true`."""


def is_true(result: Any) -> bool:
    """Return whether a predicate's result is true: a bool, a number, or an array of one of them.

    Raises:
        TypeError: If it is anything else, such as the None of a function without `return`.
    """
    kind = getattr(getattr(result, "dtype", None), "kind", "")
    is_number = isinstance(result, bool | int | float)
    # Scalars and arrays of NumPy or of a framework. Arrays of several values raise in `bool`.
    if is_number or (hasattr(result, "shape") and kind not in ("S", "U", "O")):
        return bool(result)
    raise TypeError(
        f"it returned {result!r:.80}, which is not a truth value; return a bool, as in `return x "
        "> 0` or `return bool(...)`"
    )
