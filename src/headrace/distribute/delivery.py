"""What becomes of a step's rows: as which arrays, and where, the replicas get them.

OnHost          arrays of NumPy
OnDevices       arrays of a framework, each on the device of its replica
GlobalArrays    arrays over the devices of all replicas
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.distribute.values import PerReplica, PerReplicaSpec
from headrace.element.spec import ArraySpec, Spec
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.frameworks import shares
from headrace.frameworks.framework import Device, Framework

__all__ = ["Delivery", "GlobalArrays", "OnDevices", "OnHost"]


class Delivery(ABC):
    """Makes one value of what the local replicas get of each leaf.

    Attributes:
        keeps_order: Whether rows of a batch that all workers read stand in their order.
    """

    keeps_order = False

    @abstractmethod
    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Return the step in a tuple; None: it is left out.

        Args:
            structure: Of an element.
            columns: For each leaf the local replicas' values.
            wraps: Whether leaves are `PerReplica`s; else they are those of the only replica.
        """

    @abstractmethod
    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """Return the spec of what `deliver` returns.

        Args:
            piece: Spec of what a replica gets, as arrays of NumPy.
            here: Local replicas.
            everywhere: Replicas of all workers.
            wraps: As above.
        """


class OnHost(Delivery):
    """Hands the arrays out as they are (`Delivery`)."""

    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Wrap them."""
        if not wraps:
            return (unflatten(structure, [column[0] for column in columns]),)
        return (unflatten(structure, [PerReplica(column) for column in columns]),)

    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """One for each replica."""
        if not wraps:
            return piece
        return map_leaves(lambda leaf: PerReplicaSpec(*[leaf] * here), piece)


class OnDevices(OnHost):
    """Puts each replica's arrays on its device.

    Args:
        framework: Whose arrays they become.
        devices: Of the local replicas.
    """

    def __init__(self, framework: Framework, devices: Sequence[Device]) -> None:
        self._framework = framework
        self._devices = list(devices)

    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Put them, and wrap them; strings stay on the host."""
        count = len(self._devices)
        values = [value for column in columns for value in column]
        put = self._framework.put(values, self._devices * len(columns))
        parts = [put[start : start + count] for start in range(0, len(put), count)]
        return super().deliver(structure, parts, wraps)

    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """With the dtypes that the framework has."""
        return super().spec(_converted(piece, self._framework), here, everywhere, wraps)


class GlobalArrays(Delivery):
    """Makes one array over all devices of each leaf; each replica's rows are on its device.

    Args:
        framework: One that has such arrays.
        devices: Of the replicas of all workers.
        remainder: What becomes of a step in which they have different numbers of rows.
        rows_of_all: Given the rows of the local replicas, returns those of all.
        size: Rows of a replica in a full batch, if they are known.
    """

    keeps_order = True

    def __init__(
        self,
        framework: Framework,
        devices: tuple[Device, ...],
        remainder: str,
        rows_of_all: Callable[[list[int]], list[int]],
        size: int | None,
    ) -> None:
        self._framework = framework
        self._remainder = remainder
        self._rows_of_all = rows_of_all
        self._size = size
        program = framework.program()
        self._layout = program.layout_of(devices)
        self._joined = program.global_array

    def deliver(
        self, structure: Structure, columns: Sequence[Sequence[Any]], wraps: bool
    ) -> tuple[Any] | None:
        """Make them alike in length as `remainder` says, and one."""
        rows = shares.rows_of_shares(structure, columns)
        used = shares.rows_to_use(self._remainder, self._rows_of_all(rows), self._size)
        if used is None:
            return None
        paths = structure.paths
        if self._remainder != "pad":
            made = [
                self._joined(self._layout, column, path)
                for column, path in zip(columns, paths, strict=True)
            ]
            return (unflatten(structure, made),)
        made = [
            self._joined(self._layout, shares.padded(column, used), path)
            for column, path in zip(columns, paths, strict=True)
        ]
        mask = self._joined(self._layout, shares.mask_of(rows, used))
        return (shares.with_mask(structure, made, mask),)

    def spec(self, piece: Spec, here: int, everywhere: int, wraps: bool) -> Spec:
        """Plain, of all replicas' rows."""
        pads = self._remainder == "pad"

        def whole(leaf: ArraySpec) -> ArraySpec:
            rows = self._size if pads and self._size else leaf.shape[0] if leaf.shape else None
            total = None if rows is None else rows * everywhere
            return ArraySpec((total, *leaf.shape[1:]), leaf.dtype, leaf.name)

        spec = map_leaves(whole, _converted(piece, self._framework))
        if not pads:
            return spec
        leaves, structure = flatten(spec)
        rows = leaves[0].shape[:1] if leaves else (None,)
        return shares.with_mask(structure, leaves, ArraySpec(rows, np.bool_))


def _converted(spec: Spec, framework: Framework) -> Spec:
    return map_leaves(
        lambda leaf: ArraySpec(leaf.shape, framework.dtype_put(leaf.dtype), leaf.name), spec
    )
