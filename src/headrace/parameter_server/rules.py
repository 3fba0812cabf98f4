"""Optimizer updates of values and slots, in place, in blocks that fit into the cache.

    slots_for_rule(rule)                                      slots of a rule, without AVERAGE
    apply_dense(rule, step, values, gradient, slots)          updates every element
    apply_sparse(rule, step, values, rows, gradient, slots)   updates the given rows only
    update_average(rule, step, values, average, ...)          after a dense step of a rule with EMA

The formulas are those of Keras. Each is written once, for a block of rows by columns, and used by
both: a dense block is a view, a sparse one is gathered and written back. So the block size does not
change a bit, and a sparse step on all rows gives the bits of a dense one (except for Adam: see
`_adam`).

Sparse steps are lazy: other rows are not decayed, and their running averages do not change; the
bias correction depends on the step's iteration, for all rows alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.parameter_server.specs import (
    AdadeltaRule,
    AdagradRule,
    AdamaxRule,
    AdamRule,
    FtrlRule,
    LionRule,
    NadamRule,
    OptimizerRule,
    RMSpropRule,
    RowWiseAdagradRule,
    SgdRule,
    StepParameters,
    working_dtype,
)

__all__ = [
    "AVERAGE",
    "BLOCK_ELEMENTS",
    "OptimizerSlot",
    "apply_dense",
    "apply_sparse",
    "nadam_product",
    "put_rows",
    "slots_for_rule",
    "update_average",
]

BLOCK_ELEMENTS = 32_768
"""128 KiB of float32: values, gradient, slots and two scratch blocks fit into a cache of 1 MiB."""

_SMALL_ITEM = 16
"""In bytes: for larger items, `put` takes 0.84 to 0.97 of the time of an assignment; not for
smaller ones.
"""

Array: TypeAlias = NDArray[Any]
Change: TypeAlias = Callable[[Array, Array, list[Array], Array, Array], None]
"""Updates values and slots of one block from a gradient; the last two blocks are scratch."""


class OptimizerSlot(NamedTuple):
    """An array that an optimizer keeps for a shard.

    Attributes:
        name: Keras's name.
        initial_value: Initial value of its elements.
        is_per_row: Whether it has one element per row instead of one per element.
    """

    name: str
    initial_value: float = 0.0
    is_per_row: bool = False


AVERAGE = OptimizerSlot("average")
"""Exponential moving average of the values, for rules with an `ema_momentum`."""


# --- formulas -------------------------------------------------------------------------------------


def _sgd_slots(rule: SgdRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("momentum"),) if rule.momentum else ()


def _sgd(rule: SgdRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    rate, momentum = step.learning_rate, rule.momentum

    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        np.multiply(gradient, rate, out=a)
        if not momentum:
            value -= a
            return
        (velocity,) = slots
        velocity *= momentum
        velocity -= a
        if rule.nesterov:
            np.multiply(velocity, momentum, out=b)
            b -= a
            value += b
        else:
            value += velocity

    return change


def _adagrad_slots(rule: AdagradRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("accumulator", rule.initial_accumulator_value),)


def _adagrad(rule: AdagradRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        (accumulator,) = slots
        np.multiply(gradient, gradient, out=a)
        accumulator += a
        np.add(accumulator, rule.epsilon, out=a)
        np.sqrt(a, out=a)
        np.multiply(gradient, step.learning_rate, out=b)
        b /= a
        value -= b

    return change


def _row_wise_adagrad_slots(rule: RowWiseAdagradRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("accumulator", rule.initial_accumulator_value, is_per_row=True),)


def _row_wise_adagrad(
    rule: RowWiseAdagradRule, step: StepParameters, dtype: np.dtype[Any]
) -> Change:
    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        (accumulator,) = slots
        np.multiply(gradient, gradient, out=a)
        accumulator += np.add.reduce(a, axis=1, keepdims=True) / max(1, a.shape[1])
        divisor = np.sqrt(accumulator + rule.epsilon)
        np.multiply(gradient, step.learning_rate, out=b)
        b /= divisor
        value -= b

    return change


def _adadelta_slots(rule: AdadeltaRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("accumulated_grad"), OptimizerSlot("accumulated_delta_var"))


def _adadelta(rule: AdadeltaRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        gradients, deltas = slots
        gradients *= rule.rho
        np.multiply(gradient, gradient, out=a)
        a *= 1 - rule.rho
        gradients += a
        np.add(deltas, rule.epsilon, out=b)
        np.sqrt(b, out=b)
        b *= gradient
        np.add(gradients, rule.epsilon, out=a)
        np.sqrt(a, out=a)
        b /= a
        deltas *= rule.rho
        np.multiply(b, b, out=a)
        a *= 1 - rule.rho
        deltas += a
        b *= step.learning_rate
        value -= b

    return change


def _rmsprop_slots(rule: RMSpropRule) -> tuple[OptimizerSlot, ...]:
    momentum = (OptimizerSlot("momentum"),) if rule.momentum > 0 else ()
    return (
        OptimizerSlot("velocity"),
        *momentum,
        *((OptimizerSlot("average_gradient"),) if rule.centered else ()),
    )


def _rmsprop(rule: RMSpropRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        velocity = slots[0]
        velocity *= rule.rho
        np.multiply(gradient, gradient, out=a)
        a *= 1 - rule.rho
        velocity += a
        if rule.centered:
            average = slots[-1]
            average *= rule.rho
            np.multiply(gradient, 1 - rule.rho, out=a)
            average += a
            np.multiply(average, average, out=b)
            np.subtract(velocity, b, out=a)
            # A variance: only rounding makes it negative.
            np.maximum(a, 0, out=a)
            a += rule.epsilon
        else:
            np.add(velocity, rule.epsilon, out=a)
        np.sqrt(a, out=a)
        np.multiply(gradient, step.learning_rate, out=b)
        b /= a
        if rule.momentum > 0:
            momentum = slots[1]
            momentum *= rule.momentum
            momentum += b
            value -= momentum
        else:
            value -= b

    return change


def _adam_slots(rule: AdamRule) -> tuple[OptimizerSlot, ...]:
    largest = (OptimizerSlot("velocity_hat"),) if rule.amsgrad else ()
    return (OptimizerSlot("momentum"), OptimizerSlot("velocity"), *largest)


def _adam(rule: AdamRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    count = step.iteration + 1
    # Before the bias correction, Keras rounds the betas to the variable's dtype, and
    # torch.optim.SparseAdam does not; their steps differ by 6e-6. A dense step follows Keras, a
    # lazy step PyTorch.
    first, second = float(dtype.type(rule.beta_1)), float(dtype.type(rule.beta_2))
    rate = step.learning_rate * math.sqrt(1 - second**count) / (1 - first**count)

    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        momentum, velocity = slots[:2]
        np.subtract(gradient, momentum, out=a)
        a *= 1 - rule.beta_1
        momentum += a
        np.multiply(gradient, gradient, out=a)
        a -= velocity
        a *= 1 - rule.beta_2
        velocity += a
        if rule.amsgrad:
            largest = slots[2]
            np.maximum(largest, velocity, out=largest)
            velocity = largest
        np.sqrt(velocity, out=a)
        a += rule.epsilon
        np.multiply(momentum, rate, out=b)
        b /= a
        value -= b

    return change


def _adamax_slots(rule: AdamaxRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("momentum"), OptimizerSlot("norm"))


def _adamax(rule: AdamaxRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    corrected = 1 - float(dtype.type(rule.beta_1)) ** (step.iteration + 1)

    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        momentum, norm = slots
        np.subtract(gradient, momentum, out=a)
        a *= 1 - rule.beta_1
        momentum += a
        norm *= rule.beta_2
        np.abs(gradient, out=a)
        np.maximum(norm, a, out=norm)
        np.add(norm, rule.epsilon, out=a)
        a *= corrected
        np.multiply(momentum, step.learning_rate, out=b)
        b /= a
        value -= b

    return change


def _nadam_slots(rule: NadamRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("momentum"), OptimizerSlot("velocity"))


_NADAM_DECAY = 0.96


@functools.cache
def _nadam_products() -> NDArray[np.float64]:
    """Return the products of `1 - 0.5 * 0.96 ** i` over i = 1 ... n, indexed by n.

    From n = 1000 on, the factor is 1 in float64.
    """
    factors = 1 - 0.5 * _NADAM_DECAY ** np.arange(1, 1001)
    return np.concatenate([[1.0], np.cumprod(factors)])


def nadam_product(beta_1: float, count: int) -> float:
    """Return the product of the momentum factors of the first `count` steps of Nadam."""
    products = _nadam_products()
    return beta_1**count * float(products[min(count, len(products) - 1)])


def _nadam(rule: NadamRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    count = step.iteration + 1
    # Keras rounds both betas to the variable's dtype, also where it subtracts them from 1.
    first, second = float(dtype.type(rule.beta_1)), float(dtype.type(rule.beta_2))
    this = first * (1 - 0.5 * _NADAM_DECAY**count)
    following = first * (1 - 0.5 * _NADAM_DECAY ** (count + 1))
    product = nadam_product(first, count)
    of_momentum = step.learning_rate * following / (1 - product * following)
    of_gradient = step.learning_rate * (1 - this) / (1 - product)
    corrected = 1 - second**count

    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        momentum, velocity = slots
        np.subtract(gradient, momentum, out=a)
        a *= 1 - first
        momentum += a
        np.multiply(gradient, gradient, out=a)
        a -= velocity
        a *= 1 - second
        velocity += a
        np.multiply(momentum, of_momentum, out=b)
        np.multiply(gradient, of_gradient, out=a)
        b += a
        np.divide(velocity, corrected, out=a)
        np.sqrt(a, out=a)
        a += rule.epsilon
        b /= a
        value -= b

    return change


def _lion_slots(rule: LionRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("momentum"),)


def _lion(rule: LionRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    first, second = float(dtype.type(rule.beta_1)), float(dtype.type(rule.beta_2))

    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        (momentum,) = slots
        np.multiply(momentum, first, out=a)
        np.multiply(gradient, 1 - first, out=b)
        a += b
        np.sign(a, out=a)
        a *= step.learning_rate
        value -= a
        momentum *= second
        np.multiply(gradient, 1 - second, out=b)
        momentum += b

    return change


def _ftrl_slots(rule: FtrlRule) -> tuple[OptimizerSlot, ...]:
    return (OptimizerSlot("accumulator", rule.initial_accumulator_value), OptimizerSlot("linear"))


def _ftrl(rule: FtrlRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    rate, power = step.learning_rate, -rule.learning_rate_power
    l1, shrinkage = rule.l1_regularization_strength, rule.l2_shrinkage_regularization_strength

    def raised(base: Array, out: Array) -> Array:
        return np.sqrt(base, out=out) if power == 0.5 else np.power(base, power, out=out)

    def change(value: Array, gradient: Array, slots: list[Array], a: Array, b: Array) -> None:
        if not rate:
            # The limit: the value does not change. The formula would divide by 0.
            return
        accumulator, linear = slots
        l2 = rule.l2_regularization_strength + rule.beta / (2 * rate)
        np.multiply(value, 2 * shrinkage, out=a)
        linear += gradient
        linear += a
        raised(accumulator, a)
        np.multiply(gradient, gradient, out=b)
        accumulator += b
        raised(accumulator, b)
        np.subtract(b, a, out=a)
        a /= rate
        a *= value
        linear -= a
        b /= rate
        b += 2 * l2
        np.clip(linear, -l1, l1, out=a)
        a -= linear
        np.divide(a, b, out=value)

    return change


_Maker: TypeAlias = Callable[[Any, StepParameters, np.dtype[Any]], Change]

_RULES: dict[type[Any], tuple[Callable[[Any], tuple[OptimizerSlot, ...]], _Maker]] = {
    SgdRule: (_sgd_slots, _sgd),
    AdagradRule: (_adagrad_slots, _adagrad),
    RowWiseAdagradRule: (_row_wise_adagrad_slots, _row_wise_adagrad),
    AdadeltaRule: (_adadelta_slots, _adadelta),
    RMSpropRule: (_rmsprop_slots, _rmsprop),
    AdamRule: (_adam_slots, _adam),
    AdamaxRule: (_adamax_slots, _adamax),
    NadamRule: (_nadam_slots, _nadam),
    LionRule: (_lion_slots, _lion),
    FtrlRule: (_ftrl_slots, _ftrl),
}


def slots_for_rule(rule: OptimizerRule) -> tuple[OptimizerSlot, ...]:
    """Return the slots that a rule keeps for each shard."""
    return _RULES[type(rule)][0](rule)


def _change(rule: OptimizerRule, step: StepParameters, dtype: np.dtype[Any]) -> Change:
    """Return the block update of a rule, with constants rounded to `dtype`."""
    change = _RULES[type(rule)][1](rule, step, dtype)
    if rule.weight_decay is None:
        return change
    factor = 1 - rule.weight_decay * step.learning_rate

    def decay_and_change(
        value: Array, gradient: Array, slots: list[Array], a: Array, b: Array
    ) -> None:
        value *= factor
        change(value, gradient, slots, a, b)

    return decay_and_change


# --- block by block -------------------------------------------------------------------------------


def apply_dense(
    rule: OptimizerRule,
    step: StepParameters,
    values: Array,
    gradient: Array,
    slots: Mapping[str, Array],
    *,
    block_elements: int = BLOCK_ELEMENTS,
) -> None:
    """Update all of `values` and `slots`, in place.

    Args:
        rule: Rule of the optimizer.
        step: Parameters of the step.
        values: C-contiguous, any shape and floating dtype.
        gradient: Gradient of the shape of `values`.
        slots: Slots of `slots_for_rule(rule)`, in the working dtype.
        block_elements: Number of elements updated at a time.
    """
    if values.size == 0:
        return
    required_slots = slots_for_rule(rule)
    # Element by element, unless a slot needs whole rows.
    by_row = any(slot.is_per_row for slot in required_slots)
    columns = values.size // len(values) if by_row and values.ndim else 1
    flat = values.reshape(-1, columns)
    steps = gradient.reshape(-1, columns)
    slot_arrays = [
        slots[slot.name].reshape(-1, 1 if slot.is_per_row else columns) for slot in required_slots
    ]
    dtype = working_dtype(values.dtype)
    rows = min(len(flat), max(1, block_elements // columns))
    scratch = np.empty((2, rows, columns), dtype)
    change = _change(rule, step, dtype)
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), rows):
            block = slice(start, start + rows)
            stored = flat[block]
            value = stored if stored.dtype == dtype else stored.astype(dtype)
            a, b = scratch[:, : len(value)]
            change(value, _in(dtype, steps[block]), [slot[block] for slot in slot_arrays], a, b)
            if value is not stored:
                stored[...] = value.astype(stored.dtype)


def update_average(
    rule: OptimizerRule, step: StepParameters, values: Array, average: Array, *, is_first: bool
) -> None:
    """Update `average` after a dense step, and copy it to the values if that is due.

    Args:
        rule: Rule of the optimizer; it has an `ema_momentum`.
        step: Parameters of the step.
        values: Values after the step; changed in place.
        average: The slot, in the working dtype; changed in place.
        is_first: Whether no earlier step was averaged: the average then starts as a copy.
    """
    momentum = rule.ema_momentum
    assert momentum is not None
    frequency = rule.ema_overwrite_frequency
    overwrites = frequency is not None and (step.iteration + 1) % frequency == 0
    flat, averages = values.reshape(-1), average.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), BLOCK_ELEMENTS):
            stored, mean = flat[start:][:BLOCK_ELEMENTS], averages[start:][:BLOCK_ELEMENTS]
            if is_first:
                mean[...] = stored
            else:
                mean *= momentum
                mean += _in(mean.dtype, stored) * (1 - momentum)
            if overwrites:
                stored[...] = mean.astype(stored.dtype, copy=False)


def apply_sparse(
    rule: OptimizerRule,
    step: StepParameters,
    values: Array,
    rows: NDArray[np.int64],
    gradient: Array,
    slots: Mapping[str, Array],
    value_indices: Array | None = None,
    *,
    block_elements: int = BLOCK_ELEMENTS,
) -> None:
    """Update the given rows, and their slots, in place.

    Args:
        rule: Rule of the optimizer.
        step: Parameters of the step.
        values: C-contiguous, at least 1-D.
        rows: 1-D, in range and distinct.
        gradient: A row for each, or rows that they share.
        slots: Slots of `slots_for_rule(rule)`, in the working dtype.
        value_indices: Index of the gradient row of each; None means one per row, in order.
        block_elements: Number of elements updated at a time.
    """
    if not len(rows) or not values.size:
        return
    columns = values.size // len(values)
    table = values.reshape(-1, columns)
    steps = gradient.reshape(-1, columns)
    slot_arrays = [
        slots[slot.name].reshape(-1, 1 if slot.is_per_row else columns)
        for slot in slots_for_rule(rule)
    ]
    dtype = working_dtype(values.dtype)
    size = min(len(rows), max(1, block_elements // columns))
    wholes = (table, *slot_arrays)
    parts = [np.empty((size, whole.shape[1]), whole.dtype) for whole in wholes]
    shared = np.empty((0 if value_indices is None else size, columns), steps.dtype)
    gradient_rows = None if value_indices is None else value_indices.astype(np.intp, copy=False)
    a, b = np.empty((2, size, columns), dtype)
    tables, items = list(map(_as_items, wholes)), list(map(_as_items, parts))
    # `_adam` explains why its constants stay in float64.
    change = _change(rule, step, np.dtype(np.float64) if isinstance(rule, AdamRule) else dtype)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            if len(block) < size:  # the last one
                parts, items = ([each[: len(block)] for each in of] for of in (parts, items))
                shared, a, b = (each[: len(block)] for each in (shared, a, b))
            for whole, part in zip(wholes, parts, strict=True):
                whole.take(block, axis=0, out=part, mode="clip")
            stored, *slot_blocks = parts
            value = stored if stored.dtype == dtype else stored.astype(dtype)
            if gradient_rows is None:
                block_gradient = steps[start : start + size]
            else:
                indices = gradient_rows[start : start + size]
                block_gradient = steps.take(indices, axis=0, out=shared, mode="clip")
            change(value, _in(dtype, block_gradient), slot_blocks, a, b)
            if value is not stored:
                stored[...] = value
            for table_items, block_items in zip(tables, items, strict=True):
                _put_items(table_items, block, block_items)


def put_rows(table: Array, rows: NDArray[np.int64], values: Array) -> None:
    """Write rows of a C-contiguous 2-D table; `values` must be contiguous, too."""
    _put_items(_as_items(table), rows, _as_items(values))


def _as_items(table: Array) -> Array:
    """View each row as one item, which takes half the time to write."""
    return table.view(np.dtype((np.void, table.shape[1] * table.itemsize)))[:, 0]


def _put_items(table: Array, rows: NDArray[np.int64], values: Array) -> None:
    if table.itemsize > _SMALL_ITEM:
        table.put(rows, values, mode="clip")
    else:
        table[rows] = values


def _in(dtype: np.dtype[Any], part: Array) -> Array:
    return part if part.dtype == dtype else part.astype(dtype)
