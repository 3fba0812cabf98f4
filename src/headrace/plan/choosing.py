"""Steps that take each element from one of several datasets, at random or as another one says."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_flag
from headrace.element.spec import Spec, relax
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["Choose", "Sample", "checked_weights"]


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
