"""`hr.keras.DatasetCreator` on one back end; `test_keras.py` runs it."""

from __future__ import annotations

import doctest
import inspect
import threading

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.adapters.keras_training import training_data

# A warning that Keras itself causes with PyTorch tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def rows(count: int) -> hr.Dataset:
    x = np.arange(count, dtype=np.float32)[:, None]
    return hr.Dataset.from_tensor_slices((x, 3 * x + 1))


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    made.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return made


class Creator:
    """A creator that records the arguments of its function and the rows that were read."""

    def __init__(self, dataset):
        self.contexts = []
        self.read = []
        self.creator = hr.keras.DatasetCreator(self._make)
        self._dataset = dataset

    def _make(self, context):
        self.contexts.append(context)
        return self._dataset.map(self._note)

    def _note(self, x, y):
        self.read.append(x[:, 0].astype(int).tolist())
        return x, y


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("stop here")


def test_fit_evaluate_and_predict_read_the_dataset_of_one_pipeline():
    made = Creator(rows(10).batch(4))
    net = model()
    history = net.fit(made.creator, epochs=2, validation_data=made.creator, verbose=0).history
    alone = hr.distribute.InputContext(1, 0, 1)
    assert made.contexts == [alone, alone]
    assert made.read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 4
    # With a learning rate of 0: the mean of (3 x + 1) ** 2.
    want = float(np.mean((3 * np.arange(10) + 1.0) ** 2))
    np.testing.assert_allclose([*history["loss"], *history["val_loss"]], [want] * 4, rtol=1e-5)
    np.testing.assert_allclose(net.evaluate(made.creator, verbose=0), want, rtol=1e-5)
    assert net.predict(made.creator, verbose=0).shape == (10, 1)
    assert made.contexts == [alone] * 4


def test_an_infinite_dataset_continues_across_epochs_and_fit_ends_its_threads():
    made = Creator(rows(6).batch(2).repeat())
    before = set(threading.enumerate())
    model().fit(made.creator, epochs=2, steps_per_epoch=2, verbose=0)
    assert made.read[:4] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    with pytest.raises(RuntimeError, match="stop here") as error:
        model().fit(made.creator, steps_per_epoch=2, verbose=0, callbacks=[Fail()])
    assert error.tb is not None  # it refers to local variables of fit
    assert [t for t in threading.enumerate() if t not in before and "headrace" in t.name] == []


def test_an_infinite_dataset_requires_a_number_of_steps():
    creator = hr.keras.DatasetCreator(lambda context: rows(6).batch(2).repeat())
    net = model()
    with pytest.raises(ValueError, match="`steps_per_epoch` is not given"):
        net.fit(creator)
    with pytest.raises(ValueError, match="`validation_steps` is not given"):
        net.fit(creator, steps_per_epoch=1, validation_data=creator)
    for method in (net.evaluate, net.predict):
        with pytest.raises(ValueError, match="`steps` is not given"):
            method(creator)


def test_class_weights_apply_and_ignored_arguments_are_rejected():
    def make(context):
        y = np.array([[0], [1]], np.int64)
        return hr.Dataset.from_tensor_slices((np.zeros((2, 1), np.float32), y)).batch(2)

    creator = hr.keras.DatasetCreator(make)
    loss = model().fit(creator, class_weight={0: 1.0, 1: 5.0}, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, [5.0 / 2], rtol=1e-6)
    with pytest.raises(ValueError, match="`batch_size` of fit"):
        model().fit(creator, batch_size=2)


def test_fit_accepts_a_creator_made_in_its_argument_list():
    made = Creator(rows(6).batch(2).repeat())
    net = model()
    keras_fit = inspect.unwrap(keras.Model.fit)
    keras_fit(net, made.creator, epochs=2, steps_per_epoch=2, verbose=0)
    made.creator.close()
    assert made.read[:4] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    finite = Creator(rows(5).batch(2))
    keras_fit(net, finite.creator, verbose=0)
    assert finite.read == [[0, 1], [2, 3], [4]]
    finite.creator.close()


def test_wrong_functions_options_and_datasets_are_rejected():
    with pytest.raises(TypeError, match=r"`dataset_fn` must be a function, but got 2 of type int"):
        hr.keras.DatasetCreator(2)
    with pytest.raises(TypeError, match="`input_options` must be an InputOptions"):
        hr.keras.DatasetCreator(lambda context: None, {"split": "ceil"})
    wrong = hr.keras.DatasetCreator(lambda context: "3")
    with pytest.raises(TypeError, match=r"must return a Dataset, but returned '3' of type str"):
        wrong(hr.distribute.InputContext())
    with pytest.raises(TypeError, match="must return a Dataset"):
        model().fit(wrong, steps_per_epoch=1)
    with pytest.raises(TypeError, match="`context` must be an InputContext"):
        wrong(1)
    options = hr.distribute.InputOptions(split="balanced")
    assert hr.keras.DatasetCreator(lambda context: rows(1), options).input_options is options


def test_the_docstring_example_passes():
    assert doctest.testmod(training_data).failed == 0
