"""Metrics of Headrace compared with those of Keras."""

from __future__ import annotations

import os

import numpy as np
import pytest

import headrace as hr

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

RNG = np.random.default_rng(11)
TRUE = RNG.integers(0, 2, 400)
PREDICTED = np.concatenate([RNG.random(300) ** 2, np.linspace(0, 1, 100)]).astype(np.float32)
WEIGHTS = RNG.random(400)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("curve", ["ROC", "PR"])
@pytest.mark.parametrize("method", ["interpolation", "minoring", "majoring"])
@pytest.mark.parametrize("thresholds", [200, 3])
def test_auc_equals_that_of_keras(weights, curve, method, thresholds):
    ours = hr.metrics.AUC(thresholds, curve, method)
    theirs = keras.metrics.AUC(thresholds, curve, method)
    for part in (slice(0, 150), slice(150, 400)):
        given = None if weights is None else weights[part]
        ours.update_state(TRUE[part], PREDICTED[part], given)
        theirs.update_state(TRUE[part], PREDICTED[part], given)
    assert np.isclose(ours.result(), float(theirs.result()), rtol=1e-5)


def test_auc_of_logits_and_of_values_at_thresholds_equals_that_of_keras():
    edges = np.arange(200, dtype=np.float32) / np.float32(199)
    labels = np.arange(200) % 3 == 0
    for options, predicted in (({}, edges), ({"from_logits": True}, edges * 8 - 4)):
        ours, theirs = hr.metrics.AUC(**options), keras.metrics.AUC(**options)
        ours.update_state(labels[:, None], predicted)
        theirs.update_state(labels, predicted)
        assert np.isclose(ours.result(), float(theirs.result()), rtol=1e-5)


@pytest.mark.parametrize("weights", [(20,), (20, 1), (20, 20)])
def test_auc_of_multi_label_samples_equals_that_of_keras(weights):
    rng = np.random.default_rng(5)
    given = rng.random(weights).astype(np.float32)
    ours, theirs = hr.metrics.AUC(), keras.metrics.AUC()
    for metric in (ours, theirs):
        metric.update_state(TRUE.reshape(20, 20), PREDICTED.reshape(20, 20), sample_weight=given)
    assert np.isclose(ours.result(), float(theirs.result()), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "weights"),
    [((6,), None), ((6,), (6,)), ((6,), (6, 1)), ((6, 1), (6,)), ((6, 3), None), ((6, 3), (6,)),
     ((6, 3), (6, 3)), ((6, 3), (6, 1)), ((6, 3, 2), (6, 3)), ((), None), ((6,), ())],
)  # fmt: skip
def test_means_and_accuracies_equal_those_of_keras(shape, weights):
    rng = np.random.default_rng(3)
    values = rng.integers(0, 3, shape).astype(np.float32)
    labels = rng.integers(0, 3, shape).astype(np.float32)
    given = None if weights is None else rng.random(weights).astype(np.float32)
    ours, theirs = hr.metrics.Mean(), keras.metrics.Mean()
    for metric in (ours, theirs):
        metric.update_state(values, sample_weight=given)
    assert np.isclose(ours.result(), float(theirs.result()), rtol=1e-5)
    right, reference = hr.metrics.Accuracy(), keras.metrics.Accuracy()
    for metric in (right, reference):
        metric.update_state(labels, values, sample_weight=given)
    assert np.isclose(right.result(), float(reference.result()), rtol=1e-5)
