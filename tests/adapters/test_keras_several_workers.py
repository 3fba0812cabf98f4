"""Keras training with replicas in several processes."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from tests.distribute.several_workers import Scenarios, Workers

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.system]

SCENARIOS = Scenarios("tests.adapters.keras_worker_scenarios")


@pytest.fixture(scope="module", params=["torch", "jax"])
def workers(request):
    if not all(map(importlib.util.find_spec, ("keras", request.param))):
        pytest.skip("needs Keras and a back end")
    workers = Workers(2, KERAS_BACKEND=request.param, JAX_PLATFORMS="cpu")
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("reduction", "devices"), [("sum_over_batch_size", None), ("sum", ["cpu:0", "cpu:1"])]
)
def test_workers_train_as_one_device(workers, reduction, devices):
    found = workers.run(SCENARIOS.train, reduction, devices)
    for alone, distributed in found:
        for expected, value in zip(alone[:2], distributed[:2], strict=True):
            assert list(value) == list(expected)
            for name in expected:
                np.testing.assert_allclose(value[name], expected[name], rtol=1e-5, atol=1e-5)
        for expected, value in zip(alone[2], distributed[2], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    assert found[0][1] == found[1][1]


def test_workers_without_rows_take_part(workers):
    first, second = workers.run(SCENARIOS.train_where_workers_have_no_rows, None)
    assert first == second
    history, _, shape, refused = first
    assert history["val_rows"] == [23.0, 23.0]
    assert history["rows"] == [23.0]
    assert shape == (23, 1)
    assert refused


def test_class_weights_apply_to_every_kind_of_data(workers):
    for found in workers.run(SCENARIOS.train_with_class_weights):
        for alone, distributed in found:
            for expected, value in zip(alone, distributed, strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
