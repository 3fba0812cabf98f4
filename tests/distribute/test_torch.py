"""Strategies of PyTorch on logical CPUs."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
import torch

import headrace as hr
from headrace.distribute import (
    InputOptions,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    get_replica_context,
)
from headrace.errors import InvalidArgumentError
from tests.distribute.variables_table import check_table

numbers = hr.Dataset.range


def mirrored(replicas=2):
    return MirroredStrategy([f"cpu:{i}" for i in range(replicas)], framework="torch")


def replica_id():
    return get_replica_context().replica_id_in_sync_group


def test_devices_are_those_of_pytorch_and_unknown_ones_are_named():
    assert mirrored(3).extended.worker_devices == ("cpu:0", "cpu:1", "cpu:2")
    for wrong in ("gpu:7", "tpu:0", "mps:3"):
        with pytest.raises(
            ValueError, match=f"'{wrong}' does not exist: PyTorch has .*and any number of"
        ):
            OneDeviceStrategy(wrong, framework="torch")


@pytest.mark.catalogue("3.10.5", "3.10.6")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_rows_are_put_on_gpus():
    strategy = MirroredStrategy(["gpu:0", "cpu:0"], framework="torch")
    (step,) = strategy.distribute_dataset(numbers(4).batch(4))
    assert [value.device.type for value in step.values] == ["cuda", "cpu"]
    assert strategy.reduce("SUM", step).device.type == "cuda"
    assert strategy.run(lambda: torch.ones(1, device="cuda").device.index).values == (0, 0)


def test_each_replica_gets_tensors_in_the_memory_of_the_batch():
    (step,) = mirrored().distribute_dataset(numbers(4).batch(4))
    first, second = step.values
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])
    assert first.dtype == torch.int64
    assert second.data_ptr() - first.data_ptr() == 16
    first += 1  # the tensors belong to the replica


def test_arrays_inside_records_are_copied():
    inside = np.ones(3, [("a", "i1"), ("b", "i4")])["b"]
    assert mirrored().reduce("SUM", PerReplica([inside, inside])).tolist() == [2, 2, 2]


def test_partial_batches_dtypes_and_strings_are_kept():
    data = hr.Dataset.from_tensor_slices(
        {
            "half": np.arange(6).astype(ml_dtypes.bfloat16).reshape(3, 2),
            "flag": np.array([True, False, True]),
            "z": np.arange(3) * 1j,
            "u": np.arange(3, dtype=np.uint16),
            "name": np.array(["a", "b", "c"]),
        }
    ).batch(3)
    (step,) = mirrored(4).distribute_dataset(data)
    assert [tuple(v.shape) for v in step["half"].values] == [(1, 2), (1, 2), (1, 2), (0, 2)]
    assert step["half"].values[1].dtype == torch.bfloat16
    assert step["half"].values[1].tolist() == [[2.0, 3.0]]
    assert step["flag"].values[2].tolist() == [True]
    assert step["z"].values[2].tolist() == [2j]
    assert step["u"].values[3].dtype == torch.uint16
    assert step["name"].values[2].tolist() == ["c"]
    options = InputOptions(experimental_fetch_to_device=False)
    (step,) = mirrored().distribute_dataset(numbers(4).batch(4), options)
    assert isinstance(step.values[0], np.ndarray)


def test_replicas_run_concurrently_with_the_callers_settings():
    barrier = threading.Barrier(2, timeout=30)
    x = torch.ones(2, requires_grad=True)

    def step():
        barrier.wait()
        return (x * 2).requires_grad, torch.is_inference_mode_enabled(), torch.mm(a, a).dtype

    a = torch.ones(2, 2)
    assert mirrored().run(step)[0].values == (True, True)
    with torch.no_grad():
        assert mirrored().run(step)[0].values == (False, False)
    with torch.inference_mode():
        assert mirrored().run(step)[1].values == (True, True)
    with torch.autocast("cpu", torch.bfloat16):
        dtype = mirrored().run(step)[2]
    assert dtype is torch.bfloat16


def test_reductions_are_tensors_with_the_numbers_of_the_tables():
    strategy = mirrored()
    uneven = PerReplica([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])])
    assert strategy.reduce("MEAN", uneven, axis=0) == 3.5
    assert strategy.reduce("SUM", uneven, axis=0) == 21
    with pytest.raises(InvalidArgumentError, match=r"shapes \(4,\), \(2,\)"):
        strategy.reduce("SUM", uneven)
    p = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    both = strategy.run(lambda: p * (replica_id() + 1))
    assert strategy.reduce("MEAN", both, axis=-1).tolist() == [2.25, 5.25]
    assert strategy.reduce("MEAN", both, axis=(0, 1)) == 3.75
    total = strategy.reduce("SUM", {"p": both, "n": [PerReplica([True, 3])]})
    assert isinstance(total["p"], torch.Tensor)
    assert (float(total["p"][1, 1]), int(total["n"][0])) == (12.0, 4)
    assert strategy.reduce("MEAN", PerReplica([0, 1])) == 0.5
    assert strategy.reduce("SUM", PerReplica([np.uint16([1]), np.uint16([2])])).tolist() == [3]
    assert torch.isnan(strategy.reduce("MEAN", PerReplica([torch.zeros(0)] * 2), axis=0))
    for wrong in (["a", "b"], [np.array(["a"]), np.array(["b"])], [object(), object()]):
        with pytest.raises(InvalidArgumentError, match="cannot be"):
            strategy.reduce("SUM", PerReplica(wrong))
    assert strategy.gather(PerReplica([torch.ones(1, 2), torch.zeros(2, 2)]), 0).shape == (3, 2)
    with pytest.raises(InvalidArgumentError, match="Shape mismatch"):
        strategy.gather(PerReplica([torch.ones(1, 2), torch.zeros(2, 3)]), 0)
    with pytest.raises(ValueError, match="but this one has framework='torch'"):
        strategy.compile(lambda: 1)


def test_each_replica_gets_its_own_copy_of_a_reduced_tensor():
    def step():
        total = get_replica_context().all_reduce("SUM", {"g": torch.ones(2)})["g"]
        total += replica_id()
        get_replica_context().merge_call(lambda strategy: None)
        return total

    assert [each.tolist() for each in mirrored(3).run(step).values] == [[3, 3], [4, 4], [5, 5]]

    def merged():
        for value in (torch.zeros(2), np.zeros(2)):
            got = get_replica_context().merge_call(lambda strategy, value=value: value)
            got += replica_id()
            get_replica_context().merge_call(lambda strategy: None)
            yield got.tolist()

    found = mirrored(2).run(lambda: tuple(map(tuple, merged())))
    assert mirrored(2).local_results(found) == (((0, 0), (0, 0)), ((1, 1), (1, 1)))


@pytest.mark.catalogue("1.2.3")
def test_gradients_flow_on_replicas_and_are_reduced():
    model = torch.nn.Linear(3, 1)
    rows = torch.arange(12.0).reshape(4, 3)
    strategy = mirrored()
    (step,) = strategy.distribute_dataset(hr.Dataset.from_tensor_slices(rows.numpy()).batch(4))

    def gradients(x):
        found = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()))
        return get_replica_context().all_reduce("MEAN", list(found))

    mean = strategy.local_results(strategy.run(gradients, args=(step,)))[1]
    whole = torch.autograd.grad(model(rows).pow(2).mean(), list(model.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(mean, whole, strict=True))
    out = strategy.run(model, args=(step,))
    assert all(value.requires_grad for value in out.values)
    strategy.reduce("SUM", out, axis=0).sum().backward()
    assert model.weight.grad.tolist() == [rows.sum(0).tolist()]


def test_variables_have_the_numbers_of_the_table():
    check_table(mirrored())


def test_variable_copies_are_separate_tensors_without_gradient_history():
    strategy = mirrored(3)
    initial = torch.ones(2, requires_grad=True)
    with strategy.scope():
        v = hr.Variable(initial, aggregation="SUM", dtype=np.float64)
    assert v.dtype == torch.float64
    assert not any(each.requires_grad for each in v.values)
    assert len({each.data_ptr() for each in v.values}) == 3
    for made in (v + 1, 1 + v, v * torch.ones(2), torch.ones(2) * v, np.ones(2) * v, -v):
        assert isinstance(made, torch.Tensor)
    assert torch.dot(v, torch.ones(2, dtype=torch.float64)) == 2.0
    w = torch.ones(2, requires_grad=True)
    strategy.run(lambda: v.assign((v * w).to(torch.float64)))
    assert v.read().tolist() == [3.0, 3.0]
    assert not v.read().requires_grad
    (v.read() * w).sum().backward()
    assert w.grad.tolist() == [3.0, 3.0]
    assert isinstance(v.numpy(), np.ndarray)
    with pytest.raises(TypeError, match="without loss"), strategy.scope():
        hr.Variable(1).assign(1.5)
    with pytest.raises(ValueError, match=r"has shape \(2,\)"):
        v.assign(torch.ones(3))


def test_the_numpy_view_of_a_variable_is_read_only():
    with mirrored().scope():
        v = hr.Variable([1.0, 2.0])
    for array in (v.numpy(), np.asarray(v)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5.0
    np.array(v)[0] = 5.0  # each caller gets its own copy
    assert [copy.tolist() for copy in v.values] == [[1.0, 2.0]] * 2


def test_a_reduction_on_replicas_uses_each_replicas_copy():
    strategy = mirrored()
    with strategy.scope():
        v = hr.Variable(0, aggregation="SUM", synchronization="ON_READ")

    def step():
        v.assign(3 * replica_id())
        return get_replica_context().all_reduce("SUM", v)

    assert [int(value) for value in strategy.run(step).values] == [3, 3]
    assert strategy.reduce("SUM", v) == 3


def test_one_device_gets_plain_tensors_and_scalars():
    strategy = OneDeviceStrategy(framework="torch")
    values = list(strategy.distribute_dataset(numbers(3)))
    assert [value.item() for value in values] == [0, 1, 2]
    assert strategy.reduce("SUM", strategy.run(lambda x: x + 1, args=(values[2],))).item() == 3
