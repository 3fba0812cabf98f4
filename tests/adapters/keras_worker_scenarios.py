"""Scenarios that each worker of a MultiWorkerMirroredStrategy runs with a Keras model."""

from __future__ import annotations

import warnings

import keras
import numpy as np

import headrace as hr
from headrace.errors import FailedPreconditionError

# A warning that Keras itself causes.
warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)

ROWS = 23
X = np.random.default_rng(7).random((ROWS, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Rows(keras.metrics.Metric):
    """Metric that counts rows."""

    def __init__(self):
        super().__init__(name="rows")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.count + 0.0


def weights_of(model):
    return [each.tolist() for each in model.get_weights()]


def make_model(norm=False):
    layers = [keras.layers.Dense(5, activation="relu"), keras.layers.Dense(1)]
    if norm:
        layers[1:1] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def train(reduction, devices):
    """Train a model on one device and one on all workers; return the results of both."""
    strategy = hr.distribute.MultiWorkerMirroredStrategy(devices=devices)
    keras.utils.set_random_seed(strategy.first_replica)  # workers start with different weights
    with strategy.scope():
        model = make_model()
    first = [strategy.broadcast_first(each, "weights") for each in model.get_weights()]
    alone = make_model()
    alone.set_weights(first)
    found = []
    for each in (alone, model):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        each.compile(keras.optimizers.SGD(0.005, momentum=0.9), loss, metrics=[Rows()])
        data = (X, Y)
        history = each.fit(
            *data, batch_size=5, epochs=2, shuffle=False, validation_data=data, verbose=0
        ).history
        score = each.evaluate(X, Y, batch_size=4, return_dict=True, verbose=0)
        found.append((history, score, weights_of(each)))
    strategy.close()
    return found


def train_where_workers_have_no_rows(devices):
    """Train with statistics and dropout on batches that leave some workers without rows."""
    strategy = hr.distribute.MultiWorkerMirroredStrategy(devices=devices)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = make_model(norm=True)
    model.compile("adam", "mse", metrics=[Rows()])
    data = hr.Dataset.from_tensor_slices((X, Y)).batch(11)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    history.update(model.fit(hr.keras.dataset(data.shuffle(3)), verbose=0).history)
    predicted = model.predict(data, verbose=0)
    try:
        model.train_on_batch(X, Y)
        refused = False
    except FailedPreconditionError:
        refused = True
    strategy.close()
    return history, weights_of(model), predicted.shape, refused


def train_with_class_weights():
    """Train from data of each kind with class weights; return weights of one device and of all."""
    strategy = hr.distribute.MultiWorkerMirroredStrategy()
    labels = (Y > 3).astype(np.float32)
    data = hr.Dataset.from_tensor_slices((X, labels)).batch(5)
    kinds = [
        (lambda: (X, labels), {"batch_size": 5, "shuffle": False}),
        (lambda: (data,), {}),
        (lambda: (hr.keras.dataset(data),), {}),
        (lambda: (hr.keras.dataset(strategy.distribute_dataset(data)),), {}),
    ]
    found = []
    for make_data, options in kinds:
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = make_model()
        keras.utils.set_random_seed(5)
        alone = make_model()
        for each, given in ((alone, (X, labels)), (model, make_data())):
            each.compile(keras.optimizers.SGD(0.05), "mse")
            named = {"batch_size": 5, "shuffle": False} if each is alone else options
            each.fit(*given, class_weight={0: 3.0, 1: 0.5}, verbose=0, **named)
        found.append((weights_of(alone), weights_of(model)))
    strategy.close()
    return found
