"""Strategies of JAX over 4 devices; run by `test_jax.py` in a separate process."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import headrace as hr
from headrace.distribute import (
    InputOptions,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    PerReplicaSpec,
    get_replica_context,
)
from headrace.element.spec import ArraySpec
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks import jax_replica_program
from tests.distribute.variables_table import check_table

numbers = hr.Dataset.range


def mirrored(replicas=4):
    return MirroredStrategy([f"cpu:{i}" for i in range(replicas)], framework="jax")


def replica_id():
    return get_replica_context().replica_id_in_sync_group


def on(values):
    """Return the numbers of the arrays' devices."""
    assert all(isinstance(value, jax.Array) for value in values)
    return [value.device.id for value in values]


# --- devices ----------------------------------------------------------------------------------


def test_devices_are_those_of_jax_and_unknown_ones_are_named():
    assert mirrored(3).extended.worker_devices == ("cpu:0", "cpu:1", "cpu:2")
    assert MirroredStrategy(framework="jax").extended.worker_devices == ("cpu:0",)
    assert OneDeviceStrategy(framework="jax").extended.worker_devices == ("cpu:0",)
    with pytest.raises(
        ValueError, match=r"'cpu:4' does not exist: JAX has cpu:0, cpu:1, cpu:2, cpu"
    ):
        mirrored(5)
    with pytest.raises(ValueError, match=r"'gpu:0' does not exist: JAX has cpu:0"):
        OneDeviceStrategy("gpu:0", framework="jax")
    with pytest.raises(ValueError, match="No duplicates allowed"):
        MirroredStrategy(["cpu:1", "/job:x/device:CPU:1"], framework="jax")


# --- datasets ---------------------------------------------------------------------------------


@pytest.mark.catalogue("3.10.28", "3.10.29", "3.26.23-26")
def test_each_replicas_rows_are_on_its_device():
    strategy = mirrored()
    data = hr.Dataset.from_tensor_slices(
        {"x": np.arange(20, dtype=np.float32).reshape(10, 2), "y": (np.arange(10),)}
    ).batch(8)
    distributed = strategy.distribute_dataset(data)
    first, last = distributed
    assert on(first["x"].values) == on(first["y"][0].values) == [0, 1, 2, 3]
    assert [part.tolist() for part in first["y"][0].values] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [part.shape for part in last["x"].values] == [(1, 2), (1, 2), (0, 2), (0, 2)]
    assert on(last["x"].values) == [0, 1, 2, 3]
    spec = distributed.element_spec["y"][0]
    assert isinstance(spec, PerReplicaSpec)
    assert spec.specs[0].dtype == first["y"][0].values[0].dtype == np.int32


def test_dtypes_structures_and_strings_are_kept():
    class Pair(NamedTuple):
        a: object
        b: object

    rows = Pair(
        np.zeros((4, 2), ml_dtypes.bfloat16),
        {"flag": np.array([True, False, True, True]), "name": np.array([b"a", b"b", b"c", b"d"])},
    )
    (step,) = mirrored(2).distribute_dataset(hr.Dataset.from_tensor_slices(rows).batch(4))
    assert type(step) is Pair
    assert on(step.a.values) == [0, 1]
    assert step.a.values[0].dtype == jnp.bfloat16
    assert step.b["flag"].values[1].dtype == bool
    assert step.b["name"].values[1].tolist() == [b"c", b"d"]


def test_one_device_gets_plain_arrays_and_scalars():
    strategy = OneDeviceStrategy("cpu:2", framework="jax")
    values = list(strategy.distribute_dataset(numbers(3)))
    assert on(values) == [2, 2, 2]
    assert [int(value) for value in values] == [0, 1, 2]
    assert on([strategy.run(lambda x: x + 1, args=(values[0],))]) == [2]


@pytest.mark.catalogue("2.5.4", "3.10.28", "3.10.29", "3.26.23-26")
def test_rows_stay_on_the_host_without_fetch_to_device():
    options = InputOptions(experimental_fetch_to_device=False)
    (step,) = mirrored(2).distribute_dataset(numbers(4).batch(4), options)
    assert all(isinstance(value, np.ndarray) for value in step.values)


def test_delivered_arrays_are_not_changed_by_later_steps():
    steps = list(mirrored().distribute_dataset(numbers(400).batch(8)))
    assert np.concatenate([v for s in steps for v in s.values]).tolist() == list(range(400))


def test_numbers_beyond_32_bits_raise():
    (data,) = [numbers(2).map(lambda i: i + 2**40).batch(2)]
    with pytest.raises(InvalidArgumentError, match="jax_enable_x64"):
        next(iter(mirrored(2).distribute_dataset(data)))


def test_a_function_and_a_state_work_as_with_numpy():
    strategy = mirrored(2)
    steps = strategy.distribute_datasets_from_function(lambda context: numbers(6).batch(2))
    iterator = iter(steps)
    assert [value.tolist() for value in next(iterator).values] == [[0, 1], [2, 3]]
    state = json.loads(json.dumps(iterator.get_state()))
    last = next(iterator)
    assert [value.tolist() for value in last.values] == [[4, 5], []]
    assert on(last.values) == [0, 1]
    iterator.set_state(state)
    assert [value.tolist() for value in next(iterator).values] == [[4, 5], []]


def test_a_generator_is_distributed():
    def rows():
        for i in range(5):
            yield {"x": np.full(3, i, np.float32)}

    data = hr.Dataset.from_generator(
        rows, output_signature={"x": ArraySpec((3,), np.float32)}
    ).batch(4)
    first, last = mirrored(2).distribute_dataset(data)
    assert first["x"].values[1][:, 0].tolist() == [2.0, 3.0]
    assert [len(value) for value in last["x"].values] == [1, 0]


# --- running ----------------------------------------------------------------------------------


def test_replicas_run_at_the_same_time_each_on_its_device():
    barrier = threading.Barrier(4, timeout=30)

    def step():
        barrier.wait()
        return jnp.zeros(3) + replica_id()

    assert on(mirrored().run(step).values) == [0, 1, 2, 3]


def test_x64_is_enabled_on_replicas_if_the_caller_enabled_it():
    with jax.enable_x64(True):
        values = mirrored().run(lambda: jnp.arange(2)).values
    assert {value.dtype for value in values} == {np.dtype(np.int64)}


def test_reductions_are_arrays_of_jax_with_the_numbers_of_the_tables():
    strategy = mirrored(2)
    uneven = PerReplica([jnp.array([1, 2, 3, 4]), jnp.array([5, 6])])
    assert strategy.reduce("MEAN", uneven, axis=0) == 3.5
    assert strategy.reduce("SUM", uneven, axis=0) == 21
    with pytest.raises(InvalidArgumentError, match=r"shapes \(4,\), \(2,\)"):
        strategy.reduce("SUM", uneven)
    p = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    both = strategy.run(lambda: p * (replica_id() + 1))
    assert strategy.reduce("MEAN", both, axis=-1).tolist() == [2.25, 5.25]
    assert strategy.reduce("MEAN", both, axis=(0, 1)) == 3.75
    total = strategy.reduce("SUM", {"p": both, "n": [PerReplica([True, 3])]})
    assert isinstance(total["p"], jax.Array)
    assert isinstance(total["n"][0], jax.Array)
    assert (total["p"][1, 1], total["n"][0]) == (12.0, 4)
    half = strategy.run(lambda: jnp.ones(2, jnp.bfloat16))
    assert strategy.reduce("MEAN", half).dtype == jnp.bfloat16
    assert strategy.reduce("MEAN", PerReplica([0, 1])) == 0.5
    assert np.isnan(strategy.reduce("MEAN", PerReplica([jnp.zeros(0), jnp.zeros(0)]), axis=0))
    with pytest.raises(InvalidArgumentError, match="cannot be summed"):
        strategy.reduce("SUM", PerReplica(["a", "b"]))
    assert strategy.gather(PerReplica([jnp.ones((1, 2)), jnp.zeros((2, 2))]), 0).shape == (3, 2)


def test_all_replicas_get_reduced_and_gathered_values_on_their_devices():
    def step():
        context = get_replica_context()
        mean = context.all_reduce("MEAN", {"a": jnp.full(2, 1.0 * replica_id())})
        return mean, context.all_gather(jnp.full((replica_id() + 1,), replica_id()), 0)

    mean, rows = mirrored(3).run(step)
    assert on(mean["a"].values) == on(rows.values) == [0, 1, 2]
    assert [value.tolist() for value in mean["a"].values] == [[1.0, 1.0]] * 3
    assert [value.tolist() for value in rows.values] == [[0, 1, 1, 2, 2, 2]] * 3


# --- variables --------------------------------------------------------------------------------


def test_variables_have_the_numbers_of_the_table():
    check_table(mirrored(2))


@pytest.mark.catalogue("3.33.43-45")
def test_copies_of_a_variable_are_on_the_devices_and_work_as_arrays():
    strategy = mirrored(3)
    initial = np.ones(2, np.float32)
    with strategy.scope():
        v = hr.Variable(initial, aggregation="SUM")
    initial[:] = 7
    assert on(v.values) == [0, 1, 2]
    assert v.dtype == np.float32
    for made in (v + 1, 1 + v, v * jnp.ones(2), jnp.ones(2) * v, np.ones(2, np.float32) * v, -v):
        assert isinstance(made, jax.Array)
    assert jnp.dot(jnp.asarray(v), jnp.ones(2)) == 2.0
    assert on(strategy.run(lambda: v.assign(v * 2)).values) == [0, 1, 2]
    assert v.numpy().tolist() == [6.0, 6.0]
    gradient = jax.grad(lambda w: (w * v.read()).sum())(jnp.ones(2))
    assert gradient.tolist() == [6.0, 6.0]
    with pytest.raises(FailedPreconditionError, match="that JAX is tracing cannot be stored"):
        jax.jit(lambda x: v.assign(x))(jnp.ones(2))
    count = hr.Variable(1)
    with pytest.raises(TypeError, match="without loss"):
        count.assign(1.5)
    with pytest.raises(ValueError, match=r"has shape \(2,\)"):
        v.assign(jnp.ones(3))


# --- compiled steps -----------------------------------------------------------------------------


def test_a_compiled_step_returns_the_results_of_run():
    strategy = mirrored()
    data = strategy.distribute_dataset(hr.Dataset.from_tensor_slices(np.arange(16.0)).batch(16))

    def step(x, offset):
        context = get_replica_context()
        total = context.all_reduce("SUM", {"s": x.sum(), "n": x.size})
        mean = context.all_reduce("MEAN", context.replica_id_in_sync_group)
        return {
            "x": x + offset, "total": total, "mean": mean, "id": context.replica_id_in_sync_group,
            "all": context.all_gather(x, 0), "none": None, "word": "constant",
        }  # fmt: skip

    (batch,) = data
    ran = strategy.run(step, args=(batch, 2.0))
    compiled = strategy.compile(step)(batch, 2.0)
    assert compiled["none"] is None
    assert compiled["word"] == "constant"
    assert list(ran) == ["x", "total", "mean", "id", "all", "none", "word"]
    for name in ("x", "mean", "id", "all"):
        one, other = compiled[name].values, ran[name].values
        assert [np.asarray(v).tolist() for v in one] == [np.asarray(v).tolist() for v in other]
        assert on(one) == [0, 1, 2, 3]
    assert [float(v) for v in compiled["total"]["s"].values] == [120.0] * 4
    assert [v.shape for v in compiled["mean"].values] == [()] * 4
    assert strategy.reduce("SUM", compiled["total"]["n"]) == 64
    assert strategy.gather(compiled["x"], 0).tolist() == list(range(2, 18))
    assert compiled["x"].array.sharding.spec == P("replica")


def test_results_are_accepted_as_arguments_without_copy_or_recompilation():
    strategy = mirrored()
    traced = []

    def step(weights, x):
        traced.append(1)
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w["w"] + w["b"]) ** 2).mean())(weights)
        gradient = get_replica_context().all_reduce("MEAN", gradient)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    compiled = strategy.compile(step, donate=(0,))
    weights = {"w": jnp.ones(3), "b": np.float32(0.5)}
    rng = np.random.default_rng(0)
    rows = hr.Dataset.from_tensor_slices(rng.normal(size=(64, 3)).astype(np.float32)).batch(16)
    losses = []
    for x in strategy.distribute_dataset(rows.repeat(6)):
        before = weights
        weights, loss = compiled(weights, x)
        losses.append(float(strategy.reduce("MEAN", loss)))
    assert len(traced) == 1
    assert losses[-1] < losses[0] / 20
    assert before["w"].array.is_deleted()
    copies = strategy.local_results(weights)
    assert all(np.array_equal(copy["w"], copies[0]["w"]) for copy in copies)
    # The same on one device with the whole batch: gradients are means, not sums.
    weights = {"w": jnp.ones(3), "b": jnp.float32(0.5)}
    for x in rows.repeat(6):
        gradient = jax.grad(lambda w, x=x: ((x @ w["w"] + w["b"]) ** 2).mean())(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)
    assert np.allclose(copies[0]["w"], weights["w"], atol=1e-5)


def test_a_compiled_step_accepts_global_arrays():
    strategy = mirrored()
    options = InputOptions(global_arrays=True)
    data = strategy.distribute_dataset(numbers(32).batch(8, drop_remainder=True), options)
    compiled = strategy.compile(lambda x, w: get_replica_context().all_reduce("SUM", x.sum() * w))
    for step in data:
        assert int(compiled(step, 1).values[3]) == int(step.sum())
    mesh = step.sharding.mesh
    same = jax.device_put(jnp.ones(2), NamedSharding(mesh, P()))
    assert [v.shape for v in strategy.compile(lambda w: w)(same).values] == [(2,)] * 4
    with pytest.raises(InvalidArgumentError, match=r"argument 0\['a'\] has the sharding"):
        strategy.compile(lambda w: w)(
            {"a": jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(None, "replica")))}
        )


def test_results_of_a_program_are_accepted_by_run_and_reductions():
    strategy = mirrored()
    made = strategy.compile(lambda x: {"x": x * 2, "n": x.sum()})(
        PerReplica([np.float32([i, i]) for i in range(4)])
    )
    ran = strategy.run(lambda made: made["x"] + made["n"], args=(made,))
    assert [value.tolist() for value in ran.values] == [[4.0 * i] * 2 for i in range(4)]
    assert strategy.reduce("SUM", made)["n"] == 12.0
    assert strategy.local_results(made)[2]["x"].tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="using a PerReplica object"):
        made["x"] + 1


def test_a_compiled_step_supports_keys_small_floats_bools_and_empty_rows():
    strategy = mirrored()

    def step(key, x):
        context = get_replica_context()
        mine = jax.random.fold_in(key, context.replica_id_in_sync_group)
        return jax.random.split(key)[0], jax.random.normal(mine, (2,)), context.all_reduce("SUM", x)

    compiled = strategy.compile(step)
    key, first, total = compiled(jax.random.key(0), PerReplica([True, False, True, True]))
    assert [int(value) for value in total.values] == [3] * 4
    _, second, _ = compiled(key, True)
    assert len({tuple(v.tolist()) for v in (*first.values, *second.values)}) == 8
    same = strategy.compile(lambda *values: values)
    both = mirrored(2).compile(lambda x: x)(PerReplica([True, False]))
    assert [bool(value) for value in both.values] == [True, False]
    half, none, zero = same(np.float64(1.5), None, np.zeros((0, 3), ml_dtypes.bfloat16))
    assert half.values[3] == 1.5
    assert none is None
    assert (zero.values[1].shape, zero.values[1].dtype) == ((0, 3), jnp.bfloat16)


@pytest.mark.catalogue("3.33.8", "3.33.9", "4.3.8")
def test_values_from_a_function_are_made_on_the_devices():
    values = mirrored().distribute_values_from_function(
        lambda context: jnp.full(2, context.replica_id_in_sync_group)
    )
    assert on(values.values) == [0, 1, 2, 3]


def test_many_concurrent_steps_do_not_hang():
    strategy = mirrored()
    step = strategy.compile(lambda x: get_replica_context().all_reduce("SUM", x * 2))
    value = PerReplica([jnp.ones(4)] * 4)
    for _ in range(200):
        value = step(value)
        value = PerReplica([each / 8 for each in value.values])
    assert value.values[0].tolist() == [1.0] * 4


def test_one_replica_has_plain_values_in_a_compiled_step():
    strategy = OneDeviceStrategy("cpu:1", framework="jax")
    step = strategy.compile(lambda x, y: (get_replica_context().all_reduce("MEAN", x), y.sum()))
    mean, total = step(3, np.ones((2, 2), np.float32))
    assert (float(mean), float(total)) == (3.0, 4.0)
    assert mean.shape == total.shape == ()
    assert on([total]) == [1]


def test_a_compiled_step_supports_dataclasses_lists_and_constants():
    @dataclass
    class Batch:
        x: object
        name: object = "n"

    strategy = mirrored(2)
    values = PerReplica([np.float32([1, 2]), np.float32([3, 4])])

    def step(batch, mode, extra):
        assert type(batch) is Batch
        assert mode == "train"
        return [Batch(batch.x * 2, mode), extra[0] + 1]

    made, extra = strategy.compile(step)(Batch(values), "train", [PerReplica([1, 2])])
    assert type(made) is Batch
    assert made.name == "train"
    assert [v.tolist() for v in made.x.values] == [[2.0, 4.0], [6.0, 8.0]]
    assert [int(v) for v in extra.values] == [2, 3]


def test_gradients_of_run_are_those_of_all_replicas():
    def losses(x):
        total = get_replica_context().all_reduce("SUM", {"x": x, "n": 1})["x"]
        both = get_replica_context().all_gather(x[None], axis=0)
        return (1 + 2 * replica_id()) * (total + (both**3).sum())

    def step(transform):
        return float(transform(losses)(2.0 + replica_id()))

    strategy = mirrored(2)
    # The losses of both replicas are 4 (a + b + a^3 + b^3).
    first = strategy.run(step, args=(jax.grad,)).values
    assert first == (4 + 12 * 2.0**2, 4 + 12 * 3.0**2)
    second = strategy.run(step, args=(lambda f: jax.grad(jax.grad(f)),)).values
    assert second == (24 * 2.0, 24 * 3.0)
    with pytest.raises(FailedPreconditionError, match=r"in jax\.jit.*strategy\.compile"):
        strategy.run(step, args=(lambda f: jax.jit(jax.grad(f)),))
    assert strategy.run(step, args=(jax.grad,)).values == first


@pytest.mark.catalogue("1.2.3", "3.29.1", "3.29.2")
def test_gradients_of_collectives_are_those_of_all_replicas():
    """The gradient of each replica includes the uses of its value on all replicas."""

    def gradients(x):
        context = get_replica_context()
        weight = context.replica_id_in_sync_group + 1.0

        def gathered(parts):
            return sum((context.all_gather(part, 1) * weight).sum() for part in parts)

        def reduced(part):
            return (context.all_reduce("SUM", part) * weight).sum()

        return jax.grad(gathered)([x, 2 * x]), jax.grad(reduced)(x)

    found = mirrored().compile(gradients)(jnp.array([[3.0], [5.0]]))
    for gradient in (*found[0], found[1]):
        assert [each.tolist() for each in gradient.values] == [[[10.0], [10.0]]] * 4


@pytest.mark.parametrize("rows", [5, 2])
def test_different_row_counts_raise_or_are_padded_or_dropped(rows):
    strategy = mirrored()
    (step,) = strategy.distribute_dataset(
        hr.Dataset.from_tensor_slices({"x": np.arange(1.0, rows + 1)}).batch(rows)
    )

    def masked(batch):
        return get_replica_context().all_reduce("SUM", (batch["x"] * batch["mask"]).sum())

    with pytest.raises(InvalidArgumentError, match=r'rows.*remainder="pad".*or call it with strat'):
        strategy.compile(masked)(step)
    assert strategy.compile(masked, remainder="pad")(step).values[0] == rows * (rows + 1) / 2
    dropped = strategy.compile(lambda batch: batch["x"], remainder="drop")(step)
    assert [len(v) for v in dropped.values] == [0] * 4
    with pytest.raises(ValueError, match="`remainder` must be"):
        strategy.compile(masked, remainder="ignore")


def test_a_compiled_step_rejects_values_for_another_number_of_replicas():
    same = mirrored().compile(lambda x: x)
    for count in (3, 5):
        with pytest.raises(ValueError, match=f"for {count} replicas, but this strategy has 4"):
            same(PerReplica([np.ones(2)] * count))
    for values in ([1.0, np.ones(1)] * 2, [np.ones(1), 1.0] * 2, [1.0, np.ones(2)] * 2):
        with pytest.raises(InvalidArgumentError, match=r"of argument 0 has shapes .* same shape"):
            same(PerReplica(list(map(np.asarray, values))))


def test_a_compiled_step_gathers_replicas_without_rows():
    def gathered(x):
        return get_replica_context().all_gather(x, 0), get_replica_context().all_gather(x, 1)

    rows, columns = mirrored().compile(gathered)(PerReplica([np.zeros((0, 3), np.int32)] * 4))
    assert [(v.shape, v.dtype) for v in rows.values] == [((0, 3), np.int32)] * 4
    assert [v.shape for v in columns.values] == [(0, 12)] * 4


def test_errors_of_compiled_steps_name_the_alternative():
    strategy = mirrored(2)
    with strategy.scope():
        v = hr.Variable(1.0, name="rate")
    uses = [
        (lambda x: x * v.read(), (1.0,)),
        (lambda x: x * v, (1.0,)),
        (lambda x: v.assign(x), (1.0,)),
        (lambda x: x, (v,)),
        (lambda x: get_replica_context().all_reduce("SUM", v), (1.0,)),
    ]
    for use, args in uses:
        with pytest.raises(FailedPreconditionError, match=r"Variable 'rate'.*pass variable\.read"):
            strategy.compile(use)(*args)
    assert v.read() == 1.0
    with pytest.raises(FailedPreconditionError, match="merge_call is not supported"):
        strategy.compile(lambda: get_replica_context().merge_call(lambda s: 1))()
    with pytest.raises(FailedPreconditionError, match="requires cross-replica context"):
        strategy.run(lambda: strategy.compile(lambda: 1)())
    with pytest.raises(InvalidArgumentError, match=r"argument 0 .*neither an array nor hashable"):
        strategy.compile(lambda x: x)({1, 2})
    with pytest.raises(TypeError, match="`fn` must be a function"):
        strategy.compile(3)
    with pytest.raises(ValueError, match="but this one has framework='numpy'"):
        MirroredStrategy(["cpu:0"]).compile(lambda: 1)
    with pytest.raises(ValueError, match="rank 0"):
        strategy.compile(lambda x: get_replica_context().all_gather(x, 0))(1.0)
    with pytest.raises(ValueError, match="mine"):
        strategy.compile(lambda: (_ for _ in ()).throw(ValueError("mine")))()
    assert get_replica_context().replica_id_in_sync_group == 0


def test_a_lost_process_is_distinguished_from_other_errors():
    found = "UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer"
    assert jax_replica_program.is_peer_loss(jax.errors.JaxRuntimeError(found))
    assert jax_replica_program.is_peer_loss(ValueError(found))
    assert not jax_replica_program.is_peer_loss(ValueError("the Gloomy: Gloo"))
    assert not jax_replica_program.is_peer_loss(
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
    )


# --- global arrays ------------------------------------------------------------------------------


def test_a_dataset_yields_arrays_over_the_mesh():
    strategy = mirrored()
    options = InputOptions(global_arrays=True)
    data = hr.Dataset.from_tensor_slices((np.arange(16), np.ones((16, 3), np.float32)))
    distributed = strategy.distribute_dataset(data.batch(8, drop_remainder=True), options)
    steps = list(distributed)
    assert [step[0].tolist() for step in steps] == [list(range(8)), list(range(8, 16))]
    assert steps[0][1].shape == (8, 3)
    assert {shard.device.id: shard.data.tolist() for shard in steps[0][0].addressable_shards} == {
        0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7],
    }  # fmt: skip
    assert distributed.element_spec == (
        ArraySpec((8,), np.int32), ArraySpec((8, 3), np.float32)
    )  # fmt: skip
    assert jax.jit(jnp.sum)(steps[1][0]) == sum(range(8, 16))


def test_uneven_rows_raise_or_are_padded_or_dropped():
    strategy = mirrored()
    data = numbers(10).batch(8)

    def steps(remainder):
        options = InputOptions(global_arrays=True, remainder=remainder)
        distributed = strategy.distribute_dataset(data, options)
        return distributed.element_spec, iter(distributed)

    spec, error = steps("error")
    assert spec == ArraySpec((None,), np.int32)
    next(error)
    with pytest.raises(InvalidArgumentError, match="1, 1, 0 and 0 rows"):
        next(error)
    _, drop = steps("drop")
    assert [step.tolist() for step in drop] == [list(range(8))]
    spec, pad = steps("pad")
    assert spec == (ArraySpec((8,), np.int32), ArraySpec((8,), bool))
    first, (values, mask) = pad
    assert first[1].all()
    assert values.shape == (8,)
    assert values[mask].tolist() == [8, 9]


def test_global_arrays_require_jax_devices_and_rows():
    with pytest.raises(ValueError, match="this one has framework='numpy'"):
        MirroredStrategy(["cpu:0"]).distribute_dataset(
            numbers(4).batch(2), InputOptions(global_arrays=True)
        )
    with pytest.raises(ValueError, match="requires `global_arrays=True`"):
        InputOptions(remainder="pad")
    with pytest.raises(ValueError, match="`experimental_fetch_to_device` is False"):
        InputOptions(global_arrays=True, experimental_fetch_to_device=False)
    data = hr.Dataset.from_tensor_slices({"x": np.arange(4), "s": np.array(["a"] * 4)}).batch(4)
    with pytest.raises(InvalidArgumentError, match=r"\['s'\].*which JAX arrays cannot hold"):
        next(iter(mirrored().distribute_dataset(data, InputOptions(global_arrays=True))))


# --- donated arguments and split arrays --------- -----------------------------------------------


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_donated_argument_is_rejected_by_name(replicas):
    strategy = mirrored(replicas)
    step = strategy.compile(lambda weights, x: {"w": weights["w"] + x.sum()}, donate=[0])
    (x,) = strategy.distribute_dataset(numbers(8).batch(8))
    own = {"w": jnp.zeros(2)}
    weights = step(own, x)
    after = step(weights, x)
    for gone in (own, weights):
        with pytest.raises(
            FailedPreconditionError,
            match=r"argument 0\['w'\] was donated.*weights = step\(weights",
        ):
            step(gone, x)
    assert strategy.local_results(step(after, x))[0]["w"].shape == (2,)


@pytest.mark.parametrize(
    "use",
    [
        lambda strategy, array: strategy.run(lambda x: x.sum(), args=(array,)),
        lambda strategy, array: strategy.run(lambda x: x.sum(), kwargs={"x": array}),
        lambda strategy, array: strategy.reduce("SUM", array, axis=0),
        lambda strategy, array: strategy.gather(array, axis=0),
    ],
)
def test_an_array_split_over_devices_is_rejected_by_run(use):
    strategy = mirrored()
    options = InputOptions(global_arrays=True)
    (array,) = strategy.distribute_dataset(numbers(8).batch(8), options)
    with pytest.raises(InvalidArgumentError, match=r"sharded over several devices.*global_arrays"):
        use(strategy, array)


@pytest.mark.parametrize("replicas", [1, 4])
def test_an_argument_may_be_overwritten_after_a_compiled_step(replicas):
    step = mirrored(replicas).compile(lambda rows: rows.sum(axis=1))
    rows = np.empty((4, 1 << 20), np.float32)
    sums = []
    for number in range(20):
        rows[...] = number
        sums.append(step(rows))
    for number, each in enumerate(sums):
        values = each.values if replicas > 1 else [each]
        assert [value.tolist() for value in values] == [[float(number << 20)] * 4] * replicas
