"""Objects of PyTorch, Keras and JAX in a checkpoint: restored in place, or rejected when saved."""

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
    def create(seed):
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

    first, second = create(1), create(2)
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
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' has shape \(2, 4\), but \(2"):
        hr.Checkpoint(model=wider).restore(path)
    with pytest.raises(InvalidArgumentError, match=r"parts/0.*has dtype float32, but bfl"):
        hr.Checkpoint(parts=[torch.zeros(2)]).restore(path)
    assert all(map(torch.equal, before, wider.state_dict().values()))


def test_keras_objects_are_restored_in_place(tmp_path):
    def create(seed):
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

    first, second = create(1), create(2)
    kernel = second["model"].layers[0].kernel
    hr.Checkpoint(**first).save(tmp_path / "a")
    assert values(first) != values(second)
    hr.Checkpoint(**second).restore(tmp_path / "a").assert_consumed()
    assert values(first) == values(second)
    assert second["model"].layers[0].kernel is kernel
    for unbuilt in (keras.Sequential([keras.layers.Dense(2)]), keras.optimizers.Adam(0.1)):
        with pytest.raises(ValueError, match="is not built, so its variables can neither"):
            hr.Checkpoint(own=unbuilt)


def test_jax_arrays_are_replaced_in_mutable_containers(tmp_path):
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
    with pytest.raises(
        TypeError, match=r"'state/0' is a ArrayImpl in a State and .* Use a list or a"
    ):
        hr.Checkpoint(state=state)
    with pytest.raises(InvalidArgumentError, match=r"params/w.*has shape \(4,\), but"):
        hr.Checkpoint(params={"w": jnp.ones(4)}).restore(path)


def test_arrays_that_cannot_be_restored_are_rejected():
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


def test_states_with_other_dtypes_shapes_or_classes_are_rejected(tmp_path):
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
    for saved, current, message in [
        (counter(torch.int64), counter(torch.int32), "'n' has dtype int32, but int64 in"),
        (torch.nn.Linear(1, 1).double(), torch.nn.Linear(1, 1), "'bias' has dtype float32, but"),
        (optimizer(adam, 4, 3), optimizer(adam, 7), r"0 is float32 \(7,\), but float32 \(4, "),
        (optimizer(adam, 4, dtype=torch.float64), optimizer(adam, 4), "0 is float32 .* float64"),
        (optimizer(adam, 4, 3), optimizer(torch.optim.SGD, 4, 3), "is SGD, but Adam in the"),
        (
            rates(schedules.StepLR, 3),
            rates(schedules.ExponentialLR, 0.5),
            "is ExponentialLR, but StepLR in",
        ),
    ]:
        path = hr.Checkpoint(a=torch.ones(2), state=saved).save(tmp_path / "a")
        other = torch.zeros(2)
        before = repr(current.state_dict())
        with pytest.raises(InvalidArgumentError, match=f"'state': .*{message}"):
            hr.Checkpoint(a=other, state=current).restore(path)
        assert (other.tolist(), repr(current.state_dict())) == ([0, 0], before)


def test_variables_of_another_class_are_rejected(tmp_path):
    def optimizer(kind):
        made = kind(0.1)
        made.build([keras.Variable(np.ones((3, 2), np.float32))])
        return made

    def model(layers):
        return keras.Sequential(
            [keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(layers))]
        )

    kinds = keras.optimizers
    for saved, current, message in [
        (optimizer(kinds.RMSprop), optimizer(kinds.Adagrad), "Adagrad of 3 .* RMSprop of 3 "),
        (model(2), model(3), "Sequential of 6 .* Sequential of 4 "),
        (keras.metrics.Mean(), keras.metrics.Accuracy(), "Accuracy of 2 .* Mean of 2 "),
        (hr.metrics.Mean(), hr.metrics.Accuracy(), "Accuracy of 1 .* Mean of 1 "),
    ]:
        path = hr.Checkpoint(a=[{"b": saved}], n=1).save(tmp_path / "a")
        checkpoint = hr.Checkpoint(a=[{"b": current}], n=2)
        before = [np.asarray(each) for each in current.variables]
        with pytest.raises(InvalidArgumentError, match=f"'a/0/b' is {message}variables? in the"):
            checkpoint.restore(path)
        assert checkpoint.n == 2
        assert all(map(np.array_equal, before, map(np.asarray, current.variables)))


def test_a_failed_restore_of_one_object_is_undone_for_all(tmp_path):
    class FailingState:
        fails = False

        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, state):
            if self.fails:
                raise RuntimeError("it does not fit")

    def create(number):
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
        last = FailingState()
        path = hr.Checkpoint(objects=create(1.0), w=weights, x=torch.ones(4), z=last).save(
            tmp_path / "a"
        )
        weights.assign(np.full(2, 7.0))
        current = create(2.0)
        before = contents(current)
        with torch.inference_mode():
            inference = torch.zeros(4)
        last.fails = True
        for others, error, message in [
            (
                {"x": torch.zeros(1).expand(4)},
                InvalidArgumentError,
                "'x'.*several elements share memory",
            ),
            ({"x": inference}, InvalidArgumentError, "'x' .* created in torch.inference_mode"),
            ({"z": last}, RuntimeError, "it does not fit"),
        ]:
            with pytest.raises(error, match=message):
                hr.Checkpoint(objects=current, w=weights, **others).restore(path)
            assert contents(current) == before
            assert weights.read().tolist() == [7, 7]
        last.fails = False
        hr.Checkpoint(objects=current, w=weights, z=last).restore(path)
        assert current["tensor"].tolist() == weights.read().tolist() == [1, 1]
