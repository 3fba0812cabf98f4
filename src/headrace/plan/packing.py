"""Steps that join sequences: packed rows of one length, and batches of limited cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_callable, check_flag, check_int
from headrace.element.pad import Padding, check_shapes, check_values
from headrace.element.spec import ArraySpec, Spec
from headrace.errors import InvalidElementError
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = [
    "PACKED_KINDS",
    "BatchByCost",
    "ConcatThenSplit",
    "PackSequences",
    "component_lengths",
    "packed_names",
]

PACKED_KINDS = "biufc"
"""Kinds of dtypes that can be packed; padding is their zero."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackSequences(Node):
    """Pack whole sequences into rows; up to `num_bins` rows are open at a time."""

    kind: ClassVar[str] = "pack_sequences"
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node
    length: int | dict[str, int]
    best_fit: bool
    num_bins: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", _validate_length(self.length))
        self.validate_int("num_bins", minimum=1)

    def spec(self, *inputs: Spec) -> Spec | None:
        return _packed_spec(inputs[0], self.length)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConcatThenSplit(Node):
    """Concatenate all sequences and split the result into rows."""

    kind: ClassVar[str] = "concat_then_split"
    is_read_only: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node
    length: int

    def __post_init__(self) -> None:
        if isinstance(self.length, Mapping):
            raise TypeError(
                f"`length` must be an int with strategy='concat_then_split', but got "
                f"{self.length!r}: all components are split at the same positions"
            )
        self.validate_int("length", minimum=1)

    def spec(self, *inputs: Spec) -> Spec | None:
        return _packed_spec(inputs[0], self.length)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BatchByCost(Node):
    """Stack consecutive elements, padded, until their cost would exceed a limit."""

    kind: ClassVar[str] = "batch_by_cost"
    propagates_ids: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node
    max_cost: float
    cost_fn: Callable[..., Any]
    drop_remainder: bool = False
    padded_shapes: Any = None
    padding_values: Any = None
    count_padding: bool = False

    def __post_init__(self) -> None:
        limit = self.max_cost
        if isinstance(limit, bool) or not isinstance(limit, int | float | np.integer | np.floating):
            raise TypeError(f"`max_cost` must be a number, but got {limit!r:.80}")
        if not 0 < limit < math.inf:
            raise ValueError(f"`max_cost` must be positive and finite, but got {limit}")
        number = limit.item() if isinstance(limit, np.generic) else limit
        object.__setattr__(self, "max_cost", number)
        check_callable("cost_fn", self.cost_fn)
        for name in ("drop_remainder", "count_padding"):
            check_flag(name, self.__dict__[name], or_none=False)
        object.__setattr__(self, "padded_shapes", check_shapes(self.padded_shapes))
        object.__setattr__(self, "padding_values", check_values(self.padding_values))

    def spec(self, *inputs: Spec) -> Spec | None:
        return Padding(self.padded_shapes, self.padding_values).spec(inputs[0], None)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


# --- Components of packed rows --------------------------------------------------------------------


def packed_names(name: str) -> tuple[str, str, str]:
    """Return the names that a component's values, segment ids and positions have in a row."""
    return name, f"{name}_segment_ids", f"{name}_positions"


def component_lengths(names: tuple[str, ...], length: int | dict[str, int]) -> list[int]:
    """Return the length of a row for each component.

    Raises:
        InvalidElementError: If the names are not those of `length`, or two components of a row
            would have the same name.
    """
    packed = [each for name in names for each in packed_names(name)]
    repeated = next((name for name in packed if packed.count(name) > 1), None)
    if repeated is not None:
        raise InvalidElementError(
            f"component [{repeated!r}] has the name of a component that packing adds; "
            "rename it in map()"
        )
    if isinstance(length, int):
        return [length] * len(names)
    if set(names) != set(length):
        raise InvalidElementError(
            f"the element has the components {sorted(names)}, but `length` has "
            f"{sorted(length)}; give a length for each component, or drop components in map()"
        )
    return [length[name] for name in names]


def _validate_length(length: Any) -> int | dict[str, int]:
    """Return a valid length of rows, as Python ints."""
    if not isinstance(length, Mapping):
        return check_int("length", length, minimum=1)
    if not length:
        raise ValueError("`length` must have a length for each component, but got {}")
    wrong = next((name for name in length if not isinstance(name, str)), None)
    if wrong is not None:
        raise TypeError(f"`length` must have names of components as keys, but got {wrong!r}")
    return {name: check_int(f"length[{name!r}]", n, minimum=1) for name, n in length.items()}


def _packed_spec(spec: Spec, length: int | dict[str, int]) -> Spec:
    """Return the spec of a row packed from elements with this spec."""
    components = spec if isinstance(spec, dict) else {"tokens": spec}
    for name, leaf in components.items():
        is_sequence = isinstance(leaf, ArraySpec) and leaf.ndim == 1
        if not (is_sequence and leaf.dtype.kind in PACKED_KINDS and isinstance(name, str)):
            raise InvalidElementError(
                f"`pack_sequences` packs one-dimensional arrays of numbers, but component "
                f"[{name!r}] has the spec {leaf!r}; drop or convert it in map()"
            )
    lengths = component_lengths(tuple(components), length)
    result = {}
    for (name, leaf), n in zip(components.items(), lengths, strict=True):
        values, segment_ids, positions = packed_names(name)
        result[values] = ArraySpec((n,), leaf.dtype)
        result[segment_ids] = result[positions] = ArraySpec((n,), np.int32)
    return result
