"""Small user programs with strategies: training loops and predictions."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import bag_combiner, get_replica_context, input_streams, rebatch
from tests.distribute import replicas as r

numbers = hr.Dataset.range


@pytest.mark.parametrize("module", [bag_combiner, rebatch, input_streams])
def test_docstring_examples_return_the_shown_results(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_predictions_with_their_index_can_be_put_in_order(replicas):
    s = r.mirrored(replicas)
    dataset = numbers(24).enumerate().shuffle(24, seed=1).batch(4)
    predictions = {}
    for step in s.distribute_dataset(dataset):
        results = s.run(lambda pair: (pair[0], pair[1] * 2), args=(step,))
        for index, value in s.local_results(results):
            predictions.update(zip(index.tolist(), value.tolist(), strict=True))
    assert dict(sorted(predictions.items())) == {i: 2 * i for i in range(24)}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_host_training_loop_gives_the_same_weights_on_any_number_of_replicas(replicas):
    s = r.mirrored(replicas)
    x = np.linspace(-1, 1, 30)
    dataset = hr.Dataset.from_tensor_slices({"x": x, "y": 3 * x + 1}).batch(7).repeat(40)
    weights = np.zeros(2)

    def step(batch):
        error = weights[0] * batch["x"] + weights[1] - batch["y"]
        sums = np.array([(error * batch["x"]).sum(), error.sum(), len(error)])
        total = get_replica_context().all_reduce("SUM", sums)
        return total[:2] / total[2]

    iterator = iter(s.distribute_dataset(dataset))
    while (batch := iterator.get_next_as_optional()).has_value():
        gradient = s.local_results(s.run(step, args=(batch.get_value(),)))[0]
        weights -= 0.5 * gradient
    assert np.allclose(weights, [3, 1], atol=1e-3)


@pytest.mark.catalogue("3.26.15")
def test_a_loop_with_too_many_steps_ends_with_the_data():
    s = r.mirrored(2)
    iterator = iter(s.distribute_dataset(numbers(8).batch(2)))
    sums = []
    for _ in range(6):
        step = iterator.get_next_as_optional()
        if not step.has_value():
            break
        sums.append(s.reduce("SUM", s.run(np.square, args=(step.get_value(),)), axis=0))
    assert sums == [1, 13, 41, 85]


@pytest.mark.catalogue("3.26.3-14")
def test_batches_of_the_custom_training_loop_rows():
    s = r.mirrored(2)

    def squares(data, batch, drop=False):
        dataset = hr.Dataset.from_tensor_slices(np.array(data)).batch(batch, drop)
        steps = [s.run(np.square, args=(step,)) for step in s.distribute_dataset(dataset)]
        return [np.concatenate(s.local_results(step)).tolist() for step in steps]

    assert squares([5.0, 6, 7, 8], 2) == [[25, 36], [49, 64]]
    assert squares([5.0, 6, 7], 2) == [[25, 36], [49]]
    dataset = hr.Dataset.from_tensor_slices(np.array([5.0, 6, 7])).batch(4)
    (step,) = s.distribute_dataset(dataset)
    assert s.run(np.mean, args=(step,)).values == (5.5, 7.0)
    assert s.reduce("MEAN", step, axis=0) == 6.0


@pytest.mark.catalogue("3.26.18")
def test_nested_output_keeps_its_structure():
    s = r.mirrored(2)
    (first, _) = s.distribute_dataset(numbers(4).batch(2))
    nested = s.run(lambda x: [{"a": x - 1, "b": x + 1}], args=(first,))
    assert s.local_results(nested) == (
        [{"a": np.array([-1]), "b": np.array([1])}],
        [{"a": np.array([0]), "b": np.array([2])}],
    )


def test_a_dataset_over_the_data_service_is_distributed_as_any_other():
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        share = hr.service.distribute("distributed_epoch", cluster.target, job_name="all")
        dataset = numbers(12).batch(4).apply(share)
        rows = [x for step in r.split(dataset, 2) for part in step for x in part]
    assert sorted(rows) == list(range(12))


@pytest.mark.parametrize("replicas", [2, 5])
def test_a_step_that_merges_after_many_short_steps_completes(replicas):
    """After short steps no thread is woken; a step that then waits still gets its threads."""
    s = r.mirrored(replicas)
    for _ in range(30):
        for _ in range(3):
            s.run(lambda: None)
        assert set(s.run(lambda: get_replica_context().all_reduce("SUM", 1)).values) == {replicas}
