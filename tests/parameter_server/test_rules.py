"""All optimizer rules: reference values, dense and sparse steps, blocks, and resumption."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import headrace as hr
from headrace.parameter_server.rules import (
    BLOCK_ELEMENTS,
    apply_dense,
    apply_sparse,
    put_rows,
    slots_for_rule,
    update_average,
)
from headrace.parameter_server.specs import AdamRule, SgdRule, StepParameters, working_dtype
from tests.parameter_server.optimizers_in_use import OPTIMIZERS, first_value, gradient

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())
ALL_OPTIMIZERS = {
    **OPTIMIZERS,
    "row-wise adagrad": ("RowWiseAdagrad", {"learning_rate": 0.05, "weight_decay": 0.01}),
}


def optimizer_of(case):
    name, arguments = ALL_OPTIMIZERS[case]
    return getattr(hr.optimizers, name)(**arguments)


def slots_for(optimizer, value):
    dtype = working_dtype(value.dtype)
    return {
        slot.name: np.full(
            value.shape[:1] if slot.is_per_row else value.shape, slot.initial_value, dtype
        )
        for slot in slots_for_rule(optimizer.rule)
    }


def train(optimizer, value, slots, steps, *, rows=None, **blocks):
    for iteration in steps:
        (clipped,) = optimizer.prepare(["w"], [gradient(iteration)])
        step = StepParameters(iteration=iteration, learning_rate=optimizer.rate(iteration))
        if rows is None:
            apply_dense(optimizer.rule, step, value, clipped, slots, **blocks)
        else:
            apply_sparse(optimizer.rule, step, value, rows, clipped[rows], slots, **blocks)
    return value


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_100_steps_match_keras(case):
    optimizer, value = optimizer_of(case), first_value()
    train(optimizer, value, slots_for(optimizer, value), range(100))
    expected = np.float32(REFERENCE["dense"][case]).reshape(value.shape)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


def test_100_lazy_steps_match_torch_sparse_adam():
    value, slots = first_value(), {}
    rule = AdamRule()
    slots = {slot.name: np.zeros(value.shape, np.float32) for slot in slots_for_rule(rule)}
    row_lists = [[0, 2], [1], [2, 3, 4], [0, 4]]
    for iteration in range(100):
        rows = np.array(row_lists[iteration % 4])
        step = StepParameters(iteration=iteration, learning_rate=0.01)
        apply_sparse(rule, step, value, rows, gradient(iteration)[rows], slots)
    expected = np.float32(REFERENCE["sparse_adam"]).reshape(value.shape)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", ALL_OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_sparse_step_on_all_rows_equals_a_dense_step(case, dtype):
    optimizer = optimizer_of(case)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    ends = []
    for rows in (None, np.arange(5)):
        value = first_value().astype(kind)
        slots = slots_for(optimizer, value)
        train(optimizer, value, slots, range(7), rows=rows)
        ends.append([value, *slots.values()])
    for dense, sparse in zip(*ends, strict=True):
        assert dense.dtype == sparse.dtype
        if isinstance(optimizer.rule, AdamRule) and dense is ends[0][0] and dtype != "float64":
            # Their references, Keras and PyTorch, differ by 6e-6 of a step.
            a, b = dense.astype(float), sparse.astype(float)
            np.testing.assert_allclose(a, b, rtol=1e-2 if dense.itemsize < 4 else 1e-5, atol=1e-6)
        else:
            assert dense.tobytes() == sparse.tobytes()


@pytest.mark.parametrize("case", ALL_OPTIMIZERS)
@pytest.mark.parametrize("rows", [None, np.array([0, 1, 3, 4])], ids=["dense", "sparse"])
def test_the_block_size_does_not_change_the_result(case, rows):
    optimizer = optimizer_of(case)
    ends = []
    for elements in (1, 4, 7, 10**6):
        value = first_value()
        slots = slots_for(optimizer, value)
        train(optimizer, value, slots, range(6), rows=rows, block_elements=elements)
        ends.append([part.tobytes() for part in (value, *slots.values())])
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("case", ALL_OPTIMIZERS)
def test_training_resumes_exactly_from_saved_values_and_slots(case):
    optimizer, value = optimizer_of(case), first_value()
    slots = slots_for(optimizer, value)
    train(optimizer, value, slots, range(5))
    again = np.array(value)
    slots_again = {name: np.array(slot) for name, slot in slots.items()}
    train(optimizer, value, slots, range(5, 12))
    train(optimizer_of(case), again, slots_again, range(5, 12))
    assert again.tobytes() == value.tobytes()


@pytest.mark.parametrize("case", ALL_OPTIMIZERS)
def test_sparse_steps_keep_other_rows_unchanged(case):
    optimizer, value = optimizer_of(case), first_value()
    slots = slots_for(optimizer, value)
    train(optimizer, value, slots, range(3))
    before = [np.array(part) for part in (value, *slots.values())]
    train(optimizer, value, slots, range(3, 6), rows=np.array([1, 4]))
    for old, new in zip(before, (value, *slots.values()), strict=True):
        assert old[[0, 2, 3]].tobytes() == new[[0, 2, 3]].tobytes()
        assert old[[1, 4]].tobytes() != new[[1, 4]].tobytes()


@pytest.mark.parametrize("case", ALL_OPTIMIZERS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (3, 0), (2, 3, 4), (1, 40_000)])
def test_unusual_shapes_are_supported(case, shape):
    optimizer = optimizer_of(case)
    value = np.ones(shape, np.float32)
    slots = slots_for(optimizer, value)
    step = StepParameters(iteration=0, learning_rate=0.1)
    apply_dense(optimizer.rule, step, value, np.ones(shape, np.float32), slots)
    assert value.size == 0 or (value < 1).all()
    if shape:
        rows = np.arange(min(2, shape[0]))
        apply_sparse(optimizer.rule, step, value, rows, np.ones_like(value)[rows], slots)
        apply_sparse(optimizer.rule, step, value, rows[:0], np.ones_like(value)[:0], slots)


def test_row_wise_adagrad_divides_a_row_by_the_root_of_its_mean_square():
    optimizer = hr.optimizers.RowWiseAdagrad(1.0, initial_accumulator_value=0.0, epsilon=0.0)
    value = np.zeros((2, 2), np.float32)
    slots = slots_for(optimizer, value)
    step = StepParameters(iteration=0, learning_rate=1.0)
    apply_dense(optimizer.rule, step, value, np.float32([[3, 4], [1, 1]]), slots)
    assert slots["accumulator"].tolist() == [12.5, 1.0]
    np.testing.assert_allclose(value, [[-3 / 12.5**0.5, -4 / 12.5**0.5], [-1, -1]], rtol=1e-6)


def test_bfloat16_slots_are_kept_in_float32():
    value = np.ones((1, 4), ml_dtypes.bfloat16)
    slots = {slot.name: np.zeros((1, 4), np.float32) for slot in slots_for_rule(AdamRule())}
    step = StepParameters(iteration=0, learning_rate=1e-5)
    apply_dense(AdamRule(), step, value, np.full((1, 4), 1e-3, np.float32), slots)
    assert value.tolist() == [[1.0] * 4]
    np.testing.assert_allclose(slots["velocity"], 1e-9, rtol=1e-4)


def test_a_learning_rate_of_0_changes_no_values():
    for case in ALL_OPTIMIZERS:
        optimizer, value = optimizer_of(case), first_value()
        slots = slots_for(optimizer, value)
        step = StepParameters(iteration=0, learning_rate=0.0)
        apply_dense(optimizer.rule, step, value, gradient(0), slots)
        assert value.tobytes() == first_value().tobytes(), case


def test_infinite_gradients_give_infinite_values_without_warnings():
    value = np.ones(3, np.float32)
    step = StepParameters(iteration=0, learning_rate=1.0)
    apply_dense(SgdRule(), step, value, np.float32([np.inf, np.nan, 1]), {})
    assert value[0] == -np.inf
    assert np.isnan(value[1])
    assert value[2] == 0


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_moving_averages_cover_all_elements(dtype):
    rule = SgdRule(ema_momentum=0.5, ema_overwrite_frequency=2)
    for shape in ((), (0, 3), (2 * BLOCK_ELEMENTS + 5,)):
        value, average = np.full(shape, 4, dtype), np.zeros(shape, np.float32)
        update_average(
            rule, StepParameters(iteration=0, learning_rate=1.0), value, average, is_first=True
        )
        assert (average == 4).all()
        value[...] = 8
        update_average(
            rule, StepParameters(iteration=1, learning_rate=1.0), value, average, is_first=False
        )
        assert (average == 6).all()
        assert (value == 6).all()
        assert value.dtype == dtype


def test_put_rows_supports_any_row_width():
    for dtype, width in ((np.bool_, 3), (np.float64, 1), (ml_dtypes.bfloat16, 5)):
        table = np.zeros((4, width), dtype)
        put_rows(table, np.array([3, 0]), np.ones((2, width), dtype))
        assert table.astype(int).sum(axis=1).tolist() == [width, 0, 0, width]
