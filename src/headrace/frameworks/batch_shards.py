"""Shards of a batch that have different numbers of rows, or none.

An array over several devices has the same number of rows on each. `remainder` says what to do with
a step whose shards differ, or whose batch has too few rows for all devices:

    error    raise an error that names the row counts
    pad      append rows of zeros, and add a leaf `mask` that is False for them
    drop     skip the step

A *column* is the values of one leaf: one NumPy array per shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.element.structure import Element, NodeKind, Structure, describe_component, unflatten
from headrace.errors import InvalidArgumentError

__all__ = [
    "REMAINDERS",
    "add_mask",
    "check_remainder",
    "make_mask",
    "pad_column",
    "rows_per_shard",
    "shard_row_counts",
]

Remainder: TypeAlias = Literal["error", "pad", "drop"]
REMAINDERS: tuple[str, ...] = get_args(Remainder)


def check_remainder(remainder: object) -> None:
    """Raise ValueError unless `remainder` is one of `REMAINDERS`."""
    if remainder not in REMAINDERS:
        raise ValueError(f'`remainder` must be "error", "pad" or "drop", but got {remainder!r:.80}')


def shard_row_counts(structure: Structure, columns: Sequence[Sequence[Any]]) -> list[int]:
    """Return the number of rows of each shard.

    Args:
        structure: Structure of the element.
        columns: One column for each leaf.

    Raises:
        InvalidArgumentError: If a leaf is a scalar, or its row counts differ from the first leaf's.
    """
    rows: list[int] = []
    for path, column in zip(structure.paths, columns, strict=True):
        if not all(getattr(value, "ndim", 0) for value in column):
            raise InvalidArgumentError(
                f"{describe_component(path)} is a scalar and has no rows to divide among several "
                "devices: call the `batch` method on the dataset, or remove the component with "
                "map()"
            )
        found = [len(value) for value in column]
        if not rows:
            rows = found
        elif found != rows:
            raise InvalidArgumentError(
                f"{describe_component(structure.paths[0])} has {_format_counts(rows)} rows, but "
                f"{describe_component(path)} has {_format_counts(found)}; the first axis of every "
                "component must be the batch axis: add one with map()"
            )
    return rows


def rows_per_shard(remainder: str, rows: Sequence[int], size: int | None = None) -> int | None:
    """Return the number of rows that each shard of a step gets, or None to skip the step.

    >>> rows_per_shard("error", [2, 2]), rows_per_shard("drop", [2, 1])
    (2, None)
    >>> rows_per_shard("pad", [2, 1]), rows_per_shard("pad", [1, 1], size=4)
    (2, 4)

    Args:
        remainder: One of `REMAINDERS`.
        rows: Row counts of all shards, including those of other processes.
        size: Rows of a shard of a full batch, if known. With "pad", smaller batches are padded to
            this size, so that all steps have the same shape.

    Raises:
        InvalidArgumentError: If the row counts differ and `remainder` is "error".
    """
    if remainder == "pad":
        return max([*rows, size or 0])
    if min(rows) == max(rows):
        return rows[0]
    if remainder == "drop":
        return None
    raise InvalidArgumentError(
        f"the shards of a batch have {_format_counts(rows)} rows, but one array over {len(rows)} "
        "devices or groups of devices needs the same number on each: batch with "
        f"drop_remainder=True and a batch size that is a multiple of {len(rows)}, or use "
        'remainder="pad", which adds a mask, or remainder="drop"'
    )


def pad_column(column: Sequence[NDArray[Any]], rows: int) -> list[NDArray[Any]]:
    """Pad each value of a column with rows of zeros to `rows` rows."""
    return [value if len(value) == rows else _pad_value(value, rows) for value in column]


def make_mask(rows: Sequence[int], num_rows: int) -> list[NDArray[np.bool_]]:
    """Return, for each shard, a mask of `num_rows` rows that is True for its real rows.

    >>> [mask.tolist() for mask in make_mask([2, 1], 2)]
    [[True, True], [True, False]]
    """
    numbers = np.arange(num_rows)
    return [numbers < real for real in rows]


def add_mask(structure: Structure, leaves: Sequence[Any], mask: Any) -> Element:
    """Return an element with a mask as an additional leaf.

    A dict gets the entry "mask", a tuple a last item. An array, namedtuple or dataclass becomes the
    pair `(element, mask)`.

    Raises:
        InvalidArgumentError: If the dict already has an entry "mask".
    """
    element = unflatten(structure, leaves)
    kind = structure.root.kind
    if kind == NodeKind.TUPLE:
        return (*element, mask)
    if kind != NodeKind.DICT:
        return element, mask
    if "mask" in element:
        raise InvalidArgumentError(
            "component ['mask'] exists already, but remainder=\"pad\" adds a component of that "
            "name: rename yours with map()"
        )
    made: Mapping[Any, Any] = {**element, "mask": mask}
    return made


def _pad_value(value: NDArray[Any], rows: int) -> NDArray[Any]:
    made = np.empty((rows, *value.shape[1:]), value.dtype)
    made[: len(value)] = value
    made[len(value) :] = np.zeros((), value.dtype)
    return made


def _format_counts(rows: Sequence[int]) -> str:
    """Format row counts for a message; long lists are shortened."""
    shown = [*map(str, rows[:8]), *(["..."] if len(rows) > 9 else []), *map(str, rows[8:][-1:])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
