"""Steps that group elements: windows by key, and buckets by length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_callable, check_flag, check_int
from headrace.element.pad import Padding, check_shapes, check_values
from headrace.element.spec import Spec, batch_spec
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["BucketBySequenceLength", "GroupByWindow"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GroupByWindow(Node):
    """Group elements by `key_func`; yield the elements of `reduce_func(key, window)`."""

    kind: ClassVar[str] = "group_by_window"
    is_random: ClassVar[bool] = True
    uses_element_numbers: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True

    input: Node
    key_func: Callable[..., Any]
    reduce_func: Callable[..., Any]
    window_size: int | None = None
    window_size_func: Callable[..., Any] | None = None
    make_dataset: Callable[[Node], Any] = field(metadata={"is_parameter": False})
    """Makes the dataset that `reduce_func` is called with from a plan."""

    def __post_init__(self) -> None:
        check_callable("key_func", self.key_func)
        check_callable("reduce_func", self.reduce_func)
        if (self.window_size is None) == (self.window_size_func is None):
            given = "neither" if self.window_size is None else "both"
            raise ValueError(
                f"`group_by_window` takes `window_size` or `window_size_func`, but got {given}"
            )
        if self.window_size is not None:
            self.validate_int("window_size", minimum=1)
        else:
            check_callable("window_size_func", self.window_size_func)

    def spec(self, *inputs: Spec) -> Spec | None:
        return None

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BucketBySequenceLength(Node):
    """Group elements by length into buckets; pad and stack the elements of a bucket."""

    kind: ClassVar[str] = "bucket_by_sequence_length"
    propagates_ids: ClassVar[bool] = True
    rereads_input: ClassVar[bool] = True

    input: Node
    element_length_func: Callable[..., Any]
    bucket_boundaries: tuple[int, ...]
    bucket_batch_sizes: tuple[int, ...]
    padded_shapes: Any = None
    padding_values: Any = None
    pad_to_bucket_boundary: bool = False
    no_padding: bool = False
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        check_callable("element_length_func", self.element_length_func)
        for name in ("bucket_boundaries", "bucket_batch_sizes"):
            object.__setattr__(self, name, _validate_ints(name, self.__dict__[name]))
        for name in ("pad_to_bucket_boundary", "no_padding", "drop_remainder"):
            check_flag(name, self.__dict__[name], or_none=False)
        boundaries, sizes = self.bucket_boundaries, self.bucket_batch_sizes
        if list(boundaries) != sorted(set(boundaries)):
            raise ValueError(
                f"`bucket_boundaries` must increase strictly, but got {list(boundaries)}"
            )
        if len(sizes) != len(boundaries) + 1:
            raise ValueError(
                f"`bucket_batch_sizes` must have one value more than the {len(boundaries)} "
                f"boundaries, for the last, unbounded bucket, but got {len(sizes)}"
            )
        object.__setattr__(self, "padded_shapes", check_shapes(self.padded_shapes))
        object.__setattr__(self, "padding_values", check_values(self.padding_values))

    def spec(self, *inputs: Spec) -> Spec | None:
        have_one_size = self.drop_remainder and len(set(self.bucket_batch_sizes)) == 1
        size = self.bucket_batch_sizes[0] if have_one_size else None
        if self.no_padding:
            return batch_spec(inputs[0], size)
        return Padding(self.padded_shapes, self.padding_values).spec(inputs[0], size)

    def cardinality(self, *inputs: int) -> int:
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN


def _validate_ints(name: str, values: Any) -> tuple[int, ...]:
    """Return a list of positive integers as a tuple."""
    if not isinstance(values, list | tuple | range | np.ndarray):
        raise TypeError(f"`{name}` must be a list of integers, but got {values!r:.80}")
    return tuple([check_int(f"{name}[{i}]", value, minimum=1) for i, value in enumerate(values)])
