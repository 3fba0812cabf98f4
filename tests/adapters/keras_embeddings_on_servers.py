"""Embeddings of Keras models on parameter servers; `test_keras.py` runs it on each back end."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidArgumentError
from tests.adapters import keras_on_parameter_servers
from tests.adapters.keras_on_parameter_servers import ROWS, assert_same_weights, both

# Warnings that Keras itself causes, also when it saves a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

cluster = keras_on_parameter_servers.cluster
make_strategy = keras_on_parameter_servers.make_strategy

# --- embeddings -----------------------------------------------------------------------------------

VOCABULARY = 60
IDS = np.random.default_rng(3).integers(0, VOCABULARY, (ROWS, 6)).astype(np.int32)
OTHER_IDS = np.random.default_rng(4).integers(0, VOCABULARY, (ROWS, 2)).astype(np.int32)
TARGET = (IDS.sum(axis=1, keepdims=True) / 100).astype(np.float32)


def embedded():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 4, name="words"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def masked():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 4, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )


def two_towers():
    """Two layers that look up the same ids; one is called twice."""
    left = keras.Input((6,), dtype="int32", name="left")
    right = keras.Input((2,), dtype="int32", name="right")
    first = keras.layers.Embedding(VOCABULARY, 4)
    second = keras.layers.Embedding(VOCABULARY + 7, 3)
    flat = [keras.layers.Flatten()(each) for each in (first(left), first(right), second(left))]
    return keras.Model(
        {"left": left, "right": right}, keras.layers.Dense(1)(keras.layers.Concatenate()(flat))
    )


class Hashed(keras.Model):
    """A model whose ids are computed in `call`, some of them negative."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(50, 4)
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        rows = self.norm(self.embedding(x % 50), training=training)
        return self.dense(keras.ops.mean(rows + self.embedding(x % 7 - 9), axis=1))


class Chained(keras.Model):
    """A model in which ids of one layer depend on rows of another."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Embedding(VOCABULARY, 4)
        self.second = keras.layers.Embedding(5, 4)
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        rows = self.first(x)
        return self.dense(keras.ops.mean(rows + self.second(keras.ops.argmax(rows, -1)), axis=1))


class Tied(keras.Model):
    """A model that also uses the whole matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(VOCABULARY, 4)

    def call(self, x):
        mean = keras.ops.mean(self.embedding(x), axis=1)
        logits = keras.ops.matmul(mean, keras.ops.transpose(self.embedding.embeddings))
        return keras.ops.mean(logits, axis=1, keepdims=True)


class Regularized(keras.Model):
    """A model with a regularized layer, whose gradient has all rows."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(VOCABULARY, 4)
        self.other = keras.layers.Embedding(VOCABULARY, 4, embeddings_regularizer="l2")

    def call(self, x):
        rows = self.embedding(x) * self.other(x)
        return keras.ops.mean(keras.ops.mean(rows, axis=2), axis=1, keepdims=True)


def embedding_inputs(make):
    return {"left": IDS, "right": OTHER_IDS} if make is two_towers else IDS


def kinds_of_gradients(monkeypatch):
    """Return a list that records for each `Embedding` gradient whether it has only some rows."""
    pushed = []
    apply = hr.optimizers.Optimizer.apply_gradients

    def recording(self, pairs, **settings):
        pairs = list(pairs)
        for gradient, variable in pairs:
            if "embedding" in variable.name or "words" in variable.name:
                pushed.append(isinstance(gradient, hr.IndexedSlices))
        return apply(self, pairs, **settings)

    monkeypatch.setattr(hr.optimizers.Optimizer, "apply_gradients", recording)
    return pushed


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((embedded, "sgd"), (masked, "sgd"), (two_towers, "adagrad")),
        *((Hashed, "sgd"), (Chained, "adagrad"), (Tied, "sgd"), (Regularized, "adagrad")),
    ],
)
def test_rows_of_embeddings_are_looked_up(make_strategy, monkeypatch, make, name):
    partitioner = hr.distribute.partitioners.FixedShardsPartitioner(2)
    strategy = make_strategy(staleness=0, variable_partitioner=partitioner)
    pushed = kinds_of_gradients(monkeypatch)

    def compile_model(model):
        chosen = {"sgd": keras.optimizers.SGD(0.1), "adagrad": keras.optimizers.Adagrad(0.1)}
        model.compile(chosen[name], "mse", metrics=["mae"])

    alone, placed = both(make, compile_model, strategy)
    x = embedding_inputs(make)
    for each in (alone, placed):
        each.fit(x, TARGET, batch_size=24, epochs=3, shuffle=False, verbose=0)
    assert_same_weights(alone, placed)
    assert placed.evaluate(x, TARGET, batch_size=32, verbose=0) == pytest.approx(
        alone.evaluate(x, TARGET, batch_size=32, verbose=0), rel=1e-4
    )
    expected = alone.predict(x, batch_size=32, verbose=0)
    np.testing.assert_allclose(placed.predict(x, batch_size=32, verbose=0), expected, atol=1e-5)
    assert len(pushed) == 12 * (2 if make in (two_towers, Chained, Regularized) else 1)
    if make is Tied:
        assert not any(pushed)
    elif make is Regularized:
        assert sum(pushed) == 12
    elif make is Chained:
        assert sum(pushed) >= 12
    else:
        assert all(pushed)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
        lambda: keras.optimizers.RMSprop(0.01, global_clipnorm=0.1),
    ],
)
def test_rows_in_every_batch_or_no_batch_train_as_in_keras(make_strategy, make_optimizer):
    def compile_model(model):
        model.compile(make_optimizer(), "mse")

    alone, placed = both(embedded, compile_model, make_strategy(staleness=0))
    ids = np.concatenate([IDS[:, :4] % 4, np.full((ROWS, 2), VOCABULARY - 1, np.int32)], axis=1)
    ids[::4, 0] = np.arange(ROWS // 4) % 4
    assert all(len(np.unique(ids[begin : begin + 24])) == 5 for begin in range(0, ROWS, 24))
    for each in (alone, placed):
        each.fit(ids, TARGET, batch_size=24, epochs=3, shuffle=False, verbose=0)
    assert_same_weights(alone, placed)


def test_a_gradient_round_of_two_workers_updates_rows_as_one_step(make_strategy):
    strategy = make_strategy(mode="sync", round_size=2)

    def compile_model(model):
        model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)

    alone, placed = both(embedded, compile_model, strategy)
    placed.fit(IDS, TARGET, batch_size=12, epochs=2, shuffle=False, verbose=0)
    alone.fit(IDS, TARGET, batch_size=24, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(alone, placed)


def test_rows_in_half_precision_and_asynchronous_steps_learn(make_strategy):
    with make_strategy().scope():
        model = embedded()
    inner = keras.optimizers.Adam(0.05)
    model.compile(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**14),
        "mse",
        steps_per_execution=2,
    )
    losses = model.fit(IDS, TARGET, batch_size=8, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2


def test_out_of_range_ids_raise_and_name_the_layer(make_strategy):
    with make_strategy().scope():
        model = embedded()
    model.compile("sgd", "mse")
    with pytest.raises(InvalidArgumentError, match=r"'words' must be less than input_dim=60.* 61"):
        model.fit(np.full((8, 6), 61), np.zeros((8, 1)), verbose=0)
