"""Placement of elements on JAX devices: one sharding for all leaves, or one for each."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from headrace.adapters.jax_input_steps import InputStep
from headrace.element.structure import Structure, describe_component, flatten, unflatten
from headrace.element.transpose import flatten_like
from headrace.frameworks.batch_shards import add_mask, make_mask, pad_column
from headrace.frameworks.jax_global_arrays import (
    BatchLayout,
    batch_layout,
    check_is_numeric,
    global_array,
    jax_dtype,
    whole_array,
)

__all__ = ["ShardedPlacement"]

_log = logging.getLogger("headrace")


class ShardedPlacement:
    """Puts steps on devices.

    Args:
        sharding: A sharding or a device, for all leaves, or one for each leaf, nested like the
            elements.

    Attributes:
        layout: Assignment of rows to devices and processes, the same for all leaves.
    """

    def __init__(self, sharding: Any) -> None:
        is_nested = isinstance(sharding, dict | tuple) and not isinstance(sharding, PartitionSpec)
        leaves, structure = flatten(sharding) if is_nested else ([sharding], None)
        self._structure: Structure | None = structure
        self._layouts = [batch_layout(_as_sharding(leaf)) for leaf in leaves]
        if not leaves:
            raise ValueError(f"`sharding` must hold a sharding for each leaf, but is {sharding!r}")
        self.layout: BatchLayout = self._layouts[0]
        for other in self._layouts:
            if (other.pipelines, other.local_shards) != (
                self.layout.pipelines,
                self.layout.local_shards,
            ):
                raise ValueError(
                    "the shardings of all leaves must split the rows of a batch in the same way, "
                    f"but {self.layout.sharding} and {other.sharding} differ"
                )
        #: Structure of the last element, and the layout and path of each of its leaves.
        self._cached_leaves: tuple[Structure, list[tuple[BatchLayout, str]]] | None = None

    def put(self, step: InputStep, rows: int, pad: bool) -> Any:
        """Return an element of arrays on devices.

        Args:
            step: Rows of this process.
            rows: Rows that each shard gets, if `pad` is set.
            pad: Whether to pad shards to `rows` rows and add a mask.
        """
        structure, columns, counts, whole = step
        if self._cached_leaves is None or self._cached_leaves[0] != structure:
            self._cached_leaves = structure, self._leaf_layouts(structure)
            _warn_about_narrowing(structure, columns)
        if whole is not None and not (pad and rows != max(counts.values())):
            leaves = [
                whole_array(layout, leaf, path)
                for (layout, path), leaf in zip(self._cached_leaves[1], whole, strict=True)
            ]
        else:
            leaves = [
                global_array(layout, pad_column(column, rows) if pad else column, path)
                for (layout, path), column in zip(self._cached_leaves[1], columns, strict=True)
            ]
        if not pad:
            return unflatten(structure, leaves)
        real = [counts.get(shard, 0) for shard in self.layout.local_shards]
        mask = global_array(self.layout, make_mask(real, rows), "['mask']")
        return add_mask(structure, leaves, mask)

    def _leaf_layouts(self, structure: Structure) -> list[tuple[BatchLayout, str]]:
        layouts = [self.layout] * structure.size
        if self._structure is not None:
            numbers = unflatten(self._structure, range(len(self._layouts)))
            layouts = [self._layouts[number] for number in flatten_like(structure, numbers)]
        return list(zip(layouts, structure.paths, strict=True))


def _as_sharding(given: Any) -> Any:
    return SingleDeviceSharding(given) if isinstance(given, jax.Device) else given


def _warn_about_narrowing(structure: Structure, columns: list[list[Any]]) -> None:
    """Warn once per process that JAX converts 64-bit dtypes to 32 bits."""
    global _has_warned_about_narrowing
    for path, column in zip(structure.paths, columns, strict=True):
        dtype = getattr(column[0], "dtype", None)
        if not isinstance(column[0], np.ndarray | np.generic) or _has_warned_about_narrowing:
            continue
        check_is_numeric(column[0].dtype, path)
        if jax_dtype(column[0].dtype) != dtype:
            _has_warned_about_narrowing = True
            _log.warning(
                "%s is %s, which JAX converts to %s: convert it with map(), or enable 64 bits with "
                'jax.config.update("jax_enable_x64", True)',
                describe_component(path),
                dtype,
                jax_dtype(column[0].dtype),
            )


_has_warned_about_narrowing = False
