"""Keras models trained on mirrored replicas; `test_keras.py` runs it on each back end."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.adapters.keras_training.mirrored_trainer import ReplicaModelSteps
from headrace.errors import FailedPreconditionError

# Warnings that Keras itself causes, also when it saves a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = 23
X = np.random.default_rng(7).random((ROWS, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype(np.float32)


class Rows(keras.metrics.Metric):
    """Metric that counts rows; exact training and evaluation count each row once."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.count + 0.0


class Largest(keras.metrics.Metric):
    """A metric whose variable is not a sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def result(self):
        return self.value + 0.0


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(5, activation=lambda x: keras.ops.tanh(x))
        self.last = keras.layers.Dense(1, kernel_regularizer="l2", activity_regularizer="l2")

    def call(self, x):
        return self.last(self.first(x))


def test_clear_caches_drops_all_cached_properties_of_a_model():
    model = sequential()
    model.compile("sgd", "mse")
    steps = ReplicaModelSteps(model, hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]))
    cached = {
        name
        for name, value in vars(ReplicaModelSteps).items()
        if isinstance(value, functools.cached_property)
    }
    for name in cached:
        getattr(steps, name)
    assert cached <= vars(steps).keys()
    steps.clear_caches()
    assert not cached & vars(steps).keys()


def sequential():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(1)]
    )


def mirrored(replicas):
    return hr.distribute.MirroredStrategy([f"cpu:{number}" for number in range(replicas)])


def both(make_model, compile_model, replicas):
    """Return two equal models; the second one has several replicas."""
    models = []
    for strategy in (hr.distribute.OneDeviceStrategy(), mirrored(replicas)):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            models.append(make_model())
        compile_model(models[-1])
    return models


def on_replicas(replicas=2, make_model=sequential):
    with mirrored(replicas).scope():
        return make_model()


def assert_same_weights(first, second):
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


def assert_same_history(expected, found):
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5)


# --- the same as on one device --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_model", "replicas", "batch_size"),
    [(sequential, 2, 5), (sequential, 3, 4), (Subclassed, 4, 3)],
)
def test_uneven_shards_and_a_short_last_batch_train_as_one_device(make_model, replicas, batch_size):
    def compile_model(model):
        settings = {"use_ema": True, "weight_decay": 0.01} if replicas == 4 else {}
        optimizer = keras.optimizers.SGD(0.02, momentum=0.9, clipnorm=0.5, **settings)
        model.compile(optimizer, "mse", metrics=["mae", Rows(), Largest()])

    alone, placed = both(make_model, compile_model, replicas)
    data = hr.Dataset.from_tensor_slices((X, Y)).batch(batch_size)
    expected = alone.fit(
        hr.keras.dataset(data), epochs=3, validation_data=hr.keras.dataset(data), verbose=0
    )
    found = placed.fit(data, epochs=3, validation_data=data, verbose=0)
    assert_same_history(expected.history, found.history)
    assert found.history["rows"] == found.history["val_rows"] == [ROWS] * 3
    assert_same_weights(alone, placed)
    np.testing.assert_allclose(
        placed.evaluate(X, Y, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        placed.predict(data, verbose=0), alone.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_losses_with_sample_weights_apply_their_reduction(reduction):
    def compile_model(model):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.005), loss, weighted_metrics=["mae"])

    alone, placed = both(Subclassed, compile_model, 2)
    histories = [
        model.fit(
            X, Y, sample_weight=WEIGHTS, batch_size=5, epochs=2, shuffle=False, verbose=0
        ).history
        for model in (alone, placed)
    ]
    assert_same_history(*histories)
    assert_same_weights(alone, placed)


def test_losses_of_different_reductions_are_mixed():
    def make_model():
        inputs = keras.Input((6,))
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
        return keras.Model(inputs, dict(zip("ab", outputs, strict=True)))

    def compile_model(model):
        losses = {"a": keras.losses.MeanSquaredError(reduction="sum"), "b": "mae"}
        model.compile(keras.optimizers.SGD(0.005), losses, loss_weights={"a": 0.5, "b": 2.0})

    alone, placed = both(make_model, compile_model, 3)
    labels = {"a": Y, "b": 2 * Y}
    histories = [
        model.fit(X, labels, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        for model in (alone, placed)
    ]
    assert_same_history(*histories)
    assert_same_weights(alone, placed)


def test_class_weights_and_a_validation_split():
    labels = (Y[:, 0] > 3).astype(np.int32)

    def compile_model(model):
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])

    def make_model():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])

    alone, placed = both(make_model, compile_model, 2)
    settings = {"class_weight": {0: 1.0, 1: 3.0}, "validation_split": 0.25, "batch_size": 5}
    histories = [
        model.fit(X, labels, epochs=2, shuffle=False, verbose=0, **settings).history
        for model in (alone, placed)
    ]
    assert_same_history(*histories)
    assert_same_weights(alone, placed)


def test_masked_sequences_train_as_one_device():
    ids = np.random.default_rng(2).integers(0, 4, (9, 5))
    labels = ids[..., None].astype(np.float32)

    def make_model():
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.Dense(1)]
        )

    alone, placed = both(make_model, lambda model: model.compile("sgd", "mse"), 2)
    histories = [
        model.fit(ids, labels, batch_size=4, shuffle=False, verbose=0).history
        for model in (alone, placed)
    ]
    assert_same_history(*histories)
    assert_same_weights(alone, placed)


def test_a_loss_scale_in_half_precision_works():
    def compile_model(model):
        inner = keras.optimizers.SGD(0.05)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10), "mse")

    alone, placed = both(sequential, compile_model, 2)
    for model in (alone, placed):
        model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    assert_same_weights(alone, placed)


# --- state of individual replicas -----------------------------------------------------------------


def test_batch_normalization_has_the_moments_of_each_replica():
    momentum, epsilon, rate = 0.8, 1e-3, 0.1
    x = X[:5, :1]
    with mirrored(2).scope():
        norm = keras.layers.BatchNormalization(
            momentum=momentum, epsilon=epsilon, center=False, scale=False
        )
        scale = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), norm, scale])
    model.compile(keras.optimizers.SGD(rate), "mse")
    loss = model.fit(x, Y[:5], batch_size=5, shuffle=False, verbose=0).history["loss"][0]

    mean, variance, gradient, expected_loss = 0.0, 1.0, 0.0, 0.0
    means, variances = [], []
    for begin, end in ((0, 2), (2, 5)):
        part, labels = x[begin:end], Y[begin:end]
        means.append(part.mean())
        variances.append(part.var())
        outputs = (part - part.mean()) / np.sqrt(part.var() + epsilon)
        error = outputs - labels
        gradient += 2 * (error * outputs).sum() / 5
        expected_loss += (error**2).sum() / 5
    shares = np.array([2 / 5, 3 / 5])
    mean = momentum * mean + (1 - momentum) * (shares @ means)
    variance = momentum * variance + (1 - momentum) * (shares @ variances)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    kernel = keras.ops.convert_to_numpy(scale.kernel.value)
    np.testing.assert_allclose(kernel, [[1 - rate * gradient]], rtol=1e-5)
    values = [keras.ops.convert_to_numpy(each) for each in norm.non_trainable_variables]
    np.testing.assert_allclose(values, [[mean], [variance]], rtol=1e-5)


def test_replicas_have_different_dropout_masks_and_seeds_advance():
    with mirrored(2).scope():
        drop = keras.layers.Dropout(0.5, seed=3)
        scale = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((64,)), drop, scale])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(np.ones((2, 64)), np.ones((2, 1)), batch_size=2, verbose=0)
    # A unit is dropped by no replica, by one, or by both.
    kernel = keras.ops.convert_to_numpy(scale.kernel.value)[:, 0]
    assert len(np.unique(kernel.round(4))) == 3
    (seed,) = [each for each in model.non_trainable_variables if "seed" in each.path]
    assert keras.ops.convert_to_numpy(seed.value).tolist() == [3, 1]
    model.fit(np.ones((4, 64)), np.ones((4, 1)), batch_size=2, epochs=3, verbose=0)
    assert keras.ops.convert_to_numpy(seed.value).tolist() == [3, 7]


def test_counters_are_summed_over_replicas():
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.rows = self.add_weight(shape=(), dtype="int32", trainable=False, name="rows")

        def call(self, x):
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int32"))
            return x

    with mirrored(3).scope():
        counting = Counting()
        model = keras.Sequential([keras.Input((6,)), counting, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=5, verbose=0)
    assert int(keras.ops.convert_to_numpy(counting.rows.value)) == ROWS


# --- callbacks and custom steps -------------------------------------------------------------------


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ended, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.losses.append(float(logs["loss"]))


def test_callbacks_see_batches_set_the_rate_and_stop_training(tmp_path):
    model = on_replicas()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    recorder, kept = Recorder(), []
    callbacks = [
        recorder,
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 if epoch == 0 else 0.0),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: kept.append(model.get_weights())
        ),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e-4, start_from_epoch=1),
    ]
    history = model.fit(
        X, Y, batch_size=5, epochs=50, callbacks=callbacks, shuffle=False, verbose=0
    ).history
    assert len(history["loss"]) == 3
    assert recorder.ended == [0, 1, 2, 3, 4] * 3
    assert recorder.losses[4::5] == pytest.approx(history["loss"])
    assert np.array_equal(kept[0][0], kept[1][0]), "at the rate 0 nothing changes"
    other = sequential()
    other.load_weights(tmp_path / "1.weights.h5")
    assert np.array_equal(other.get_weights()[0], kept[0][0])


def test_steps_per_execution_equals_that_of_keras():
    model = on_replicas()
    model.compile("sgd", "mse", metrics=[Rows()], steps_per_execution=2)
    recorder = Recorder()
    if keras.backend.backend() == "torch":
        with pytest.raises(ValueError, match="must be 1 with the PyTorch backend"):
            model.fit(X, Y, verbose=0)
        return
    history = model.fit(X, Y, batch_size=5, callbacks=[recorder], verbose=0).history
    assert history["rows"] == [ROWS]
    assert len(recorder.ended) == 3


def test_epochs_with_a_number_of_steps_continue_in_the_data():
    model = on_replicas(3)
    model.compile("sgd", "mse", metrics=[Rows()])
    data = hr.Dataset.from_tensor_slices((X, Y)).repeat().batch(4)
    history = model.fit(data, epochs=2, steps_per_epoch=5, verbose=0).history
    assert history["rows"] == [20.0] * 2
    with pytest.raises(ValueError, match="infinite"):
        model.fit(data, verbose=0)


def test_a_dataset_creator_can_make_the_dataset():
    model = on_replicas(2)
    model.compile("sgd", "mse", metrics=[Rows()])

    def dataset_fn(context):
        assert context.num_replicas_in_sync == 2
        size = context.get_per_replica_batch_size(8)
        return hr.Dataset.from_tensor_slices((X, Y)).batch(size)

    history = model.fit(hr.keras.DatasetCreator(dataset_fn), epochs=2, verbose=0).history
    assert history["rows"] == [ROWS] * 2


class OwnStep(keras.Model):
    """A model with a `train_step` that returns an additional log."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        found = super().train_step(*args)
        logs, rest = found if isinstance(found, tuple) else (found, ())
        x = args[-1][0]
        logs = {**logs, "mean": keras.ops.mean(x)}
        return (logs, rest) if rest else logs


def test_logs_of_a_train_step_are_means_over_rows():
    def compile_model(model):
        model.compile("sgd", "mse")

    alone, placed = both(OwnStep, compile_model, 2)
    logs = [
        model.fit(X[:5], Y[:5], batch_size=5, shuffle=False, verbose=0).history
        for model in (alone, placed)
    ]
    assert_same_history(*logs)
    assert logs[1]["mean"][0] == pytest.approx(float(X[:5].mean()), rel=1e-5)


def test_a_train_step_that_assigns_weights_itself_is_rejected():
    class Wrong(OwnStep):
        def train_step(self, *args):
            if keras.backend.backend() == "jax":
                logs, (weights, *rest) = super().train_step(*args)
                return logs, ([each * 2 for each in weights], *rest)
            logs = super().train_step(*args)
            self.dense.kernel.assign(self.dense.kernel * 2)
            return logs

    model = on_replicas(2, Wrong)
    model.compile("sgd", "mse")
    with pytest.raises(FailedPreconditionError, match="changes weights without"):
        model.fit(X, Y, verbose=0)


# --- compiling, single batches, existing models ---------------------------------------------------


def test_single_batches_train_as_on_one_device():
    alone, placed = both(sequential, lambda model: model.compile("adam", "mse"), 2)
    for begin in (0, 5, 10):
        losses = [
            model.train_on_batch(X[begin : begin + 5], Y[begin : begin + 5])
            for model in (alone, placed)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert placed.test_on_batch(X, Y) == pytest.approx(alone.test_on_batch(X, Y), rel=1e-5)
    assert_same_weights(alone, placed)


def test_frozen_layers_and_a_new_compile_apply():
    model = on_replicas()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(X, Y, verbose=0)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    before = model.get_weights()
    history = model.fit(X, Y, verbose=0).history
    after = model.get_weights()
    assert "mae" in history
    assert np.array_equal(before[0], after[0])
    assert not np.array_equal(before[2], after[2])


def test_an_existing_model_can_get_replicas():
    class Parts(keras.layers.Layer):
        def call(self, x):
            sizes.append(x.shape[0])
            return x

    sizes = []
    model = keras.Sequential([keras.Input((6,)), Parts(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    assert hr.keras.distribute(model, mirrored(1)) is model
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    assert ROWS in sizes
    sizes.clear()
    assert hr.keras.distribute(model, mirrored(2)) is model
    model.fit(X, Y, batch_size=ROWS, verbose=0)
    assert {11, 12} <= set(sizes)
    assert ROWS not in sizes
    with pytest.raises(FailedPreconditionError, match="belongs to"):
        hr.keras.distribute(model, mirrored(2))
    with pytest.raises(TypeError, match="MirroredStrategy"):
        hr.keras.distribute(model, "cpu:0")


def test_an_uncompiled_model_raises_the_error_of_keras():
    with pytest.raises(ValueError, match="compile"):
        on_replicas().fit(X, Y)
