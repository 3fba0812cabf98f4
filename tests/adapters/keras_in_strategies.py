"""Keras models in scopes and in scheduled functions; `test_keras.py` runs it on each back end."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from tests.coordinator.in_process import coordinating

# Warnings that Keras itself causes, also when it saves a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.ones((8, 2), np.float32)
Y = np.ones((8, 1), np.float32)

imported_model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def use_imported_model():
    return imported_model.count_params()


class Linear(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def functional() -> keras.Model:
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


# --- capture --------------------------------------------------------------------------------------


def test_keras_objects_of_no_strategy_are_rejected_in_scheduled_functions():
    model, built = sequential(), keras.layers.Dense(1)
    built.build((None, 2))
    optimizer, metric = keras.optimizers.SGD(0.1), keras.metrics.Mean()
    variable = keras.Variable(np.zeros(2))

    def use(*given, **named):
        return 1

    with coordinating() as coordinator:
        schedule = coordinator.schedule
        for found, call in [
            ("model", lambda: schedule(lambda: model.count_params())),
            ("model", lambda: schedule(model.predict, (X,))),
            ("model", lambda: schedule(functools.partial(use, model))),
            ("model", lambda: schedule(use_imported_model)),
            ("model", lambda: schedule(use, (model,))),
            ("model", lambda: schedule(use, (Linear(),))),
            ("model", lambda: schedule(use, kwargs={"given": [{"a": (functional(),)}]})),
            ("layer", lambda: schedule(lambda: built(X))),
            ("optimizer", lambda: schedule(lambda: optimizer.learning_rate)),
            ("metric", lambda: schedule(use, (metric,))),
            ("variable", lambda: schedule(use, ([variable],))),
            ("model", lambda: coordinator.run_epoch(lambda it: (next(it), model))),
            ("model", lambda: coordinator.create_per_worker_dataset(
                lambda: hr.Dataset.from_tensors(model.predict(X)))),
            ("model", lambda: coordinator.create_per_worker_dataset(
                hr.Dataset.range(3).map(lambda x: model(X)))),
            ("model", lambda: coordinator.evaluate(
                lambda shard: model.count_params(), hr.Dataset.range(4), 2, list)),
        ]:  # fmt: skip
            with pytest.raises(FailedPreconditionError, match=f"the Keras {found} .*"):
                call()
        with pytest.raises(FailedPreconditionError, match=r"hr\.keras\.distribute\(model, strat"):
            schedule(lambda: model.count_params())
        with pytest.raises(FailedPreconditionError, match="imports its module"):
            schedule(use_imported_model)
        coordinator.join()


def test_models_that_workers_build_and_weights_that_are_passed_work():
    def step(model, weights):
        outputs, _ = model.stateless_call(weights, [], X)
        return float(keras.ops.sum(outputs))

    with coordinating() as coordinator:
        each = coordinator.create_per_worker_values(sequential)
        weights = [np.full((2, 1), 0.5, np.float32), np.full(1, 0.25, np.float32)]
        assert coordinator.schedule(step, (each, weights)).fetch() == pytest.approx(8 * 1.25)
        flatten = keras.layers.Flatten()
        shape = coordinator.schedule(lambda: tuple(flatten(X[:, None]).shape)).fetch()
        assert shape == (8, 2)
        assert coordinator.schedule(sequential).fetch().count_params() == 3


# --- scopes ---------------------------------------------------------------------------------------


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    return model


def assert_refused(model: keras.Model) -> None:
    data = hr.keras.dataset(hr.Dataset.from_tensor_slices((X, Y)).batch(4))
    before = model.get_weights()
    for call in (
        lambda: model.fit(X, Y, verbose=0),
        lambda: model.fit(data, verbose=0),
        lambda: model.evaluate(X, Y, verbose=0),
        lambda: model.train_on_batch(X, Y),
        lambda: model.test_on_batch(X, Y),
    ):
        with pytest.raises(FailedPreconditionError, match=r"in the scope of .*hr\.keras\.dataset"):
            call()
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.parametrize("make", [sequential, functional, Linear])
def test_models_made_outside_a_scope_with_replicas_do_not_train_in_it(make):
    with hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = compiled(make())
        model.fit(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (8, 1)
    outside = compiled(make())
    outside.fit(X, Y, verbose=0)
    with hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        assert_refused(outside)
        assert_refused(model)
    outside.fit(X, Y, verbose=0)


def test_one_replica_trains_in_its_scope():
    with hr.distribute.MirroredStrategy(["cpu:0"]).scope():
        model = compiled(sequential())
        assert len(model.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2
    assert model.evaluate(X, Y, verbose=0) >= 0


def test_datasets_distributed_to_workers_are_rejected():
    with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            model = compiled(sequential())
        distributed = strategy.distribute_dataset(hr.Dataset.from_tensor_slices((X, Y)).batch(4))
        for call in (hr.keras.dataset, compiled(sequential()).fit, model.fit):
            with pytest.raises(
                TypeError, match=r"read by workers|workers read it|whose workers read"
            ):
                call(distributed)
        strategy.close()
