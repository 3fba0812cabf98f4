"""Tests of pickled Keras models in one process; `test_keras.py` runs them."""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers, ops

from headrace.adapters.keras_training.model_pickling import (
    ModelPickler,
    dump_model,
    load_objects,
    reduce_keras,
)
from headrace.errors import FailedPreconditionError

# Warnings that Keras itself causes with its variables and PyTorch tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LOCK = threading.Lock()


class Holder(layers.Layer):
    def __init__(self, held, **options):
        super().__init__(**options)
        self.held = held

    def build(self, shape):
        pass

    def call(self, x):
        return x + 1


def dense(*more, **options):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3), layers.Dense(1), *more])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def same(one, other):
    return len({id(one), id(other)}) == 1


def test_unbuilt_model_is_rejected():
    with pytest.raises(FailedPreconditionError, match=r"not built.*model\.build\(.*first batch"):
        dump_model(keras.Sequential([layers.Dense(1)]))


def test_open_file_is_named_with_its_layer_and_attribute(tmp_path):
    with (
        (tmp_path / "log").open("w") as file,
        pytest.raises(
            FailedPreconditionError,
            match=r"`held` of the layer 'logger' \(Holder\) is a TextIOWrapper that cannot be",
        ),
    ):
        dump_model(dense(Holder(file, name="logger")))


def test_lock_in_a_collection_of_a_layer_is_named():
    with pytest.raises(FailedPreconditionError, match=r"`held` of the layer 'locked' \(Holder\)"):
        dump_model(dense(Holder([{"lock": LOCK}], name="locked")))


def test_lock_that_a_lambda_uses_is_named():
    lock = threading.Lock()
    with pytest.raises(FailedPreconditionError, match=r"'shift'.* holds `lock`, a lock that"):
        dump_model(dense(layers.Lambda(lambda x: x + lock.locked(), name="shift")))


def test_other_versions_and_back_ends_are_rejected_and_named():
    data = dump_model(dense())
    header, _, rest = data.partition(b"\n")
    _, _, python, version, back_end = header.split(b" ")
    for at, other in ((3, b"3.0.1"), (4, b"numpy"), (2, b"3.1")):
        words = header.split(b" ")
        words[at] = other
        with pytest.raises(FailedPreconditionError) as caught:
            load_objects(b" ".join(words) + b"\n" + rest)
        for word in (other, python, version, back_end):
            assert word.decode() in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"headrace-keras-model 99 3.11 3.15 jax\n", b"\x80\x05N."])
def test_bytes_of_another_format_are_rejected(data):
    with pytest.raises(FailedPreconditionError, match="reads pickled Keras models of format 1"):
        load_objects(data)


def test_changes_of_the_model_change_the_bytes_and_new_values_do_not():
    model = dense(layers.Dropout(0.1, seed=1))
    seen = {dump_model(model)}
    for variable in model.variables:
        variable.assign(ops.ones(variable.shape, variable.dtype))
    seen.add(dump_model(model))
    assert len(seen) == 1
    model.layers[0].trainable = False
    seen.add(dump_model(model))
    model.layers[0].trainable = True
    assert dump_model(model) in seen
    model.layers[-1].rate = 0.2
    seen.add(dump_model(model))
    model.compile(keras.optimizers.SGD(0.1), "mae")
    seen.add(dump_model(model))
    model.optimizer.learning_rate = 0.2
    seen.add(dump_model(model))
    assert len(seen) == 5


class Digests(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def on_train_batch_end(self, batch, logs=None):
        self.seen.add(dump_model(self.model))

    on_train_end = on_epoch_end = on_epoch_begin = on_train_batch_end


def test_bytes_do_not_change_while_fit_runs():
    model, x = dense(metrics=["mae"]), np.ones((8, 2), np.float32)
    model.fit(x, x[:, :1], verbose=0)
    model.evaluate(x, x[:, :1], verbose=0)
    digests = Digests()
    model.fit(x, x[:, :1], epochs=2, batch_size=4, verbose=0, callbacks=[digests])
    model.predict(x, verbose=0)
    assert digests.seen == {dump_model(model)}


def test_shared_layers_variables_and_objects_stay_shared():
    shared = layers.Dense(1)
    first = Holder(None)
    second = Holder({"layer": shared, "first": first})
    first.held = SimpleNamespace(other=second)  # in which Keras does not look for layers
    loaded = load_objects(dump_model(dense(shared, first, second, shared)))
    layer, one, two, again = loaded.layers[2:]
    assert same(layer, again)
    assert same(two.held["layer"], layer)
    assert same(two.held["first"], one)
    assert same(one.held.other, two)
    assert same(loaded.trainable_variables[4], layer.kernel)
    assert len(loaded.trainable_variables) == 6


def test_loaded_layers_track_what_they_hold_once():
    loaded = load_objects(dump_model(dense(Holder([layers.Dense(1)]))))
    holder = loaded.layers[-1]
    holder.part = holder.held[0]
    assert len(holder._layers) == 1
    with pytest.raises(ValueError, match="already built"):
        holder.held.append(layers.Dense(1))
    loaded.layers[0].trainable = False
    assert len(loaded.trainable_variables) == 2


def test_collections_of_a_layer_keep_their_kinds_items_and_order():
    held = {
        "list": [1, (2, [3])],
        "ordered": OrderedDict(b=1, a=[2]),
        "set": {"x", "y"},
        "dict": {1: 2, "layers": [layers.Dense(1)]},
    }
    model = dense(Holder(held))
    found, sent = (each.layers[-1].held for each in (load_objects(dump_model(model)), model))
    for name in held:
        assert type(found[name]) is type(sent[name])
    for name in ("list", "ordered", "set"):
        assert found[name] == sent[name]
    assert list(found["ordered"]) == ["b", "a"]
    assert found["dict"]["layers"][0].name == sent["dict"]["layers"][0].name


def test_loaded_functional_model_has_a_config_and_can_be_cloned():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(2)(inputs)))
    loaded = load_objects(dump_model(model))
    assert loaded.get_config() == model.get_config()
    assert [v.path for v in keras.models.clone_model(loaded).variables] == [
        v.path for v in model.variables
    ]


def test_arrays_and_tensors_that_are_no_variables_keep_their_values():
    held = {
        "array": np.arange(3),
        "tensor": ops.arange(3.0),
        "half": ops.ones((2, 1), "bfloat16"),
        "empty": ops.zeros((0, 2)),
        "expanded": ops.broadcast_to(ops.convert_to_tensor(3.0), (1, 1)),
    }
    found = load_objects(dump_model(dense(Holder(held)))).layers[-1].held
    for name, array in held.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(
            *(ops.convert_to_numpy(ops.cast(each, "float32")) for each in (found[name], array))
        )


class Scaled(keras.optimizers.SGD):
    """An optimizer with a variable number, and constructor arguments without a config."""

    def __init__(self, factor, fn):
        super().__init__(0.1, momentum=0.9)
        self.fn = fn
        self.factor = self.add_variable((), keras.initializers.Constant(factor), name="factor")

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.fn(gradient) * self.factor, variable, learning_rate)


def test_custom_optimizer_keeps_its_numbers_and_loses_its_slots():
    model = dense()
    model.compile(Scaled(3.0, lambda g: g * 2), "mse")
    x = np.ones((4, 2), np.float32)
    before = dump_model(model)
    model.fit(x, x[:, :1], verbose=0)
    optimizer = load_objects(dump_model(model)).optimizer
    assert [v.path for v in optimizer.variables] == [
        v.path for v in load_objects(before).optimizer.variables
    ]
    assert float(ops.convert_to_numpy(optimizer.factor)) == 3.0
    assert float(ops.convert_to_numpy(optimizer.iterations)) == 0
    assert float(ops.convert_to_numpy(optimizer.learning_rate)) == pytest.approx(0.1)


def test_model_of_many_layers_does_not_exceed_the_recursion_limit():
    x = inputs = keras.Input((1,))
    for _ in range(150):
        x = layers.Dense(1)(x)
    loaded = load_objects(dump_model(keras.Model(inputs, x)))
    assert len(loaded.trainable_variables) == 300


def test_keras_objects_beside_other_values_are_pickled_by_the_reducer():
    class Pair:
        def __init__(self, one, other):
            self.one, self.other = one, other

    layer = layers.Dense(2)
    layer.build((None, 3))
    assert reduce_keras(1) is NotImplemented
    with io.BytesIO() as file:
        ModelPickler(file).dump(Pair(layer, [layer, keras.metrics.Mean()]))
        found = pickle.loads(file.getvalue())
    assert same(found.one, found.other[0])
    assert found.one.kernel.shape == (3, 2)
    assert float(ops.convert_to_numpy(found.other[1](2.0))) == 2.0


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="parameters are PyTorch's")
def test_parameters_of_torch_are_the_values_of_the_variables():
    import torch  # noqa: PLC0415 - only on this back end

    class Raw(layers.Layer):
        def __init__(self):
            super().__init__()
            self.constant = torch.nn.Parameter(torch.tensor([5.0]))
            self.module = torch.nn.BatchNorm1d(1)

        def call(self, x):
            return self.module(x + self.constant)

    model = dense(Raw(), layers.BatchNormalization())
    list(model.parameters())
    loaded = load_objects(dump_model(model))
    parameters = {id(each): each for each in loaded.parameters()}
    for variable in loaded.variables:
        assert same(variable.value, variable._value)
        assert id(variable.value) in parameters
        assert variable.value.requires_grad == variable.trainable
    assert loaded.layers[2].constant.item() == 5.0
    found, sent = (each.layers[2].module.module.running_var for each in (loaded, model))
    assert found.item() == sent.item() != 0
    assert same(loaded.layers[2].module.module.weight, loaded.layers[2].module.variables[0].value)
    assert loaded.state_dict().keys() == model.state_dict().keys()
