"""Initial values of rows, which depend only on the seed, the row and the column."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from headrace.parameter_server.specs import Constant, Normal, Uniform, Zeros
from headrace.parameter_server.table_rows import fill_initial_values, initial_rows

F = np.dtype(np.float32)
ALL = [Zeros(), Constant(2.5), Uniform(-1.0, 1.0, 3), Normal(1.0, 2.0, 3)]


@pytest.mark.parametrize("initializer", ALL, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32"])
def test_initial_values_of_a_row_do_not_depend_on_other_rows(initializer, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 50)
    together = initial_rows(initializer, ids, 4, kind)
    assert together.dtype == kind
    assert together.shape == (50, 4)
    for index in (0, 17, 49):
        alone = initial_rows(initializer, ids[index : index + 1], 4, kind)
        assert alone[0].tobytes() == together[index].tobytes()
    backwards = initial_rows(initializer, ids[::-1].copy(), 4, kind)
    assert backwards[::-1].tobytes() == together.tobytes()


@pytest.mark.parametrize("initializer", ALL, ids=lambda one: type(one).__name__)
def test_initial_values_do_not_depend_on_the_number_of_shards(initializer):
    whole = np.empty((1000, 3, 2), np.float32)
    fill_initial_values(whole, initializer, 0)
    for sizes in ([1000], [400, 600], [1, 998, 1]):
        row, parts = 0, []
        for count in sizes:
            part = np.empty((count, 3, 2), np.float32)
            fill_initial_values(part, initializer, row)
            parts.append(part)
            row += count
        assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_uniform_values_are_spread_evenly():
    values = initial_rows(Uniform(-2.0, 1.0, 7), np.arange(20_000), 8, F)
    assert -2 <= values.min() < -1.99
    assert 0.99 < values.max() <= 1
    counts, _ = np.histogram(values, 30)
    assert counts.max() < 1.1 * counts.min()
    columns = np.corrcoef(values.T)
    assert np.abs(columns - np.eye(8)).max() < 0.05
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.05


def test_normal_values_have_their_mean_and_stddev():
    values = initial_rows(
        Normal(mean=3.0, stddev=0.5, seed=7), np.arange(20_000), 8, np.dtype(np.float64)
    )
    assert values.mean() == pytest.approx(3.0, abs=0.01)
    assert values.std() == pytest.approx(0.5, rel=0.02)
    assert np.isfinite(values).all()
    assert ((np.abs(values - 3) < 1).mean()) == pytest.approx(0.954, abs=0.01)


def test_another_seed_gives_other_values():
    rows = np.arange(100)
    for kind in (Uniform, Normal):
        ends = [initial_rows(kind(0.0, 1.0, seed), rows, 4, F) for seed in (0, 1, -1, 2**40)]
        for index, one in enumerate(ends):
            for other in ends[index + 1 :]:
                assert (one != other).mean() > 0.99


def test_scalars_and_empty_arrays_are_initialized():
    alone = np.empty((), np.float32)
    fill_initial_values(alone, Constant(4.0), 0)
    assert alone == 4
    for shape in ((0,), (0, 3), (3, 0)):
        fill_initial_values(np.empty(shape, np.float32), Uniform(), 0)
