"""One shard of a variable: its value, its slots, and the operations on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.bag_combiner import check_row_indices
from headrace.distribute.row_access import is_floating
from headrace.errors import InvalidArgumentError, NotFoundError
from headrace.parameter_server.gradients import sum_rows
from headrace.parameter_server.rules import (
    AVERAGE,
    OptimizerSlot,
    apply_dense,
    apply_sparse,
    put_rows,
    slots_for_rule,
    update_average,
)
from headrace.parameter_server.shard_values import DirtyRows
from headrace.parameter_server.specs import (
    OptimizerRule,
    ShardSpec,
    StepParameters,
    fill_array,
    parse_dtype,
    working_dtype,
)

__all__ = [
    "ArrayShard",
    "check_gradient",
    "check_row_range",
    "check_value",
    "check_value_indices",
    "is_strictly_increasing",
]

Array = NDArray[Any]


class ArrayShard:
    """Consecutive rows of a variable, in contiguous memory.

    Args:
        spec: Spec of the shard.
        value: Array of the spec's shape and dtype; owned by the shard from now on.
        period: Current period of marks.
    """

    def __init__(self, spec: ShardSpec, value: Array, period: int) -> None:
        self.spec = spec
        self.value = value
        #: Slots by "optimizer/name", with the number of rows of the value, in the working dtype.
        self.slots: dict[str, Array] = {}
        #: Initial value of their elements.
        self.slot_initial_values: dict[str, float] = {}
        self.dirty_rows: DirtyRows = DirtyRows(period)

    @property
    def nbytes(self) -> int:
        """Bytes of the value, the slots, and the dirty rows."""
        slots = sum(slot.nbytes for slot in self.slots.values())
        return self.value.nbytes + slots + self.dirty_rows.nbytes

    def assign(self, mode: str, value: Array) -> None:
        """Change the whole value."""
        change = _find_mode(mode, _ASSIGN_MODES)
        self._check(value, self.value.shape, "a value")
        self._check_arithmetic(mode)
        with np.errstate(all="ignore"):
            change(self.value, value)
        self.dirty_rows.mark_all()

    def assign_slot(self, name: str, first: float, value: Array) -> None:
        """Set a slot of the value's shape; `first` is the initial value of its elements."""
        if value.shape != self.value.shape:
            raise InvalidArgumentError(
                f"the slot {name!r} of shard {self.spec.index} of the variable "
                f"{self.spec.variable} has shape {self.value.shape}, but got {value.shape}"
            )
        self.slots[name] = np.array(value, working_dtype(self.value.dtype))
        self.slot_initial_values[name] = first
        self.dirty_rows.mark_all()

    def gather(self, rows: Array, allocate: Callable[..., Array]) -> Array:
        """Return rows, in the given order."""
        local = self._to_local_rows(rows)
        answer = allocate((*local.shape, *self.value.shape[1:]), self.value.dtype)
        if answer.size:
            self.value.take(local, axis=0, out=answer, mode="clip")
        return answer

    def scatter(self, mode: str, rows: Array, values: Array) -> None:
        """Change some rows; a repeated row is changed each time."""
        change = _find_mode(mode, _SCATTER_MODES)
        local = self._to_local_rows(rows, one_dimension=True)
        self._check(values, (len(local), *self.value.shape[1:]), "values")
        self._check_arithmetic(mode)
        if not values.size:
            return
        if (
            mode in ("add", "sub")
            and is_floating(self.value.dtype)
            and not is_strictly_increasing(local)
        ):
            local, values = sum_rows(local, values)
            values = values.astype(self.value.dtype, copy=False)
        with np.errstate(all="ignore"):
            if change is None:
                self.value[local] = values
            elif is_strictly_increasing(local):
                columns = self.value[:1].size
                table = self.value.reshape(-1, columns)
                current = np.take(table, local, axis=0, mode="clip")
                operation = self._division() if mode == "div" else change
                operation(current, values.reshape(-1, columns), out=current)
                put_rows(table, local, current)
            else:
                operation = self._division() if mode == "div" else change
                operation.at(self.value, local, values)
        self.dirty_rows.mark_rows(local, len(self.value))

    def apply(
        self, optimizer: str, rule: OptimizerRule, step: StepParameters, arrays: list[Array]
    ) -> None:
        """Apply one step of an optimizer, by a gradient, or by rows and their gradients.

        A third array may contain the index of each row's gradient.
        """
        if not is_floating(self.value.dtype):
            raise InvalidArgumentError(
                f"an optimizer needs a variable of a floating dtype, but {self.spec.variable} has "
                f"dtype {self.spec.dtype}"
            )
        gradient = arrays[0] if len(arrays) == 1 else arrays[1]
        check_gradient(gradient, self.spec.variable)
        if len(arrays) == 1:
            self._check_shape(gradient, self.value.shape, "a gradient")
            apply_dense(rule, step, self.value, gradient, self.get_or_create_slots(optimizer, rule))
            if rule.ema_momentum is not None:
                is_first = f"{optimizer}/{AVERAGE.name}" not in self.slots
                average = self._slot(optimizer, AVERAGE)
                update_average(rule, step, self.value, average, is_first=is_first)
            self.dirty_rows.mark_all()
            return
        local = self._to_local_rows(arrays[0], one_dimension=True)
        value_indices = arrays[2] if len(arrays) > 2 else None
        count = len(local) if value_indices is None else len(gradient)
        self._check_shape(gradient, (count, *self.value.shape[1:]), "gradients")
        check_value_indices(value_indices, local, gradient, self.spec.variable)
        if not is_strictly_increasing(local):
            local, gradient = sum_rows(
                local, gradient if value_indices is None else gradient[value_indices]
            )
            value_indices = None
        slots = self.get_or_create_slots(optimizer, rule)
        apply_sparse(rule, step, self.value, local, gradient, slots, value_indices)
        self.dirty_rows.mark_rows(local, len(self.value))

    def get_or_create_slots(self, optimizer: str, rule: OptimizerRule) -> dict[str, Array]:
        """Return the slots of an optimizer, by name; missing ones are created."""
        return {slot.name: self._slot(optimizer, slot) for slot in slots_for_rule(rule)}

    def read_slot(self, name: str) -> Array:
        """Return a slot, by "optimizer/name".

        Raises:
            NotFoundError: If no step has created it.
        """
        if name not in self.slots:
            raise NotFoundError(
                f"shard {self.spec.index} of the variable {self.spec.variable} has no slot "
                f"{name!r}; its slots: {', '.join(sorted(self.slots)) or 'none'}"
            )
        return self.slots[name]

    def _slot(self, optimizer: str, slot: OptimizerSlot) -> Array:
        key = f"{optimizer}/{slot.name}"
        if key not in self.slots:
            shape = self.value.shape[:1] if slot.is_per_row else self.value.shape
            self.slot_initial_values[key] = slot.initial_value
            self.slots[key] = fill_array(shape, slot.initial_value, working_dtype(self.value.dtype))
        return self.slots[key]

    def _to_local_rows(self, rows: Array, *, one_dimension: bool = False) -> NDArray[np.int64]:
        """Return row indices relative to the shard."""
        spec = self.spec
        if not self.value.ndim:
            raise InvalidArgumentError(
                f"the variable {spec.variable} is a scalar and has no rows; read or assign it as a "
                "whole"
            )
        if one_dimension and rows.ndim != 1:
            raise InvalidArgumentError(
                f"ids of {spec.variable} must have one dimension, but got shape {rows.shape}"
            )
        num_rows, owner = spec.variable_shape[0], f"the variable {spec.variable}"
        if rows.dtype.kind not in "iu":
            rows = check_row_indices(rows, num_rows, owner)
        found = rows.astype(np.int64, copy=False)
        if spec.row:
            found = found - spec.row
        if found.size and (found.min() < 0 or found.max() >= len(self.value)):
            check_row_indices(rows, num_rows, owner)  # names ids that are in no shard
            flat = found.reshape(-1)
            bad_id = flat[(flat < 0) | (flat >= len(self.value))][0] + spec.row
            raise InvalidArgumentError(
                f"id {bad_id} of the variable {spec.variable} is not in shard {spec.index}, which "
                f"has rows {spec.row} to {spec.row + len(self.value) - 1}"
            )
        return found

    def _check(self, value: Array, shape: tuple[int, ...], description: str) -> None:
        self._check_shape(value, shape, description)
        if value.dtype != self.value.dtype:
            raise InvalidArgumentError(
                f"{description} of dtype {value.dtype} cannot be written to the variable "
                f"{self.spec.variable} of dtype {self.spec.dtype}; convert it first"
            )

    def _check_shape(self, value: Array, shape: tuple[int, ...], description: str) -> None:
        if value.shape != shape:
            raise InvalidArgumentError(
                f"shape {value.shape} of {description} does not fit the variable "
                f"{self.spec.variable}: shard {self.spec.index} needs {shape}"
            )

    def _check_arithmetic(self, mode: str) -> None:
        if self.value.dtype.kind == "b" and mode not in ("assign", "update"):
            raise InvalidArgumentError(
                f"{mode} is not supported for the variable {self.spec.variable} of dtype bool; use "
                "assign or scatter_update"
            )

    def _division(self) -> np.ufunc:
        floor_division: np.ufunc = np.floor_divide
        return floor_division if self.value.dtype.kind in "iu" else np.true_divide


def is_strictly_increasing(rows: NDArray[np.int64]) -> bool:
    """Return whether the rows are sorted and distinct, as clients send them."""
    return len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())


def check_gradient(gradient: Array, owner: str) -> None:
    """Check that a gradient has a floating dtype.

    Raises:
        InvalidArgumentError: If it does not.
    """
    if not is_floating(gradient.dtype):
        raise InvalidArgumentError(
            f"a gradient of {owner} must have a floating dtype, but has {gradient.dtype}"
        )


def check_value_indices(
    value_indices: Array | None, rows: Array, values: Array, owner: str
) -> None:
    """Check that value indices are valid for rows and values.

    Raises:
        InvalidArgumentError: If they are not.
    """
    if value_indices is None:
        return
    if value_indices.dtype.kind not in "iu" or value_indices.shape != rows.shape:
        raise InvalidArgumentError(
            f"value indices of {owner} must be integers of shape {rows.shape}, but got "
            f"{value_indices.dtype} of shape {value_indices.shape}"
        )
    if value_indices.size and (
        value_indices.max() >= len(values)
        or (value_indices.dtype.kind == "i" and value_indices.min() < 0)
    ):
        raise InvalidArgumentError(
            f"value indices of {owner} must be in [0, {len(values)}), but got "
            f"{value_indices.min()} to {value_indices.max()}"
        )


def check_row_range(spec: ShardSpec) -> None:
    """Check that a shard consists of consecutive rows of its variable.

    Raises:
        InvalidArgumentError: If it does not.
    """
    shape, variable_shape = spec.shape, spec.variable_shape
    fits = (
        len(shape) == len(variable_shape)
        and min((*shape, *variable_shape, spec.row), default=0) >= 0
    )
    if fits and shape:
        fits = shape[1:] == variable_shape[1:] and spec.row + shape[0] <= variable_shape[0]
    if not fits:
        raise InvalidArgumentError(
            f"shard {spec.name} of shape {shape}, starting at row {spec.row}, does not fit into a "
            f"variable of shape {variable_shape}"
        )


def check_value(spec: ShardSpec, value: Array) -> None:
    """Check that a value has the spec's shape and dtype.

    Raises:
        InvalidArgumentError: If it does not.
    """
    dtype = parse_dtype(spec.dtype)
    if value.shape != spec.shape or value.dtype != dtype:
        raise InvalidArgumentError(
            f"an initial value of shape {value.shape} and dtype {value.dtype} does not fit shard "
            f"{spec.index} of the variable {spec.variable}, of shape {spec.shape} and dtype "
            f"{spec.dtype}"
        )


def _find_mode(mode: str, modes: dict[str, Any]) -> Any:
    if mode not in modes:
        raise InvalidArgumentError(f"`mode` must be one of {', '.join(modes)}, but got {mode!r}")
    return modes[mode]


_ASSIGN_MODES: dict[str, Callable[[Array, Array], Any]] = {
    "assign": lambda value, other: np.copyto(value, other),
    "add": lambda value, other: np.add(value, other, out=value),
    "sub": lambda value, other: np.subtract(value, other, out=value),
}

_SCATTER_MODES: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "min": np.minimum,
    "max": np.maximum,
    "update": None,
}
