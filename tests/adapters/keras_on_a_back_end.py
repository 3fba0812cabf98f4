"""`hr.keras.dataset` on the back end that KERAS_BACKEND names; `test_keras.py` runs it."""

from __future__ import annotations

import contextlib
import doctest
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections import namedtuple
from dataclasses import dataclass

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.adapters import keras_dataset
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UserFunctionError

# A warning that Keras itself causes with PyTorch tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: object


class Identity(keras.layers.Layer):
    """The identity, so that predictions show the inputs."""

    def call(self, inputs):
        return inputs


def lines(count: int) -> hr.Dataset:
    x = np.arange(count, dtype=np.float32)[:, None]
    return hr.Dataset.from_tensor_slices((x, 3 * x + 1))


def linear(model: keras.Model | None = None) -> keras.Model:
    model = model or keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
    # Eager, because compiling takes longer than the few steps of these tests.
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return model


class CountBatches(keras.callbacks.Callback):
    """Counts the training batches of each epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.called = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[-1] += 1


class RecordStates(keras.callbacks.Callback):
    """Records a state of the training data after each batch."""

    def __init__(self, data, states):
        super().__init__()
        self.data = data
        self.states = states

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(json.loads(json.dumps(self.data.get_state())))


def batches_per_epoch(data, model=None, **options) -> list[int]:
    count = CountBatches()
    (model or linear()).fit(data, verbose=0, callbacks=[count], **options)
    return count.epochs


def record_rows(dataset: hr.Dataset, seen: list) -> hr.Dataset:
    def note(*batch):
        seen.append(batch[0][:, 0].astype(int).tolist())
        return batch if len(batch) > 1 else batch[0]

    return dataset.map(note)


# --- numbers of batches, epochs -------------------------------------------------------------------


def test_an_epoch_reads_the_dataset_once_with_its_last_partial_batch():
    assert batches_per_epoch(hr.keras.dataset(lines(10).batch(4)), epochs=3) == [3, 3, 3]
    assert batches_per_epoch(
        hr.keras.dataset(lines(10).batch(4, drop_remainder=True)), epochs=2
    ) == [2, 2]
    assert batches_per_epoch(hr.keras.adapter(lines(4).batch(4)), epochs=2) == [1, 1]
    assert len(hr.keras.dataset(lines(10).batch(4))) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_batch_is_read_once_per_epoch_although_one_builds_the_model(prefetch):
    seen: list = []
    data = hr.keras.dataset(record_rows(lines(12).batch(4), seen), prefetch=prefetch)
    assert batches_per_epoch(data, epochs=2) == [3, 3]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2


def test_each_epoch_is_shuffled_by_the_dataset():
    seen: list = []
    dataset = record_rows(lines(16).shuffle(16, seed=1).batch(16), seen)
    batches_per_epoch(hr.keras.dataset(dataset, prefetch=0), epochs=3)
    again: list = []
    batches_per_epoch(
        hr.keras.dataset(record_rows(lines(16).shuffle(16, seed=1).batch(16), again)), epochs=3
    )
    assert seen == again
    # A model that is built from a single batch reads an additional epoch.
    assert len({tuple(batch) for batch in seen}) == len(seen) >= 3
    fixed: list = []
    same = lines(16).shuffle(16, seed=1, reshuffle_each_iteration=False).batch(8)
    batches_per_epoch(hr.keras.dataset(record_rows(same, fixed), prefetch=0), epochs=2)
    assert fixed[:2] == fixed[2:]


def test_epochs_of_an_infinite_dataset_continue_one_iteration():
    seen: list = []
    data = hr.keras.dataset(record_rows(lines(8).batch(4).repeat(), seen), prefetch=0)
    assert data.num_batches is None
    assert batches_per_epoch(data, epochs=3, steps_per_epoch=3) == [3, 3, 3]
    assert seen == ([[0, 1, 2, 3], [4, 5, 6, 7]] * 5)[:9]


def test_steps_sets_the_epoch_length_if_the_cardinality_is_unknown():
    unknown = lines(10).filter(lambda x, y: True).batch(4)
    assert hr.keras.dataset(unknown).num_batches is None
    assert batches_per_epoch(hr.keras.dataset(unknown, steps=3), epochs=2) == [3, 3]
    assert batches_per_epoch(hr.keras.dataset(unknown, steps=2), epochs=2) == [2, 2]
    with pytest.warns(UserWarning, match="ran out of data"):
        assert batches_per_epoch(hr.keras.dataset(unknown), epochs=1)[0] >= 3


def test_steps_per_epoch_beyond_the_data_gives_the_warning_of_keras():
    with pytest.warns(UserWarning, match="ran out of data"):
        batches_per_epoch(hr.keras.dataset(lines(8).batch(4)), epochs=2, steps_per_epoch=3)


def test_fit_evaluate_and_predict_each_read_an_epoch_and_can_alternate():
    seen: list = []
    train = hr.keras.dataset(record_rows(lines(8).batch(4), seen), prefetch=0)
    held: list = []
    test = hr.keras.dataset(record_rows(lines(6).batch(4), held), prefetch=0)
    model = linear()
    assert batches_per_epoch(train, model, epochs=2, validation_data=test) == [2, 2]
    assert held == [[0, 1, 2, 3], [4, 5]] * 2
    model.evaluate(test, verbose=0)
    assert held == [[0, 1, 2, 3], [4, 5]] * 3
    assert model.predict(test, verbose=0).shape == (6, 1)
    model.evaluate(train, verbose=0, steps=1)
    model.evaluate(train, verbose=0)
    assert seen[-2:] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_epoch_continues_after_predict_on_the_same_data():
    data = hr.keras.dataset(lines(20).batch(4), prefetch=0)
    states = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                assert model.predict(data, verbose=0).shape == (20, 1)
            states.append(data.get_state())

    model = linear()
    model.fit(data, epochs=2, verbose=0, callbacks=[Look()])
    assert len(states) == 10
    for count, state in enumerate(states, 1):
        rest = hr.keras.dataset(lines(20).batch(4), prefetch=0)
        rest.set_state(state)
        assert next(rest.get_numpy_iterator())[0][0] == 4 * count % 20, count
    steps = {"steps_per_epoch": 2, "validation_data": data, "validation_steps": 1}
    assert batches_per_epoch(data, epochs=2, **steps) == [2, 2]
    abandoned = data.get_numpy_iterator()
    next(abandoned)
    assert batches_per_epoch(data, epochs=2) == [5, 5]
    assert data.get_state()["iterator"] is None


def test_training_learns_and_evaluation_measures_every_row():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.2), "mse", metrics=["mae"])
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 2)).astype(np.float32)
    rows = hr.Dataset.from_tensor_slices((x, x @ np.float32([[2.0], [-1.0]]) + 0.5))
    history = model.fit(hr.keras.dataset(rows.shuffle(64, seed=1).batch(10)), epochs=15, verbose=0)
    assert history.history["loss"][-1] < 0.05 * history.history["loss"][0]
    mine = model.evaluate(hr.keras.dataset(rows.batch(10)), verbose=0)
    theirs = model.evaluate(x, x @ np.float32([[2.0], [-1.0]]) + 0.5, batch_size=10, verbose=0)
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)


# --- elements -------------------------------------------------------------------------------------


def test_predictions_have_the_order_of_the_rows():
    model = keras.Sequential([Identity()])
    rows = np.arange(10, dtype=np.float32)[:, None]
    bare = hr.Dataset.from_tensor_slices(rows).batch(4)
    for dataset in (bare, bare.map(lambda x: (x,)), lines(10).batch(4)):
        made = model.predict(hr.keras.dataset(dataset), verbose=0)
        np.testing.assert_array_equal(made, rows)


def test_inputs_and_labels_may_be_dicts_and_tuples():
    a, b = keras.Input((1,), name="a"), keras.Input((2,), name="b")
    total = keras.layers.Concatenate()([a, b])
    model = keras.Model({"a": a, "b": b}, {"sum": keras.layers.Dense(1, name="sum")(total)})
    model.compile("sgd", {"sum": "mse"}, run_eagerly=True)
    inputs = {"b": np.ones((6, 2), np.float32), "a": np.ones((6, 1), np.float32)}
    labels = {"sum": np.ones((6, 1), np.float32)}
    dataset = hr.Dataset.from_tensor_slices((inputs, labels)).batch(4)
    assert batches_per_epoch(hr.keras.dataset(dataset), model) == [2]
    pairs = hr.Dataset.from_tensor_slices(Pair(inputs, labels)).batch(4)
    assert batches_per_epoch(hr.keras.dataset(pairs), model) == [2]
    only = hr.Dataset.from_tensor_slices(inputs).batch(4)
    assert model.predict(hr.keras.dataset(only), verbose=0)["sum"].shape == (6, 1)
    two = linear(keras.Model([a, b], keras.layers.Dense(1)(total)))
    tuples = dataset.map(lambda x, y: ((x["a"], x["b"]), y["sum"]))
    assert batches_per_epoch(hr.keras.dataset(tuples), two) == [2]


def test_sample_weights_and_class_weights_apply():
    x, y = np.ones((4, 1), np.float32), np.float32([[0], [0], [1], [1]])
    weights = np.float32([0, 0, 1, 1])
    rows = hr.Dataset.from_tensor_slices((x, y, weights)).batch(2)
    weighted = linear().evaluate(hr.keras.dataset(rows), verbose=0)
    np.testing.assert_allclose(weighted, linear().evaluate(x, y, 2, 0, weights), rtol=1e-6)
    plain = hr.Dataset.from_tensor_slices((x, y)).batch(2)
    by_class = hr.keras.dataset(plain, class_weight={0: 0.0, 1: 1.0})
    np.testing.assert_allclose(linear().evaluate(by_class, verbose=0), weighted, rtol=1e-6)
    one_hot = hr.Dataset.from_tensor_slices((x, np.eye(2, dtype="f4")[[0, 0, 1, 1]])).batch(4)
    (batch,) = hr.keras.dataset(one_hot, class_weight={0: 5.0}).get_numpy_iterator()
    assert batch[2].tolist() == [5, 5, 1, 1]
    with pytest.raises(InvalidArgumentError, match="`class_weight` requires elements"):
        batches_per_epoch(hr.keras.dataset(rows, class_weight={0: 1.0}))


@pytest.mark.parametrize("dtype", ["int8", "int64", "float64", "float16", "bool", ">f4"])
def test_other_dtypes_are_accepted(dtype):
    x = np.ones((4, 1)).astype(dtype)
    dataset = hr.Dataset.from_tensor_slices((x, x)).batch(4)
    assert batches_per_epoch(hr.keras.dataset(dataset)) == [1]


def test_arrays_are_passed_to_keras_without_a_copy():
    data = hr.keras.dataset(lines(4).batch(4))
    batch = (np.ones((4, 1), np.float32), np.ones(4, np.float32))
    assert data._prepare_batch(batch) is batch
    data._batches = lambda: iter([batch])
    assert next(data.get_jax_iterator())[0] is batch[0]
    tensors = next(data.get_torch_dataloader())
    assert type(tensors) is tuple
    if keras.backend.backend() == "torch":
        assert [t.data_ptr() for t in tensors] == [array.ctypes.data for array in batch]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (hr.Dataset.range(4), r"the element is a scalar.*`batch`"),
        (hr.Dataset.from_tensors((np.ones((2, 1)), 1)), r"\[1\] is a scalar.*`batch`"),
        (hr.Dataset.from_tensors((np.ones(2),) * 4), r"4 parts.*\(x, y\)"),
        (hr.Dataset.from_tensors(()), "0 parts"),
        (hr.Dataset.from_tensors(Record(np.ones(2))), "is a Record"),
        (hr.Dataset.from_tensor_slices({"s": np.array(["a", "b"])}).batch(2), r"\['s'\] holds"),
        (hr.Dataset.range(2).map(lambda i: (b"a", i)).batch(2), r"\[0\] holds bytes"),
        (hr.Dataset.range(2).map(lambda i: (i, i)), r"\[0\] is a scalar.*`batch`"),
    ],
)
def test_elements_that_are_no_batches_raise_and_name_the_component(dataset, words):
    with pytest.raises(InvalidArgumentError, match=words):
        batches_per_epoch(hr.keras.dataset(dataset))


def test_wrong_arguments_are_rejected_immediately():
    for wrong in (np.ones(3), [1], None, iter(lines(2))):
        with pytest.raises(TypeError, match="must be a Dataset"):
            hr.keras.dataset(wrong)
    with pytest.raises(ValueError, match="`steps`"):
        hr.keras.dataset(lines(4).batch(2), steps=0)
    with pytest.raises(ValueError, match="`prefetch`"):
        hr.keras.dataset(lines(4).batch(2), prefetch=-1)
    with pytest.raises(TypeError, match="`class_weight`"):
        hr.keras.dataset(lines(4).batch(2), class_weight=[1, 2])
    for wrong in ({"a": 1.0}, {0.5: 1.0}, {0: "much"}):
        with pytest.raises(TypeError, match="`class_weight`"):
            hr.keras.dataset(lines(4).batch(2), class_weight=wrong)
    with pytest.raises(FailedPreconditionError, match="KERAS_BACKEND"):
        hr.keras.dataset(lines(4).batch(2)).get_tf_dataset()


def test_user_errors_propagate_and_the_next_fit_starts_over():
    calls = []

    def fail_once(x, y):
        calls.append(len(x))
        if len(calls) == 2:
            raise ValueError("no")
        return x, y

    data = hr.keras.dataset(lines(12).batch(4).map(fail_once), prefetch=0)
    with pytest.raises(UserFunctionError, match="no"):
        batches_per_epoch(data)
    assert batches_per_epoch(data) == [3]


# --- states, ends ---------------------------------------------------------------------------------


def test_a_state_resumes_within_an_epoch_and_continues_with_the_next():
    def shuffled():
        return lines(24).shuffle(24, seed=2).batch(4)

    whole = hr.keras.dataset(shuffled())
    epochs = [[x.ravel().tolist() for x, _ in whole.get_numpy_iterator()] for _ in range(3)]
    assert epochs[0] != epochs[1]
    first = hr.keras.dataset(shuffled())
    batches = first.get_numpy_iterator()
    for count in range(1, 7):
        next(batches)
        state = json.loads(json.dumps(first.get_state()))
        second = hr.keras.dataset(shuffled())
        second.set_state(state)
        rest = [[x.ravel().tolist() for x, _ in second.get_numpy_iterator()] for _ in range(2)]
        expected = [epochs[0][count:], epochs[1]] if count < 6 else epochs[1:]
        assert rest == expected, count
    whole.set_state(state)  # also in a dataset that was read further
    assert [[x.ravel().tolist() for x, _ in whole.get_numpy_iterator()] for _ in range(2)] == rest


@pytest.mark.parametrize("framework", [None, keras.backend.backend()])
def test_batches_of_a_strategy_hold_rows_of_all_replicas_and_have_states(framework):
    def plain():
        return lines(22).shuffle(22, seed=2).batch(4)

    def distributed():
        devices = ["cpu:0"] if framework == "jax" else ["cpu:0", "cpu:1"]  # JAX has one here
        strategy = hr.distribute.MirroredStrategy(devices, framework=framework)
        return hr.keras.dataset(strategy.distribute_dataset(plain()))

    def rows(data):
        return [x.ravel().tolist() for x, _ in data.get_numpy_iterator()]

    whole = hr.keras.dataset(plain())
    epochs = [rows(whole) for _ in range(3)]
    used = distributed()
    assert [rows(used) for _ in range(3)] == epochs
    assert used.num_batches == len(used) == 6
    first = distributed()
    batches = first.get_numpy_iterator()
    for _ in range(2):
        next(batches)
    state = json.loads(json.dumps(first.get_state()))
    for data in (distributed(), used):
        data.set_state(state)
        assert [rows(data) for _ in range(2)] == [epochs[0][2:], epochs[1]]
    assert batches_per_epoch(distributed(), epochs=2) == [6, 6]


def test_a_state_taken_in_a_callback_follows_the_last_trained_batch():
    seen: list = []
    data = hr.keras.dataset(record_rows(lines(16).batch(4), seen), prefetch=2)
    states = []

    class RecordStates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(data.state_dict())

    model = linear()
    model.fit(data, verbose=0, callbacks=[RecordStates()])
    again = hr.keras.dataset(record_rows(lines(16).batch(4), seen), prefetch=0)
    again.load_state_dict(states[1])
    seen.clear()
    with pytest.warns(UserWarning, match="ran out of data"):
        assert batches_per_epoch(again, model) == [2]
    assert seen == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert batches_per_epoch(again, model) == [4]


@pytest.mark.parametrize("steps", [None, 4, 6])
@pytest.mark.parametrize("is_known", [True, False])
def test_epochs_resumed_at_any_batch_equal_uninterrupted_ones(steps, is_known):
    def made():
        rows = lines(24).shuffle(24, seed=3)
        batches = (rows if is_known else rows.filter(lambda x, y: True)).batch(4)
        return hr.keras.dataset(batches, steps=steps)

    def epochs(data, count):
        passes = (data.get_numpy_iterator() for _ in range(count))
        return [x.ravel().tolist() for batches in passes for x, _ in batches]

    states, length = [], steps or 6
    expected = epochs(made(), 4)
    data = made()
    end_is_unknown = not is_known and steps is None
    with pytest.warns(UserWarning, match="ran out") if end_is_unknown else contextlib.nullcontext():
        linear().fit(data, epochs=2, verbose=0, callbacks=[RecordStates(data, states)])
    assert len(states) == 2 * length
    for count, state in enumerate(states, 1):
        resumed = made()
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert epochs(resumed, 2) == expected[count : (count // length + 2) * length]


def test_training_resumes_from_a_state_at_an_unknown_end():
    unknown = lines(8).filter(lambda x, y: True).batch(4)
    data = hr.keras.dataset(unknown)
    states: list = []
    with pytest.warns(UserWarning, match="ran out of data"):
        linear().fit(data, verbose=0, callbacks=[RecordStates(data, states)])
    data = hr.keras.dataset(unknown)
    data.set_state(states[-1])
    with pytest.warns(UserWarning, match="ran out of data"):
        assert batches_per_epoch(data)[0] >= 2


def test_the_batch_that_built_the_model_is_not_counted_in_a_state():
    data = hr.keras.dataset(lines(16).batch(4))
    states: list = []
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: states.append(data.get_state())
    )
    linear().fit(data, verbose=0, callbacks=[look])
    resumed = hr.keras.dataset(lines(16).batch(4))
    resumed.set_state(states[0])
    assert [x[0, 0] for x, _ in resumed.get_numpy_iterator()] == [0, 4, 8, 12]
    resumed.set_state({**states[0], "iterator": None})
    batches = resumed.get_numpy_iterator()
    for _ in range(2):
        next(batches)
    data.set_state(resumed.get_state())
    linear().fit(data, verbose=0, steps_per_epoch=2, callbacks=[look])
    resumed.set_state(states[1])
    assert [x[0, 0] for x, _ in resumed.get_numpy_iterator()] == [8, 12]


def test_building_a_model_from_the_last_batch_does_not_consume_it():
    def made():
        return hr.keras.dataset(lines(16).batch(4), steps=2)

    first, states = made(), []
    next(first.get_numpy_iterator())
    second = made()
    second.set_state(first.get_state())
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: states.append(second.get_state())
    )
    linear().fit(second, verbose=0, steps_per_epoch=1, callbacks=[look])
    assert states == [first.get_state()]


def test_data_without_batches_raise_or_warn(caplog):
    for empty in (lines(8).take(0).batch(4), lines(3).batch(4, drop_remainder=True)):
        with pytest.raises(InvalidArgumentError, match="no batches"):
            hr.keras.dataset(empty)
    unknown = hr.keras.dataset(lines(8).filter(lambda x, y: False).batch(4))
    assert list(unknown.get_numpy_iterator()) == []
    assert "has no batches" in caplog.text


def test_a_state_of_another_kind_or_dataset_is_rejected():
    data = hr.keras.dataset(lines(8).batch(4))
    for wrong in (None, {}, 3):
        with pytest.raises(TypeError, match="`state` must"):
            data.set_state(wrong)
    with pytest.raises(ValueError, match="'epoch'"):
        data.set_state({**data.get_state(), "epoch": -3})
    with pytest.raises(FailedPreconditionError, match="version 9"):
        data.set_state({**data.get_state(), "version": 9})
    next(data.get_numpy_iterator())
    other = hr.keras.dataset(hr.Dataset.range(8).batch(4))
    with pytest.raises(FailedPreconditionError):
        other.set_state(data.get_state())


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("headrace")]


def test_a_closed_dataset_leaves_no_thread_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hr.keras.dataset(lines(48).batch(4)) as data:
            model = linear()
            batches_per_epoch(data, model, steps_per_epoch=3)
            assert readers()
        assert readers() == []
        batches_per_epoch(data, model, steps_per_epoch=12)
        batches_per_epoch(data, model)
    data.close()
    assert readers() == []


@pytest.mark.heavy
def test_a_shared_job_trains_on_each_batch_once():
    with hr.service.LocalCluster(num_workers=1) as cluster:
        moved = hr.service.distribute("distributed_epoch", cluster.target, job_name="train")
        seen: list = []
        dataset = record_rows(lines(24).batch(4).apply(moved), seen)
        data = hr.keras.dataset(dataset, steps=6, prefetch=0)
        assert batches_per_epoch(data, epochs=2) == [6, 6]
        assert (
            sorted(seen[:6]) == sorted(seen[6:]) == [list(range(n, n + 4)) for n in range(0, 24, 4)]
        )
        data.close()
        # The epochs are read without reaching their ends, because the steps are counted.
        restarted = record_rows(lines(24).batch(4).apply(moved), [])
        with pytest.raises(
            FailedPreconditionError, match=r"job 'train', epoch \d: no elements left"
        ):
            batches_per_epoch(hr.keras.dataset(restarted))


def test_docstring_examples_pass():
    result = doctest.testmod(keras_dataset, extraglobs={"hr": hr, "np": np})
    assert result.attempted > 0
    assert result.failed == 0


# --- arguments of fit, evaluate and predict -------------------------------------------------------


def test_class_weight_of_fit_applies_only_to_training_batches():
    x, y = np.float32([[1], [1], [2], [2]]), np.float32([[0], [0], [1], [1]])
    rows = hr.Dataset.from_tensor_slices((x, y)).batch(2)
    weights = {0: 0.5, 1: 3.0}
    data, held = hr.keras.dataset(rows), hr.keras.dataset(rows)
    losses = linear().fit(data, epochs=2, validation_data=held, class_weight=weights, verbose=0)
    expected = linear().fit(
        x, y, 2, epochs=2, validation_data=(x, y), class_weight=weights, shuffle=False, verbose=0
    )
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(losses.history[name], expected.history[name], rtol=1e-6)
    assert losses.history["loss"] != losses.history["val_loss"]
    states: list = []
    data = hr.keras.dataset(hr.Dataset.from_tensor_slices((x, y)).batch(2))
    same = {"validation_data": data, "class_weight": weights}
    keep = [RecordStates(data, states)]
    again = linear().fit(data, epochs=2, verbose=0, callbacks=keep, **same)
    assert again.history == losses.history
    assert [state["epoch"] for state in states] == [0, 1, 2, 3]
    twice = hr.keras.dataset(rows, class_weight=weights)
    with pytest.raises(ValueError, match=r"`class_weight` of fit is .*pass it once"):
        batches_per_epoch(twice, class_weight=weights)


def test_arguments_that_keras_would_ignore_are_rejected():
    rows = lines(8).batch(4)
    data, model, x = hr.keras.dataset(rows), linear(), np.ones((8, 1), np.float32)
    for words, call in [
        (r"`sample_weight` of fit .*\(x, y, sample_weight\)",
         lambda: model.fit(data, sample_weight=x)),
        (r"`y` of fit .*\(x, y\)", lambda: model.fit(data, x)),
        (r"`batch_size` of fit .*batch\(n\)", lambda: model.fit(data, batch_size=4)),
        (r"`sample_weight` of evaluate", lambda: model.evaluate(data, sample_weight=x)),
        (r"`y` of evaluate", lambda: model.evaluate(data, x)),
        (r"`batch_size` of predict", lambda: model.predict(data, 4)),
        (r"`validation_batch_size` of fit",
         lambda: model.fit(x, x, validation_data=data, validation_batch_size=4)),
        (r"`validation_data` of fit has labels",
         lambda: model.fit(x, x, validation_data=(data, x))),
        (r"`x` is a Dataset.*hr\.keras\.dataset", lambda: model.fit(rows)),
        (r"`x` is a DatasetIterator.*hr\.keras\.dataset", lambda: model.fit(iter(rows))),
        (r"`x` is a Dataset.*hr\.keras\.dataset", lambda: model.evaluate(rows)),
        (r"`x` is a Dataset.*hr\.keras\.dataset", lambda: model.predict(x=rows)),
        (r"`validation_data` is a Dataset.*hr\.keras\.dataset",
         lambda: model.fit(data, validation_data=rows)),
        (r"`validation_data` is a Dataset.*hr\.keras\.dataset",
         lambda: model.fit(data, validation_data=(rows, None))),
        (r"`x` is a DistributedDataset.*hr\.keras\.dataset",
         lambda: model.fit(hr.distribute.MirroredStrategy(["cpu:0"]).distribute_dataset(rows))),
        (r"Unrecognized data type", lambda: model.fit(object())),
        (r"got an unexpected keyword", lambda: model.fit(data, no_such_argument=1)),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    with_arrays = {"batch_size": 4, "validation_data": data, "verbose": 0}
    assert len(model.fit(x, x, **with_arrays).history["val_loss"]) == 1


def test_arguments_are_checked_if_hr_keras_is_first_used_in_the_call():
    program = """
import os, sys, warnings
import keras, numpy
import headrace as hr
warnings.simplefilter("ignore")  # of forks
x = numpy.ones((8, 1), numpy.float32)
rows = hr.Dataset.from_tensor_slices((x, x)).batch(4)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
if not (child := os.fork()):
    model.fit(hr.keras.dataset(rows.repeat()))
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 1
model.fit(hr.keras.dataset(rows), class_weight={0: 2.0})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 1
    for words in ("never end", "class_weight"):
        assert re.search(f"ValueError: .*{words}", done.stderr), done.stderr


def test_an_infinite_dataset_requires_a_number_of_steps():
    x, endless = np.ones((8, 1), np.float32), hr.keras.dataset(lines(8).batch(4).repeat())
    model = linear()
    for words, call in [
        (r"fit would never end.*`steps_per_epoch`", lambda: model.fit(endless)),
        (r"fit would never end.*`validation_steps`",
         lambda: model.fit(x, x, validation_data=endless)),
        (r"evaluate would never end.*`steps`", lambda: model.evaluate(endless)),
        (r"predict would never end.*`steps`", lambda: model.predict(endless)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    assert batches_per_epoch(endless, model, steps_per_epoch=3) == [3]
    given = {"validation_data": endless, "validation_steps": 2}
    assert batches_per_epoch(
        hr.keras.dataset(lines(8).batch(4).repeat(), steps=2), model, **given
    ) == [2]
    assert model.predict(endless, steps=3, verbose=0).shape == (12, 1)
    assert model.evaluate(endless, steps=3, verbose=0) >= 0
