"""Objects of PyTorch, Keras and JAX in a checkpoint: restored in place, or refused when saved."""

from __future__ import annotations

import collections
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import headrace as hr
from headrace.errors import InvalidArgumentError
from tests.parameter_server.small_cluster import cluster


def test_torch_objects_are_restored_in_place(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return model, optimizer, rates, torch.full((2,), seed, dtype=torch.bfloat16)

    def train(model, optimizer, rates, extra):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
            optimizer.step()
            rates.step()
        return [each.detach().clone() for each in (*model.state_dict().values(), extra)]

    def checkpoint_of(model, optimizer, rates, extra):
        parameter = model[0].weight
        return hr.Checkpoint(
            model=model, optimizer=optimizer, rates=rates, parts=[extra, (parameter,)]
        )

    first, second = made(1), made(2)
    train(*first)
    path = checkpoint_of(*first).save(tmp_path / "a")
    weight = second[0][0].weight
    checkpoint = checkpoint_of(*second)
    checkpoint.restore(path).assert_consumed()
    assert second[0][0].weight is weight
    assert checkpoint.parts[0] is second[3]
    assert second[3].tolist() == [1, 1]
    for mine, other in zip(train(*second), train(*first), strict=True):
        assert torch.equal(mine, other)
    wider = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    before = [each.clone() for each in wider.state_dict().values()]
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' has shape \(2, 4\) here, and \(2"):
        hr.Checkpoint(model=wider).restore(path)
    with pytest.raises(InvalidArgumentError, match=r"parts/0.*has dtype float32 here, and bfl"):
        hr.Checkpoint(parts=[torch.zeros(2)]).restore(path)
    assert all(map(torch.equal, before, wider.state_dict().values()))


def test_keras_objects_are_restored_in_place(tmp_path):
    def made(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        slots = optimizer.variables[2:]
        for variable in slots:
            variable.assign(np.full(variable.shape, seed))
        return {"model": model, "optimizer": optimizer, "own": keras.Variable([float(seed)])}

    def values(objects):
        variables = [*objects["model"].variables, *objects["optimizer"].variables, objects["own"]]
        return [each.value.tolist() for each in variables]

    first, second = made(1), made(2)
    kernel = second["model"].layers[0].kernel
    hr.Checkpoint(**first).save(tmp_path / "a")
    assert values(first) != values(second)
    hr.Checkpoint(**second).restore(tmp_path / "a").assert_consumed()
    assert values(first) == values(second)
    assert second["model"].layers[0].kernel is kernel
    for unbuilt in (keras.Sequential([keras.layers.Dense(2)]), keras.optimizers.Adam(0.1)):
        with pytest.raises(ValueError, match="is not built, so its variables can neither"):
            hr.Checkpoint(own=unbuilt)


def test_jax_arrays_are_replaced_where_that_can_be(tmp_path):
    params = {"w": jnp.ones(3), "layers": [jnp.ones(2, jnp.bfloat16)]}
    path = hr.Checkpoint(params=params, rate=jnp.float32(0.5)).save(tmp_path / "a")
    mine = jax.tree.map(jnp.zeros_like, params)
    checkpoint = hr.Checkpoint(params=mine, rate=jnp.float32(0))
    checkpoint.restore(path).assert_consumed()
    assert isinstance(mine["w"], jax.Array)
    assert mine["w"].tolist() == [1, 1, 1]
    assert (mine["layers"][0].dtype, mine["layers"][0].tolist()) == (jnp.bfloat16, [1, 1])
    assert float(checkpoint.rate) == 0.5
    state = collections.namedtuple("State", "momentum")(jnp.ones(3))
    with pytest.raises(TypeError, match=r"'state/0' is a ArrayImpl in a State, .* Use a list or a"):
        hr.Checkpoint(state=state)
    with pytest.raises(InvalidArgumentError, match=r"params/w.*has shape \(4,\) here"):
        hr.Checkpoint(params={"w": jnp.ones(4)}).restore(path)


def test_arrays_that_would_not_be_restored_in_place_are_refused():
    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return np.ones(3)

    with pytest.raises(TypeError, match=r"'a' is a Foreign, which a checkpoint does not save"):
        hr.Checkpoint(a=Foreign())
    frozen = np.ones(3)
    frozen.flags.writeable = False
    hr.Checkpoint(a=[frozen])
    with pytest.raises(TypeError, match="'a/0' is a ndarray in a tuple"):
        hr.Checkpoint(a=(frozen,))


def test_a_state_of_other_dtypes_shapes_or_classes_is_refused(tmp_path):
    def optimizer(kind, *shape, dtype=torch.float32):
        parameter = torch.ones(shape, dtype=dtype, requires_grad=True)
        made = kind([parameter], lr=0.1)
        parameter.grad = torch.ones_like(parameter)
        made.step()
        return made

    def rates(kind, *args):
        return kind(optimizer(torch.optim.SGD, 1), *args)

    def counter(dtype):
        module = torch.nn.Module()
        module.register_buffer("n", torch.ones((), dtype=dtype))
        return module

    adam, schedules = torch.optim.Adam, torch.optim.lr_scheduler
    for saved, here, message in [
        (counter(torch.int64), counter(torch.int32), "'n' has dtype int32 here, and int64 in"),
        (torch.nn.Linear(1, 1).double(), torch.nn.Linear(1, 1), "'bias' has dtype float32 here"),
        (optimizer(adam, 4, 3), optimizer(adam, 7), r"0 is float32 \(7,\) here, and float32 \(4, "),
        (optimizer(adam, 4, dtype=torch.float64), optimizer(adam, 4), "0 is float32 .* float64"),
        (optimizer(adam, 4, 3), optimizer(torch.optim.SGD, 4, 3), "is SGD here, and Adam in the"),
        (
            rates(schedules.StepLR, 3),
            rates(schedules.ExponentialLR, 0.5),
            "is ExponentialLR here, and StepLR in",
        ),
    ]:
        path = hr.Checkpoint(a=torch.ones(2), state=saved).save(tmp_path / "a")
        other = torch.zeros(2)
        before = repr(here.state_dict())
        with pytest.raises(InvalidArgumentError, match=f"'state': .*{message}"):
            hr.Checkpoint(a=other, state=here).restore(path)
        assert (other.tolist(), repr(here.state_dict())) == ([0, 0], before)


def test_variables_of_another_class_are_refused(tmp_path):
    def optimizer(kind):
        made = kind(0.1)
        made.build([keras.Variable(np.ones((3, 2), np.float32))])
        return made

    def model(layers):
        return keras.Sequential(
            [keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(layers))]
        )

    kinds = keras.optimizers
    for saved, here, message in [
        (optimizer(kinds.RMSprop), optimizer(kinds.Adagrad), "Adagrad of 3 .* RMSprop of 3 "),
        (model(2), model(3), "Sequential of 6 .* Sequential of 4 "),
        (keras.metrics.Mean(), keras.metrics.Accuracy(), "Accuracy of 2 .* Mean of 2 "),
        (hr.metrics.Mean(), hr.metrics.Accuracy(), "Accuracy of 1 .* Mean of 1 "),
    ]:
        path = hr.Checkpoint(a=[{"b": saved}], n=1).save(tmp_path / "a")
        checkpoint = hr.Checkpoint(a=[{"b": here}], n=2)
        before = [np.asarray(each) for each in here.variables]
        with pytest.raises(InvalidArgumentError, match=f"'a/0/b' is {message}variables? in the"):
            checkpoint.restore(path)
        assert checkpoint.n == 2
        assert all(map(np.array_equal, before, map(np.asarray, here.variables)))


def test_all_is_as_before_when_one_object_cannot_be_restored(tmp_path):
    class Refusing:
        refuses = False

        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, state):
            if self.refuses:
                raise RuntimeError("it does not fit")

    def made(number):
        torch.manual_seed(int(number))
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        mirrored = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        with mirrored.scope():
            variable = hr.Variable(number)
        return {
            "array": np.full(2, number),
            "tensor": torch.full((2,), number),
            "keras": keras.Variable([number]),
            "model": model,
            "optimizer": optimizer,
            "variable": variable,
            "number": number,
            "jax": jnp.ones(2) * number,
        }

    def contents(objects):
        found = {**objects, "model": None, "optimizer": None}
        states = [objects[name].state_dict() for name in ("model", "optimizer")]
        read = {name: np.asarray(each).tolist() for name, each in found.items()}
        return repr((states, read))

    with cluster(1) as strategy:
        with strategy.scope():
            weights = hr.Variable(np.ones(2), name="w")
        last = Refusing()
        path = hr.Checkpoint(objects=made(1.0), w=weights, x=torch.ones(4), z=last).save(
            tmp_path / "a"
        )
        weights.assign(np.full(2, 7.0))
        here = made(2.0)
        before = contents(here)
        with torch.inference_mode():
            inference = torch.zeros(4)
        last.refuses = True
        for others, error, message in [
            ({"x": torch.zeros(1).expand(4)}, InvalidArgumentError, "'x'.*several elements are in"),
            ({"x": inference}, InvalidArgumentError, "'x' .* made in torch.inference_mode"),
            ({"z": last}, RuntimeError, "it does not fit"),
        ]:
            with pytest.raises(error, match=message):
                hr.Checkpoint(objects=here, w=weights, **others).restore(path)
            assert contents(here) == before
            assert weights.read().tolist() == [7, 7]
        last.refuses = False
        hr.Checkpoint(objects=here, w=weights, z=last).restore(path)
        assert here["tensor"].tolist() == weights.read().tolist() == [1, 1]
