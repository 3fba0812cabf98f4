"""Steps that combine several streams into one."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, TypeAlias

import numpy as np

from headrace.arguments import check_callable, check_flag, check_int
from headrace.element.spec import Spec, relax
from headrace.element.structure import Structure, unflatten
from headrace.plan.node import Node, is_unordered_requested
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "DEFAULT_CYCLE_LENGTH",
    "Choose",
    "Concatenate",
    "Interleave",
    "Sample",
    "Schedule",
    "Zip",
    "is_schedule",
    "validate_schedule",
    "validate_weights",
]

DEFAULT_CYCLE_LENGTH = 8
"""Number of streams that are read in turn by default. A constant rather than the number of cores,
so that the order of elements is the same on every machine."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Zip(Node):
    """Join the n-th elements of several inputs into one structure; ends with the shortest input."""

    kind: ClassVar[str] = "zip"
    needs_single_split: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

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
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    is_index_step: ClassVar[bool] = True

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
    """Open the dataset `fn(element)` for `cycle_length` elements at a time and read them in turn.

    `flat_map` is an interleave with a cycle length of 1.
    """

    kind: ClassVar[str] = "interleave"
    is_split_local: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True
    is_random: ClassVar[bool] = True
    uses_element_numbers: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("num_parallel_calls",)

    input: Node
    fn: Callable[..., Any]
    cycle_length: int = DEFAULT_CYCLE_LENGTH
    block_length: int = 1
    num_parallel_calls: int | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_callable("map_func", self.fn)
        self.validate_int("cycle_length", minimum=1)
        self.validate_int("block_length", minimum=1)
        self.validate_parallelism(self.num_parallel_calls, self.deterministic)

    @property
    def method(self) -> str:
        return "flat_map" if self.cycle_length == 1 else self.kind

    def spec(self, *inputs: Spec) -> Spec | None:
        return None

    def allows_unordered(self, deterministic: bool | None) -> bool:
        return is_unordered_requested(self.deterministic, deterministic)

    def cardinality(self, *inputs: int) -> int:
        return 0 if inputs[0] == 0 else UNKNOWN


# --- Steps that select one of several datasets for each element -----------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sample(Node):
    """Take each element from a randomly drawn dataset, with the given weights."""

    kind: ClassVar[str] = "sample_from_datasets"
    is_random: ClassVar[bool] = True
    needs_single_split: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    datasets: tuple[Node, ...]
    weight_inputs: tuple[Node, ...] = ()
    """A dataset of weights, one row per element, instead of `weights`."""
    weights: tuple[float, ...] | Schedule | None = None
    """Weights of the datasets, or their schedule; None: equal weights, or those of
    `weight_inputs`."""
    seed: int | None = None
    stop_on_empty_dataset: bool = False
    rerandomize_each_iteration: bool | None = None
    default_seed: int | None = field(default=None, metadata={"is_parameter": False})
    """Seed drawn at construction if all epochs have the same order and the user gave no seed."""

    def __post_init__(self) -> None:
        _check_members("sample_from_datasets", self.datasets)
        check_flag("stop_on_empty_dataset", self.stop_on_empty_dataset, or_none=False)
        check_flag("rerandomize_each_iteration", self.rerandomize_each_iteration)
        if self.weights is not None:
            validate = validate_schedule if is_schedule(self.weights) else validate_weights
            object.__setattr__(self, "weights", validate(self.weights, len(self.datasets)))
        if self.seed is not None:
            self.validate_int("seed", minimum=-(1 << 63))
        elif self.rerandomize_each_iteration is False and self.default_seed is None:
            object.__setattr__(self, "default_seed", secrets.randbits(52))

    @property
    def schedule(self) -> Schedule:
        """Weights from each step on, where they do not come from a dataset."""
        weights: Any = self.weights or (1.0,) * len(self.datasets)
        return weights if is_schedule(weights) else ((0, weights),)

    @property
    def is_same_in_each_epoch(self) -> bool:
        """Whether each epoch draws the same."""
        if self.rerandomize_each_iteration is None:
            return self.seed is not None
        return not self.rerandomize_each_iteration

    def spec(self, *inputs: Spec) -> Spec | None:
        return reduce(relax, inputs[: len(self.datasets)])

    def cardinality(self, *inputs: int) -> int:
        if self.weight_inputs:
            return UNKNOWN if inputs[-1] else 0
        # For each stage of the schedule, the datasets that it draws from.
        drawn = [{i for i, weight in enumerate(row) if weight > 0} for _, row in self.schedule]
        if self.stop_on_empty_dataset:
            sizes = {inputs[i] for stage in drawn for i in stage}
            return INFINITE if sizes == {INFINITE} else UNKNOWN
        last = [inputs[i] for i in drawn[-1]]
        if INFINITE in last:
            return INFINITE
        is_read_to_the_end = all(stage <= drawn[-1] for stage in drawn)
        return sum(last) if is_read_to_the_end and UNKNOWN not in last else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Choose(Node):
    """Take each element from the dataset whose index `choices` yields."""

    kind: ClassVar[str] = "choose_from_datasets"
    needs_single_split: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

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


Schedule: TypeAlias = tuple[tuple[int, tuple[float, ...]], ...]
"""Steps in ascending order, from 0 on, each with the weights from there on."""


def is_schedule(weights: Any) -> bool:
    """Return whether weights are given as pairs of a step and a list, not as numbers."""
    return (
        isinstance(weights, list | tuple)
        and len(weights) > 0
        and all(isinstance(item, list | tuple) for item in weights)
    )


def validate_schedule(schedule: Any, count: int) -> Schedule:
    """Return the weights of `count` datasets from each step on.

    Raises:
        TypeError: If an item is not a pair of an integer and a list of numbers.
        ValueError: If the steps do not ascend from 0, or as for `validate_weights`.
    """
    stages: list[tuple[int, tuple[float, ...]]] = []
    for item in schedule:
        if len(item) != 2:
            raise TypeError(
                f"`weights` must be numbers, or pairs of a step and a list of weights, but has "
                f"{item!r:.80}"
            )
        first = check_int("a step of `weights`", item[0], minimum=0)
        if first != 0 if not stages else first <= stages[-1][0]:
            raise ValueError(
                "the steps of `weights` must begin with 0 and ascend, but got "
                f"{[item[0] for item in schedule]!r:.80}"
            )
        stages.append((first, validate_weights(item[1], count)))
    return tuple(stages)


def validate_weights(weights: Any, count: int) -> tuple[float, ...]:
    """Return the weights of `count` datasets as floats.

    Raises:
        TypeError: If the weights are not numbers.
        ValueError: If there are not `count` weights, one is negative or not finite, or all are 0.
    """
    if not isinstance(weights, Sequence | np.ndarray) or isinstance(weights, str | bytes):
        raise TypeError(
            "`weights` must be a list of numbers, pairs of a step and such a list, a function of "
            f"the step, or a Dataset, but got {weights!r:.80}"
        )
    try:
        result = tuple([float(weight) for weight in weights])
    except (TypeError, ValueError):
        raise TypeError(f"`weights` must be numbers, but got {weights!r:.80}") from None
    if len(result) != count:
        raise ValueError(
            f"`weights` must have {count} values, one for each dataset, but got {len(result)}"
        )
    if any(weight < 0 or not math.isfinite(weight) for weight in result) or not any(result):
        raise ValueError(
            f"`weights` must be finite, at least 0, and not all 0, but got {list(result)}"
        )
    return result


def _check_members(name: str, datasets: tuple[Node, ...]) -> None:
    if not datasets:
        raise ValueError(f"`{name}` needs at least one dataset")
