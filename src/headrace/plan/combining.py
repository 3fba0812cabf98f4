"""Steps that make one stream of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_callable
from headrace.element.spec import Spec, relax
from headrace.element.structure import Structure, unflatten
from headrace.plan.node import Node, is_free
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["DEFAULT_CYCLE_LENGTH", "Concatenate", "Interleave", "Zip"]

DEFAULT_CYCLE_LENGTH = 8
"""Streams read in turn when the user names no number. A constant rather than the number of cores:
the order of the elements is then the same on every machine."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Zip(Node):
    """Join the n-th elements of several inputs into one structure; the shortest ends it."""

    kind: ClassVar[str] = "zip"
    dealt_whole: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    datasets: tuple[Node, ...]
    structure: Structure

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ValueError("`zip` needs at least one dataset")

    def spec(self, *inputs: Spec) -> Spec | None:
        return unflatten(self.structure, list(inputs))

    def cardinality(self, *inputs: int) -> int:
        finite = [n for n in inputs if n >= 0]
        if 0 in finite:
            return 0
        if UNKNOWN in inputs:
            return UNKNOWN
        return min(finite) if finite else INFINITE


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Concatenate(Node):
    """All elements of `first`, then all of `second`."""

    kind: ClassVar[str] = "concatenate"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    index_step: ClassVar[bool] = True

    first: Node
    second: Node

    def spec(self, *inputs: Spec) -> Spec | None:
        return relax(inputs[0], inputs[1])

    def cardinality(self, *inputs: int) -> int:
        if INFINITE in inputs:
            return INFINITE
        return UNKNOWN if UNKNOWN in inputs else inputs[0] + inputs[1]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Interleave(Node):
    """Open the dataset `fn(element)` for `cycle_length` elements at a time; read them in turn.

    `flat_map` is the same with a cycle of one.
    """

    kind: ClassVar[str] = "interleave"
    within_units: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    own_spec: ClassVar[bool] = True
    speed_only: ClassVar[tuple[str, ...]] = ("num_parallel_calls",)

    input: Node
    fn: Callable[..., Any]
    cycle_length: int = DEFAULT_CYCLE_LENGTH
    block_length: int = 1
    num_parallel_calls: int | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_callable("map_func", self.fn)
        self.keep_int("cycle_length", minimum=1)
        self.keep_int("block_length", minimum=1)
        self.keep_calls(self.num_parallel_calls, self.deterministic)

    def spec(self, *inputs: Spec) -> Spec | None:
        return None

    def frees_order(self, deterministic: bool | None) -> bool:
        return is_free(self.deterministic, deterministic)

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN
