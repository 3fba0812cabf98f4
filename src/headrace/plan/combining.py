"""Steps that make one stream of several."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_callable, check_flag
from headrace.element.spec import Spec, relax
from headrace.element.structure import Structure, unflatten
from headrace.plan.node import Node, is_free
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "DEFAULT_CYCLE_LENGTH",
    "Choose",
    "Concatenate",
    "Interleave",
    "Sample",
    "Zip",
    "checked_weights",
]

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


# --- Steps that take each element from one of several datasets ------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sample(Node):
    """Take each element from one of the datasets, drawn with these weights."""

    kind: ClassVar[str] = "sample_from_datasets"
    draws: ClassVar[bool] = True
    dealt_whole: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True

    datasets: tuple[Node, ...]
    drawn_weights: tuple[Node, ...] = ()
    """A dataset of weights, one row a step, in place of `weights`."""
    weights: tuple[float, ...] | None = None
    """None: all alike, or as `drawn_weights` say."""
    seed: int | None = None
    stop_on_empty_dataset: bool = False
    rerandomize_each_iteration: bool | None = None
    drawn_seed: int | None = field(default=None, metadata={"counts": False})
    """Where each pass has the same order and the user gave no seed: drawn when the step is made."""

    def __post_init__(self) -> None:
        _check_members("sample_from_datasets", self.datasets)
        check_flag("stop_on_empty_dataset", self.stop_on_empty_dataset, or_none=False)
        check_flag("rerandomize_each_iteration", self.rerandomize_each_iteration)
        if self.weights is not None:
            weights = checked_weights(self.weights, len(self.datasets))
            object.__setattr__(self, "weights", weights)
        if self.seed is not None:
            self.keep_int("seed", minimum=-(1 << 63))
        elif self.rerandomize_each_iteration is False and self.drawn_seed is None:
            object.__setattr__(self, "drawn_seed", secrets.randbits(52))

    @property
    def is_same_in_each_pass(self) -> bool:
        """Whether each pass draws the same."""
        if self.rerandomize_each_iteration is None:
            return self.seed is not None
        return not self.rerandomize_each_iteration

    def spec(self, *inputs: Spec) -> Spec | None:
        return reduce(relax, inputs[: len(self.datasets)])

    def cardinality(self, *inputs: int) -> int:
        if self.drawn_weights:
            return UNKNOWN if inputs[-1] else 0
        weights = self.weights or (1.0,) * len(inputs)
        drawn = [size for size, weight in zip(inputs, weights, strict=True) if weight > 0]
        if self.stop_on_empty_dataset:
            return INFINITE if set(drawn) == {INFINITE} else UNKNOWN
        if INFINITE in drawn:
            return INFINITE
        return UNKNOWN if UNKNOWN in drawn else sum(drawn)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Choose(Node):
    """Take each element from the dataset whose number `choices` yields."""

    kind: ClassVar[str] = "choose_from_datasets"
    dealt_whole: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True
    reads_again: ClassVar[bool] = True

    datasets: tuple[Node, ...]
    choices: Node
    stop_on_empty_dataset: bool = True

    def __post_init__(self) -> None:
        _check_members("choose_from_datasets", self.datasets)
        check_flag("stop_on_empty_dataset", self.stop_on_empty_dataset, or_none=False)

    def spec(self, *inputs: Spec) -> Spec | None:
        return reduce(relax, inputs[:-1])

    def cardinality(self, *inputs: int) -> int:
        *members, choices = inputs
        if choices == 0:
            return 0
        return choices if set(members) == {INFINITE} else UNKNOWN


def checked_weights(weights: Any, count: int) -> tuple[float, ...]:
    """Return weights of `count` datasets as floats.

    Raises:
        TypeError: They are no numbers.
        ValueError: There are more or fewer, one is negative or no finite number, or all are 0.
    """
    if not isinstance(weights, Sequence | np.ndarray) or isinstance(weights, str | bytes):
        raise TypeError(
            f"`weights` must be a list of numbers or a Dataset, but got {weights!r:.80}"
        )
    try:
        made = tuple([float(weight) for weight in weights])
    except (TypeError, ValueError):
        raise TypeError(f"`weights` must be numbers, but got {weights!r:.80}") from None
    if len(made) != count:
        raise ValueError(f"`weights` must be one for each of {count} datasets, but got {len(made)}")
    if any(weight < 0 or not math.isfinite(weight) for weight in made) or not any(made):
        raise ValueError(
            f"`weights` must be finite, at least 0, and not all 0, but got {list(made)}"
        )
    return made


def _check_members(name: str, datasets: tuple[Node, ...]) -> None:
    if not datasets:
        raise ValueError(f"`{name}` needs at least one dataset")
