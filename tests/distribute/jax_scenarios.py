"""Programs of workers with JAX devices: each function runs on one worker."""

from __future__ import annotations

import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import headrace as hr
from headrace.distribute import InputOptions, MultiWorkerMirroredStrategy, PerReplica
from headrace.distribute import get_replica_context as replica
from headrace.errors import HeadraceError, InvalidArgumentError
from tests.distribute.replicas import rows, with_policy
from tests.distribute.scenarios import read_files

numbers = hr.Dataset.range


def strategy(**options):
    devices = [f"cpu:{number}" for number in range(len(jax.local_devices()) if alone() else 2)]
    return MultiWorkerMirroredStrategy(framework="jax", devices=devices, **options)


def alone():
    config = hr.distribute.TFConfigClusterResolver()
    return len(config.cluster_spec().as_dict()["worker"]) == 1


# --- one program ---------------------------------------------------------------------------------


def losses_of_digits(file):
    """Train on the digits; return the losses, and the sum of the weights' magnitudes."""
    s = strategy()
    digits = np.load(file)
    data = {"x": (digits["data"] / 16).astype(np.float32), "y": digits["target"].astype(np.int32)}
    train = hr.Dataset.from_tensor_slices(data).shuffle(1797, seed=0).batch(256, True).repeat(3)

    def loss(weights, batch):
        logits = batch["x"] @ weights["w"] + weights["b"]
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)
        return -found.mean()

    def step(weights, batch):
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        value, gradient = replica().all_reduce("MEAN", (value, gradient))
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradient), value

    weights = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    compiled, losses = s.compile(step, donate=[0]), []
    for batch in s.distribute_dataset(train):
        weights, value = compiled(weights, batch)
        losses.append(float(s.local_results(value)[0]))
    return losses, float(np.abs(s.local_results(weights)[0]["w"]).sum())


def attempt(function, *args):
    try:
        return function(*args)
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"


def calls(files):
    """Call programs with matching and mismatched rows, shapes and values."""
    s = strategy()
    first = s.first_replica
    total = s.compile(lambda x: replica().all_reduce("SUM", x))
    ids = s.compile(lambda: replica().replica_id_in_sync_group)()
    gathered = s.compile(lambda x: replica().all_gather(x, 0))(
        PerReplica([jnp.full(1, first + n) for n in range(2)])
    )
    of_files = s.distribute_dataset(with_policy(read_files(files).batch(8), "FILE"))
    masked = s.compile(lambda x: replica().all_reduce("SUM", (x[0] * x[1]).sum()), remainder="pad")
    cut = s.compile(lambda x: replica().all_reduce("SUM", x.sum()), remainder="drop")
    return {
        "ids": rows(ids),
        "sum": rows(total(PerReplica([np.float32(first + n) for n in range(2)]))),
        "gathered": rows(gathered),
        "kept": float(s.reduce("SUM", total(PerReplica([True, first == 0])))),
        "bfloat16": str(total(jnp.ones(2, jnp.bfloat16)).values[0].dtype),
        "constant": s.compile(lambda mode: mode)("train"),
        "padded": [rows(masked(step))[0] for step in of_files],
        "dropped": [rows(cut(step))[0] for step in of_files],
        "uneven": [attempt(total, step) for step in of_files][-1],
        "shapes": attempt(total, PerReplica([np.ones((2, 2 + first))] * 2)),
        "constants": attempt(s.compile(lambda mode: mode), f"mode {first}"),
        "raised": attempt(s.compile(lambda: fail()), *()),
        "after": rows(total(1.0)),
    }


def fail():
    raise InvalidArgumentError("mine")


# --- arrays over all -----------------------------------------------------------------------------


def whole(array):
    """Return an array over all devices, assembled by a JAX program."""
    everywhere = NamedSharding(array.sharding.mesh, P())
    made = jax.jit(lambda x: x, out_shardings=everywhere)(array)
    return np.asarray(made.addressable_data(0)).tolist()


def real_rows(x, mask):
    return [row for row, is_real in zip(whole(x), whole(mask), strict=True) if is_real]


def global_arrays(files):
    s = strategy()

    def steps(dataset, policy, **options):
        given = InputOptions(global_arrays=True, **options)
        return s.distribute_dataset(with_policy(dataset, policy), given)

    padded = steps(read_files(files).batch(8), "FILE", remainder="pad")
    (batch,) = steps(numbers(8).batch(8), "DATA")
    return {
        "data": [whole(x) for x in steps(numbers(16).batch(8), "DATA")],
        "uneven": attempt(lambda: list(steps(numbers(9).batch(8), "DATA"))),
        "real": sorted(row for x, mask in padded for row in real_rows(x, mask)),
        "dropped": [whole(x) for x in steps(read_files(files).batch(8), "FILE", remainder="drop")],
        "compiled": rows(s.compile(lambda x: replica().all_reduce("SUM", x.sum()))(batch)),
        "shape": str(batch.sharding.mesh.shape),
    }


# --- sums ----------------------------------------------------------------------------------------


def large_sums():
    """Return sums of large arrays of many dtypes, and whether JAX computed them."""
    s = strategy()
    found = {}
    for dtype in ("float32", "bfloat16", "int32"):
        value = PerReplica([jnp.full(1 << 20, s.first_replica + n, dtype) for n in range(2)])
        total = s.reduce("SUM", value)
        assert len(total.devices()) == 1
        found[dtype] = (str(total.dtype), complex(total[0]).real, complex(total[-1]).real)
    both = s.run(
        lambda x: replica().all_reduce("MEAN", {"large": jnp.full(1 << 19, x), "small": x}),
        args=(PerReplica([np.float32(s.first_replica + n) for n in range(2)]),),
    )
    assert [value.device.id % 2048 for value in both["large"].values] == [0, 1]
    found["mean"] = [float(both["large"].values[1][-1]), float(both["small"].values[0])]
    # Arrays without a device are computed on the default device, which differs here.
    with jax.default_device(jax.local_devices()[s.first_replica // 2]):
        loose = s.reduce("SUM", PerReplica([np.full(1 << 19, 1.5 + n, np.float32) for n in (0, 1)]))
    assert loose.devices() == {jax.local_devices()[0]}
    found["loose"] = float(loose[-1])
    found["direct"] = s._direct_allreduce._all_reduce is not None
    return found


# --- iterators, states ---------------------------------------------------------------------------


def iterator_over(files):
    options = InputOptions(global_arrays=True, remainder="pad")
    dataset = with_policy(read_files(files).batch(4), "FILE")
    return iter(strategy().distribute_dataset(dataset, options))


def saved_after(count, files):
    iterator = iterator_over(files)
    seen = [row for _ in range(count) for row in real_rows(*next(iterator))]
    return seen, json.dumps(iterator.get_state())


def rest_from(state, files):
    iterator = iterator_over(files)
    iterator.set_state(json.loads(state))
    return [row for step in iterator for row in real_rows(*step)]


def device_iterators(files):
    """Read with `hr.jax.device_iterator` in processes that the strategy joined."""
    strategy()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    over = hr.jax.device_iterator(read_files(files).batch(8), sharding, remainder="drop")
    return [whole(batch) for batch in over], jax.process_count()


def on_a_gpu():
    s = MultiWorkerMirroredStrategy(framework="jax")
    total = s.compile(lambda x: replica().all_reduce("SUM", x))(
        PerReplica([np.float32(1 + s.first_replica)])
    )
    number = s.compile(lambda: replica().replica_id_in_sync_group)().values[0]
    large = s.reduce("SUM", PerReplica([jnp.full(1 << 19, 2.0 * (1 + s.first_replica))]))
    (batch,) = s.distribute_dataset(numbers(4).batch(4), InputOptions(global_arrays=True))
    platform = large.device.platform
    return s.worker_devices, rows(total), int(number), float(large[0]), platform, whole(batch)


# --- failures ------------------------------------------------------------------------------------


def end_within_a_program(victim, number, timeout):
    """Signal one worker during a program on all; return the errors of the others."""
    s = strategy(timeout=timeout)
    calls = itertools.count()

    def signalled(x):
        if s.first_replica == 2 * victim and next(calls) > 6:
            os.kill(os.getpid(), number)
        return x

    def step(x):
        made = jax.pure_callback(signalled, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return replica().all_reduce("SUM", made)

    compiled = s.compile(step)
    try:
        while True:
            assert float(compiled(1.0).values[0]) == s.num_replicas_in_sync
    except hr.errors.UnavailableError as error:
        return str(error)
