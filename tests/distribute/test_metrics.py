"""Metrics, compared with formulas, and in strategies; tests/adapters compares them with Keras."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidArgumentError
from tests.parameter_server.small_cluster import cluster


def test_metrics_are_zero_without_updates_and_after_reset():
    for metric in (hr.metrics.Mean(), hr.metrics.Accuracy(), hr.metrics.AUC()):
        assert metric.result() == 0
    mean = hr.metrics.Mean()
    mean.update_state([1.0, 2.0])
    mean.update_state(6.0)
    assert mean.result() == 3
    mean.reset_states()
    assert mean.result() == 0
    mean.update_state([])
    assert mean.result() == 0


def test_merged_metrics_include_the_updates_of_both():
    rng = np.random.default_rng(5)
    true, predicted = rng.integers(0, 2, (4, 50)), rng.random((4, 50))
    whole, parts = hr.metrics.AUC(), [hr.metrics.AUC() for _ in range(4)]
    for part, one, other in zip(parts, true, predicted, strict=True):
        part.update_state(one, other)
        whole.update_state(one, other)
    assert parts[0].merge(parts[1:]).result() == whole.result()
    with pytest.raises(TypeError, match="AUC"):
        whole.merge(hr.metrics.Mean())
    for other in (hr.metrics.AUC(100), hr.metrics.AUC(curve="PR")):
        with pytest.raises(ValueError, match="settings"):
            whole.merge(other)
    for sums in (np.zeros((2, 100)), [hr.metrics.Mean().sums()], [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"sums of shape \(2, 200\)"):
            whole.merge(sums)
    with pytest.raises(TypeError, match="expected a metric of class AUC or its sums"):
        whole.merge(["a"])
    mean = hr.metrics.Mean()
    mean.update_state(np.float64([1, 2]))
    assert hr.metrics.Mean().merge(mean.sums()).merge([mean, mean.sums()]).result() == 1.5


def test_replicas_add_to_separate_sums_and_the_result_covers_all():
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        mean = hr.metrics.Mean()
    for _ in range(3):
        values = strategy.experimental_distribute_values_from_function(
            lambda context: np.full(2, context.replica_id_in_sync_group, np.float64)
        )
        strategy.run(mean.update_state, (values,))
    assert mean.result() == 0.5
    assert mean.sums().tolist() == [6, 12]
    mean.reset_state()
    assert mean.result() == 0


@pytest.mark.catalogue("3.18.1")
def test_sums_are_on_parameter_servers_and_pickle_as_handles():
    with cluster(2) as strategy:
        with strategy.scope():
            mean, auc = hr.metrics.Mean("loss"), hr.metrics.AUC(name="auc")
        twin = pickle.loads(pickle.dumps(mean))
        twin.update_state([2.0, 4.0])
        pickle.loads(pickle.dumps(auc)).update_state([0, 1], [0.1, 0.8])
        assert mean.result() == 3
        assert auc.result() == 1
        assert "loss" in repr(mean)
        assert mean.variables[0].cluster is strategy.cluster


def test_mismatched_values_are_named():
    auc = hr.metrics.AUC()
    with pytest.raises(InvalidArgumentError, match="from_logits"):
        auc.update_state([0, 1], [0.5, 1.5])
    with pytest.raises(InvalidArgumentError, match="from_logits"):
        auc.update_state([0, 1], [0.5, np.nan])
    with pytest.raises(InvalidArgumentError, match="one shape"):
        auc.update_state([0, 1, 1], [0.5, 0.5])
    with pytest.raises(InvalidArgumentError, match="one shape"):
        hr.metrics.Accuracy().update_state([0, 1, 1], [0, 1])
    with pytest.raises(InvalidArgumentError, match="sample_weight"):
        hr.metrics.Mean().update_state([1.0, 2.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="curve"):
        hr.metrics.AUC(curve="roc curve")
    with pytest.raises(ValueError, match="num_thresholds"):
        hr.metrics.AUC(1)
    with pytest.raises(TypeError, match="numbers"):
        hr.metrics.Mean().update_state(["a"])
