"""Keras models trained on parameter servers; `test_keras.py` runs it on each back end."""

from __future__ import annotations

import contextlib
import threading
import time

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError

# Warnings that Keras itself causes, also when it saves a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = 96
X = np.random.default_rng(7).random((ROWS, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def cluster():
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2, processes=False) as cluster:
        yield cluster


@pytest.fixture
def make_strategy(cluster):
    made = []

    def make(**settings):
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver, **settings)
        made.append(hr.coordinator.ClusterCoordinator(strategy))
        return strategy

    yield make
    for coordinator in made:
        coordinator.close()
        coordinator.strategy.close()


class Rows(keras.metrics.Metric):
    """Metric that counts rows; exact training and evaluation count each row once."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.count + 0.0


class Residual(keras.Model):
    def __init__(self, units, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(units, activation=lambda x: keras.ops.tanh(x))
        self.norm = keras.layers.BatchNormalization(momentum=0.8)
        self.drop = keras.layers.Dropout(rate, seed=3)
        self.last = keras.layers.Dense(1, kernel_regularizer="l2")

    def call(self, x, training=False):
        return self.last(self.drop(self.norm(self.first(x), training=training), training=training))


def sequential():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(1)]
    )


def functional():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    shared = keras.layers.Dense(4, activation="relu")
    joined = keras.layers.Concatenate()([shared(left), shared(right)])
    return keras.Model(
        {"left": left, "right": right},
        {"sum": keras.layers.Dense(1, name="s")(joined), "sign": keras.layers.Dense(1)(joined)},
    )


def subclassed():
    return Residual(5)


def optimizer(name):
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
        "adam": lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.9)
        ),
        "adamw": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.8),
    }
    return made[name]()


def both(make_model, compile_model, strategy):
    """Return two equal models; the second one trains under the strategy."""
    keras.utils.set_random_seed(5)
    alone = make_model()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        placed = make_model()
    for model in (alone, placed):
        compile_model(model)
    return alone, placed


def assert_same_weights(first, second, tolerance=1e-5):
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)


# --- the same as in one process -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("make", [sequential, subclassed])
def test_sequential_steps_train_as_in_keras(make_strategy, make, name):
    partitioner = hr.distribute.partitioners.FixedShardsPartitioner(2)
    strategy = make_strategy(staleness=0, variable_partitioner=partitioner)

    def compile_model(model):
        model.compile(optimizer(name), "mse", metrics=["mae", Rows()])

    alone, placed = both(make, compile_model, strategy)
    data = hr.Dataset.from_tensor_slices((X, Y)).batch(10)
    expected = alone.fit(hr.keras.dataset(data), epochs=3, verbose=0).history
    found = placed.fit(data, epochs=3, verbose=0).history
    assert list(found) == list(expected)
    assert found["rows"] == [ROWS] * 3
    for metric, values in expected.items():
        np.testing.assert_allclose(found[metric], values, rtol=1e-4)
    # The gradient of a bias before BatchNormalization is rounding noise, which Adam amplifies.
    tolerance = 1e-5 if make is sequential else 1e-4
    assert_same_weights(alone, placed, tolerance)
    assert int(np.asarray(placed.optimizer.iterations)) == 30
    outputs = alone.predict(X, verbose=0)
    np.testing.assert_allclose(placed.predict(X, verbose=0), outputs, atol=tolerance)
    of_placed = placed.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    of_alone = alone.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    for metric, value in of_alone.items():
        assert of_placed[metric] == pytest.approx(value, rel=1e-4)


def test_several_inputs_outputs_and_weights_train_as_in_keras(make_strategy):
    strategy = make_strategy(staleness=0)

    def compile_model(model):
        model.compile(
            keras.optimizers.SGD(0.05),
            {"sum": "mse", "sign": keras.losses.BinaryCrossentropy(from_logits=True)},
            loss_weights={"sum": 1.0, "sign": 0.5},
            metrics={"sum": ["mae"]},
            weighted_metrics={"sign": [keras.metrics.BinaryAccuracy(threshold=0.0)]},
        )

    alone, placed = both(functional, compile_model, strategy)
    x = {"left": X[:, :3], "right": X[:, 3:]}
    y = {"sum": Y, "sign": (Y > 3).astype(np.float32)}
    weight = {"sum": np.linspace(0, 1, ROWS, dtype="f4"), "sign": np.ones(ROWS, "f4")}
    for each in (alone, placed):
        each.fit(x, y, batch_size=16, epochs=2, shuffle=False, sample_weight=weight, verbose=0)
    assert_same_weights(alone, placed)
    outputs, expected = placed.predict(x, verbose=0), alone.predict(x, verbose=0)
    assert sorted(outputs) == ["sign", "sum"]
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, atol=1e-5)


def test_a_gradient_round_of_two_workers_equals_one_step_of_a_double_batch(make_strategy):
    strategy = make_strategy(mode="sync", round_size=2)

    def compile_model(model):
        model.compile(keras.optimizers.Adam(0.02), "mse")

    alone, placed = both(sequential, compile_model, strategy)
    placed.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    alone.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    assert_same_weights(alone, placed)
    assert int(np.asarray(placed.optimizer.iterations)) == 18


def test_a_custom_train_step_is_used(make_strategy):
    class Doubled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, *args):
            logs = super().train_step(*args)
            (found, *rest) = logs if isinstance(logs, tuple) else (logs,)
            found = {**found, "twice": 2 * found["loss"]}
            return (found, *rest) if rest else found

    strategy = make_strategy(staleness=0)

    def compile_model(model):
        model.compile(keras.optimizers.SGD(0.05), "mse")

    alone, placed = both(Doubled, compile_model, strategy)
    for each in (alone, placed):
        history = each.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history
        assert sorted(history) == ["loss", "twice"]
    assert_same_weights(alone, placed)


def test_dropout_masks_depend_only_on_the_step(make_strategy):
    def trained(**settings):
        keras.utils.set_random_seed(5)
        with make_strategy(**settings).scope():
            model = Residual(5, rate=0.5)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model

    assert_same_weights(trained(staleness=0), trained(mode="sync", round_size=1))


# --- callbacks ------------------------------------------------------------------------------------


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.losses, self.epochs, self.tested = [], [], [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.losses.append(float(logs["loss"]))

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, float(np.asarray(self.model.optimizer.iterations))))


def test_callbacks_see_each_batch_once_in_order(make_strategy):
    with make_strategy().scope():
        model = sequential()
    model.compile("adam", "mse", steps_per_execution=4)
    recorder = Recorder()
    history = model.fit(X, Y, batch_size=9, epochs=2, callbacks=[recorder], verbose=0).history
    assert recorder.begun == [0, 4, 8] * 2
    assert recorder.ended == [3, 7, 10] * 2
    assert recorder.losses[2::3] == pytest.approx(history["loss"])
    assert recorder.epochs == [(0, 11.0), (1, 22.0)]


def test_callbacks_read_weights_set_the_rate_and_stop_training(make_strategy, tmp_path):
    with make_strategy().scope():
        model = sequential()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    first = model.get_weights()
    rates = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 if epoch == 0 else 0.0),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(model.get_weights())
        ),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e-4, start_from_epoch=1),
    ]
    history = model.fit(X, Y, epochs=50, callbacks=callbacks, shuffle=False, verbose=0).history
    assert len(history["loss"]) < 5
    assert not np.array_equal(first[0], rates[0][0])
    assert np.array_equal(rates[0][0], rates[1][0]), "at the rate 0 nothing changes"
    other = sequential()
    other.load_weights(tmp_path / "1.weights.h5")
    assert np.array_equal(other.get_weights()[0], rates[0][0])
    assert len((tmp_path / "log.csv").read_text().splitlines()) == len(history["loss"]) + 1


def test_weights_set_between_two_fits_are_used(make_strategy):
    with make_strategy().scope():
        model = sequential()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, verbose=0)
    zeros = [np.zeros_like(each) for each in model.get_weights()]
    model.set_weights(zeros)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(float((Y**2).mean()), rel=1e-5)
    assert not np.any(model.predict(X, verbose=0))


def test_an_error_of_a_callback_leaves_the_model_usable(make_strategy):
    with make_strategy().scope():
        model = sequential()
    model.compile("sgd", "mse")

    def fail(batch, logs):
        raise KeyError("mine")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(KeyError, match="mine"):
        model.fit(X, Y, callbacks=[callback], verbose=0)
    assert len(model.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2


def test_frozen_layers_and_a_new_compile_reach_the_workers(make_strategy):
    with make_strategy(staleness=0).scope():
        model = sequential()
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


def test_gradients_in_half_precision_are_scaled(make_strategy):
    with make_strategy().scope():
        inner = keras.optimizers.SGD(0.05)
        model = sequential()
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**14), "mse")
    losses = model.fit(X, Y, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2


# --- data -----------------------------------------------------------------------------------------


def test_epochs_with_a_number_of_steps_continue_in_the_data(make_strategy):
    with make_strategy().scope():
        model = sequential()
    model.compile("sgd", "mse", metrics=[Rows()])
    data = hr.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    history = model.fit(data, epochs=3, steps_per_epoch=5, verbose=0).history
    assert history["rows"] == [40.0] * 3
    with pytest.raises(ValueError, match="infinite, and `steps_per_epoch`"):
        model.fit(data, verbose=0)
    with pytest.raises(ValueError, match="infinite"):
        model.evaluate(data, verbose=0)
    assert model.evaluate(data, steps=3, return_dict=True, verbose=0)["rows"] == 24.0


def test_validation_counts_each_row_once(make_strategy):
    with make_strategy().scope():
        model = sequential()
    model.compile("sgd", "mse", metrics=[Rows()], steps_per_execution=2)
    history = model.fit(X, Y, epochs=4, validation_split=0.25, validation_freq=2, verbose=0).history
    assert history["rows"] == [72.0] * 4
    assert history["val_rows"] == [24.0] * 2


def test_evaluation_is_exact_in_any_number_of_shards(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        model = sequential()
    recorder = Recorder()
    for shards, calls in [(None, 10), ("auto", 10), (0, 10), (3, 3), (20, 10)]:
        model.compile("sgd", "mse", metrics=[Rows()], pss_evaluation_shards=shards)
        recorder.tested.clear()
        found = model.evaluate(X, Y, 10, callbacks=[recorder], return_dict=True, verbose=0)
        assert (found["rows"], len(recorder.tested)) == (ROWS, calls)
    for wrong, kind in [("some", TypeError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]:
        with pytest.raises(kind, match=r"`pss_evaluation_shards` .*; None, 'auto' and 0"):
            model.compile("sgd", "mse", pss_evaluation_shards=wrong)
    other = sequential()
    other.compile("sgd", "mse", metrics=[Rows()])
    hr.keras.distribute(other, strategy, pss_evaluation_shards=2)
    recorder.tested.clear()
    assert other.evaluate(X, Y, 10, callbacks=[recorder], verbose=0)[1] == ROWS
    assert len(recorder.tested) == 2


def test_predictions_come_in_order(make_strategy):
    with make_strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
    rows = np.arange(1000, dtype=np.float32)[:, None]
    assert np.array_equal(model.predict(rows, batch_size=7, verbose=0), 2 * rows)


# --- errors ---------------------------------------------------------------------------------------


def test_unsupported_models_and_arguments_are_rejected_by_name(make_strategy):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), lambda *a, **k: keras.ops.ones(()), name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return self.value + 0.0

        def reset_state(self):
            self.value.assign(1.0)

    with make_strategy().scope():
        model, measured = sequential(), sequential()
        bounded = keras.Sequential([keras.layers.Dense(1, kernel_constraint="non_neg")])
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
            method(X, Y, verbose=0)
    model.compile(keras.optimizers.Lamb(), "mse")
    with pytest.raises(FailedPreconditionError, match=r"Lamb.*They run Adadelta"):
        model.fit(X, Y, verbose=0)
    measured.compile("sgd", "mse", metrics=[Largest()])
    with pytest.raises(FailedPreconditionError, match=r"metric 'largest' .*start at zero"):
        measured.fit(X, Y, verbose=0)
    bounded.compile("sgd", "mse")
    with pytest.raises(FailedPreconditionError, match="constraint"):
        bounded.fit(X, Y, verbose=0)
    model.compile("sgd", "mse")
    for method in (model.fit, model.evaluate):
        for unlabelled in (X, hr.Dataset.from_tensor_slices((X,)).batch(8)):
            with pytest.raises(ValueError, match=r"no labels.*\(x, y\)"):
                method(unlabelled, verbose=0)
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 6"):
        model.fit(X[:, :4], Y, verbose=0)
    with pytest.raises(FailedPreconditionError, match=r"hr\.keras\.distribute"):
        model.train_on_batch(X, Y)
    with pytest.raises(TypeError, match="ParameterServerStrategy"):
        hr.keras.distribute(model, "cluster")
    assert len(model.fit(X, Y, verbose=0).history["loss"]) == 1


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(6)

    def call(self, x):
        return self.last(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, x, y_pred, sample_weight, training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, x, y_pred, sample_weight)


def test_a_loss_without_labels_works_until_the_strategy_is_closed(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        model = Autoencoder()
    model.compile("sgd", "mse", metrics=["mae"])
    found = model.fit(X, epochs=3, verbose=0).history["loss"]
    assert found[-1] < found[0]
    score = model.evaluate(X, verbose=0)
    strategy.close()
    assert model.evaluate(X, verbose=0) == pytest.approx(score, rel=1e-5)  # in this process
    with pytest.raises(FailedPreconditionError, match="its strategy is closed"):
        model.fit(X, verbose=0)


def test_models_of_one_name_and_several_coordinators_work_in_sequence(make_strategy):
    strategy = make_strategy(staleness=0)
    losses = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.Input((6,)), keras.layers.Dense(1, name="of_a_trial")]
            model = keras.Sequential(layers, name="trial")
        model.compile(keras.optimizers.Adam(0.05), "mse")
        found = model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
        losses.append(found.history["loss"])
    assert losses[0] == losses[1]
    hr.coordinator.ClusterCoordinator(strategy).close()
    assert model.fit(X, Y, verbose=0).history["loss"][0] < losses[1][0]


class FirstLabel(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true[0, 0])


def test_validation_steps_start_at_the_beginning_of_the_data(make_strategy):
    with make_strategy().scope():
        model = sequential()
    model.compile("sgd", "mse", metrics=[FirstLabel("first")])
    data = hr.Dataset.from_tensor_slices((X, Y)).batch(10)
    for validation in (data, hr.keras.dataset(data), (X, Y)):
        history = model.fit(
            data,
            epochs=3,
            validation_data=validation,
            validation_steps=1,
            validation_batch_size=10 if isinstance(validation, tuple) else None,
            verbose=0,
        ).history
        assert history["val_first"] == pytest.approx([float(Y[0, 0])] * 3)


def test_predictions_of_several_outputs_keep_their_structure(make_strategy):
    with make_strategy().scope():
        inputs = keras.Input((6,))
        outputs = [keras.layers.Dense(1)(inputs), keras.layers.Dense(2)(inputs)]
        model = keras.Model(inputs, outputs)
    found = model.predict(X, batch_size=10, verbose=0)
    assert isinstance(found, list)
    assert [each.shape for each in found] == [(ROWS, 1), (ROWS, 2)]
    np.testing.assert_allclose(found[1], keras.ops.convert_to_numpy(model(X)[1]), atol=1e-5)


class Clipped(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        result = super().train_step(*args)
        if keras.backend.backend() == "torch":
            self.dense.kernel.assign(keras.ops.clip(self.dense.kernel, -0.1, 0.1))
            return result
        logs, (weights, *rest) = result
        return logs, ([keras.ops.clip(each, -0.1, 0.1) for each in weights], *rest)


def test_a_train_step_that_assigns_weights_itself_is_rejected(make_strategy):
    with make_strategy().scope():
        model = Clipped()
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(FailedPreconditionError, match="changes weights without"):
        model.fit(X, Y, verbose=0)


def test_an_existing_model_can_be_distributed(make_strategy):
    model = sequential()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(X, Y, verbose=0)
    before = model.evaluate(X, Y, verbose=0)
    assert hr.keras.distribute(model, make_strategy()) is model
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(before, rel=1e-5)
    model.fit(X, Y, epochs=5, verbose=0)
    assert model.evaluate(X, Y, verbose=0) < before
    with pytest.raises(FailedPreconditionError, match="belongs to"):
        hr.keras.distribute(model, hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"]))


# --- optimizers that were trained without servers -------------------------------------------------


def test_optimizer_slots_move_to_the_servers_and_into_files(make_strategy, tmp_path):
    def make():
        keras.utils.set_random_seed(5)
        model = sequential()
        rate = keras.optimizers.schedules.InverseTimeDecay(0.05, 5, 1.0)
        model.compile(keras.optimizers.Nadam(rate, weight_decay=0.01), "mse")
        return model

    def fit(model):
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        return model.get_weights()

    def saved(model):
        model.save(tmp_path / "model.keras")
        return keras.models.load_model(tmp_path / "model.keras")

    def assert_close(found, expected):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

    alone, moved = make(), make()
    first, second, third = (fit(alone) for _ in range(3))
    fit(moved)
    partitioner = hr.distribute.partitioners.FixedShardsPartitioner(2)
    strategy = make_strategy(staleness=0, variable_partitioner=partitioner)
    hr.keras.distribute(moved, strategy)
    assert_close(fit(moved), second)
    assert int(np.asarray(moved.optimizer.iterations)) == 20
    assert_close(fit(saved(moved)), third)
    assert_close(fit(moved), third)
    # An optimizer made in the scope has no slots in this process until it is saved.
    with strategy.scope():
        made = make()
    assert_close(fit(made), first)
    assert_close(fit(saved(made)), second)


def test_optimizer_changes_between_two_fits_apply_as_in_keras(make_strategy, tmp_path):
    path = tmp_path / "model.weights.h5"

    def train(model):
        yield
        model.optimizer.clipnorm = 0.01
        yield
        model.optimizer.learning_rate = keras.optimizers.schedules.InverseTimeDecay(0.1, 5, 1.0)
        yield
        model.save_weights(path)
        yield
        model.optimizer.iterations.assign(3)
        yield
        model.load_weights(path)
        yield

    def weights(strategy):
        keras.utils.set_random_seed(5)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = sequential()
        model.compile(keras.optimizers.Adam(0.05), "mse")
        for steps, _ in enumerate(train(model), 1):
            model.train_function = None  # Keras caches a compiled function with the settings
            model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
            expected = {5: 13, 6: 40}.get(steps, steps * 10)
            assert int(np.asarray(model.optimizer.iterations)) == expected
            yield model.get_weights()

    for found, expected in zip(weights(make_strategy(staleness=0)), weights(None), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_changed_optimizer_continues_in_functions(make_strategy):
    strategy = make_strategy(staleness=0)
    with strategy.scope():
        model = sequential()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    coordinator = hr.coordinator.ClusterCoordinator(strategy)

    def step(model):
        gradients = [keras.ops.ones_like(each.value) for each in model.trainable_variables]
        model.optimizer.apply(gradients, model.trainable_variables)

    coordinator.schedule(step, (model,)).fetch(60)
    before = model.get_weights()
    model.optimizer.learning_rate = 0.0
    model.optimizer.momentum = 0.0
    coordinator.schedule(step, (model,)).fetch(60)
    assert int(np.asarray(model.optimizer.iterations)) == 12
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


# --- failures -------------------------------------------------------------------------------------


def wait_for(condition, seconds=300):  # workers import Keras first, which is slow on a busy machine
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.timeout(400)
def test_killed_workers_and_servers_neither_lose_nor_repeat_a_step():
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver, replication=2)
        with strategy.scope():
            model = sequential()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Rows()])
        recorder = Recorder()

        def kill():
            wait_for(lambda: len(recorder.ended) > 20)
            cluster.kill("worker", 0)
            wait_for(lambda: len(recorder.ended) > 60)
            cluster.kill("ps", 1)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            data = hr.Dataset.from_tensor_slices((X, Y)).repeat(20).batch(10)
            history = model.fit(
                data, epochs=2, validation_data=(X, Y), callbacks=[recorder], verbose=0
            ).history
        finally:
            killer.join()
        assert history["rows"] == [20.0 * ROWS] * 2
        assert history["val_rows"] == [ROWS] * 2
        assert recorder.ended == list(range(192)) * 2
        assert int(np.asarray(model.optimizer.iterations)) == 384
        strategy.close()
