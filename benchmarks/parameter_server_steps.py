"""Cost of training steps on two workers and two parameter servers.

Each worker takes its own batch of 1,024 lists of 16 ids. It reads their rows from a table of a
million rows of 32 floats, half of them on each server, averages the rows of each list, multiplies
by a vector, and pushes the gradients of a squared error by SGD. The vector is named in
`cache_variable_reads`, so that one request reads it with the rows, as the graph of tf.distribute
does. Gradients are pushed in the background; the next read sees them, as in that graph. Another
workload schedules empty functions. Workers and servers are processes of this machine in both
libraries.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tf_cluster import start_tf_cluster
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "start_headrace", "start_tensorflow"]

WORKERS = SERVERS = 2
ROWS, DIM, BATCH, IDS, BATCHES = 1_000_000, 32, 1024, 16, 16
RATE = np.float32(0.5)
_NUM_STEPS, _NUM_EMPTY, _NUM_SHORT = 40, 1000, 400
_SHORT = 0.001
"""Duration of a short function in seconds."""

Build = Callable[[Path, ExitStack], Pipeline]


def batches_of_ids(worker: int = 0) -> NDArray[np.int64]:
    """Return the batches of ids that a worker reads repeatedly."""
    return np.random.default_rng(worker).integers(0, ROWS, (BATCHES, BATCH, IDS))


def start_headrace(
    stack: ExitStack, *, workers: int = WORKERS, servers: int = SERVERS, shards: int | None = None
) -> tuple[Any, Any]:
    """Start a cluster with variables in `shards` shards; return its strategy and coordinator."""
    import headrace as hr

    cluster = stack.enter_context(hr.distribute.LocalCluster(workers, servers))
    strategy = hr.distribute.ParameterServerStrategy(
        cluster.cluster_resolver,
        hr.distribute.partitioners.FixedShardsPartitioner(shards or servers),
    )
    stack.callback(strategy.close)
    return strategy, stack.enter_context(hr.coordinator.ClusterCoordinator(strategy))


def start_tensorflow(
    stack: ExitStack, *, servers: int = SERVERS, shards: int | None = None
) -> tuple[Any, Any]:
    """Start a tf.distribute cluster; return its strategy and its coordinator."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec(start_tf_cluster(stack, workers=WORKERS, servers=servers))
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc"),
        tf.distribute.experimental.partitioners.FixedShardsPartitioner(shards or servers),
    )
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


# --- steps ---------------------------------------------------------------------------------------


def _headrace(_: Path, stack: ExitStack) -> Pipeline:
    import headrace as hr

    strategy, coordinator = start_headrace(stack)
    with strategy.scope():
        uniform = hr.initializers.Uniform(0.0, 0.1, seed=0)
        table: Any = hr.Variable(uniform, shape=(ROWS, DIM), dtype="float32", name="table")
        vector = hr.Variable(np.full(DIM, 0.1, np.float32), name="vector")
        sgd = hr.optimizers.InBackground(hr.optimizers.SGD(float(RATE)))

    def step(batches: Any) -> float:
        ids = next(batches)
        with hr.distribute.cache_variable_reads(vector):
            pooled = table.gather(ids, combiner="mean")
            weights = vector.read()
        error = pooled @ weights - np.float32(1)
        of_scores = error * np.float32(2 / BATCH)
        of_pooled = of_scores[:, None] * (weights / np.float32(IDS))
        of_rows = np.broadcast_to(of_pooled[:, None], (BATCH, IDS, DIM))
        sgd.apply_gradients([(hr.IndexedSlices(of_rows, ids), table), (of_scores @ pooled, vector)])
        return float(error @ error) / BATCH

    def data() -> Any:
        ids = batches_of_ids(hr.coordinator.get_current_worker_index())
        return hr.Dataset.from_tensor_slices(ids).repeat().prefetch(2)

    batches = iter(coordinator.create_per_worker_dataset(data))
    return _scheduled(coordinator, step, (batches,), _NUM_STEPS)


def _tensorflow(_: Path, stack: ExitStack) -> Pipeline:
    import tensorflow as tf

    strategy, coordinator = start_tensorflow(stack)
    with strategy.scope():
        table = tf.Variable(
            initial_value=lambda shape=(ROWS, DIM), dtype=tf.float32, **_: tf.random.uniform(
                shape, 0.0, 0.1, dtype
            ),
            shape=(ROWS, DIM),
            dtype=tf.float32,
        )
        vector = tf.Variable(tf.fill([DIM], 0.1))

    def replica(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            pooled = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
            loss = tf.reduce_mean((tf.linalg.matvec(pooled, vector) - 1) ** 2)
        of_table, of_vector = tape.gradient(loss, [table.variables, vector.variables])
        for shard, gradient in zip(table.variables, of_table, strict=True):
            shard.scatter_sub(tf.IndexedSlices(gradient.values * RATE, gradient.indices))
        for shard, gradient in zip(vector.variables, of_vector, strict=True):
            shard.assign_sub(gradient * RATE)
        return loss

    @tf.function
    def step(batches: Any) -> Any:
        return strategy.run(replica, args=(next(batches),))

    def data() -> Any:
        return tf.data.Dataset.from_tensor_slices(batches_of_ids()).repeat().prefetch(2)

    batches = iter(coordinator.create_per_worker_dataset(data))
    return _scheduled(coordinator, step, (batches,), _NUM_STEPS)


def _scheduled(coordinator: Any, function: Any, args: Any, count: int) -> Pipeline:
    """Schedule `count` functions and wait for all, repeatedly; yield the result of the last."""

    def results() -> Iterator[Any]:
        while True:
            for _ in range(count):
                value = coordinator.schedule(function, args=args)
            coordinator.join()
            yield value.fetch()

    return results


def _check_steps(elements: Elements) -> None:
    losses = [float(loss) for loss in islice(elements, 12)]
    expect(losses[-1] < 0.1 and losses[-1] < losses[0], f"the losses are {losses}")


# --- functions -----------------------------------------------------------------------------------


def _no_op() -> int:
    return 7


def _empty(_: Path, stack: ExitStack) -> Pipeline:
    _, coordinator = start_headrace(stack)
    return _scheduled(coordinator, _no_op, None, _NUM_EMPTY)


def _empty_tensorflow(_: Path, stack: ExitStack) -> Pipeline:
    import tensorflow as tf

    _, coordinator = start_tensorflow(stack)
    return _scheduled(coordinator, tf.function(_no_op), (), _NUM_EMPTY)


def _check_empty(elements: Elements) -> None:
    expect(
        [int(value) for value in islice(elements, 2)] == [7, 7],
        "a function returned another value than 7",
    )


def _short() -> int:
    began = perf_counter()
    sleep(_SHORT)
    return round((perf_counter() - began) * 1e6)


def _busy(_: Path, stack: ExitStack) -> Pipeline:
    _, coordinator = start_headrace(stack)

    def results() -> Iterator[tuple[int, float]]:
        while True:
            began = perf_counter()
            values = [coordinator.schedule(_short) for _ in range(_NUM_SHORT)]
            coordinator.join()
            took = perf_counter() - began
            yield sum(coordinator.fetch(values)), took

    return results


def _check_busy(elements: Elements) -> None:
    work, _ = next(elements)
    expect(work >= _NUM_SHORT * _SHORT * 1e6, "functions returned too early")


WORKLOADS = (
    Workload(
        name="embedding steps",
        unit="steps",
        contenders=(
            Contender(name="headrace", build=_headrace, role="headrace"),
            Contender(
                name="tf.distribute ParameterServerStrategy",
                build=_tensorflow,
                needs=("tensorflow",),
            ),
        ),
        check=_check_steps,
        consume=lambda _: _NUM_STEPS,
        targets=(Target(of=("tf.distribute ParameterServerStrategy",), at_least=3.0),),
        reopen=False,
        long_rounds=True,
    ),
    Workload(
        name="empty functions",
        unit="functions",
        contenders=(
            Contender(name="headrace", build=_empty, role="headrace"),
            Contender(
                name="tf.distribute ParameterServerStrategy",
                build=_empty_tensorflow,
                needs=("tensorflow",),
            ),
        ),
        check=_check_empty,
        consume=lambda _: _NUM_EMPTY,
        targets=(Target(of=("tf.distribute ParameterServerStrategy",), at_least=10.0),),
        reopen=False,
    ),
    Workload(
        name="functions of 1 ms on two workers",
        unit="µs of work of two workers",
        contenders=(Contender(name="headrace", build=_busy, role="headrace"),),
        check=_check_busy,
        targets=(Target(of=(), at_least=0.9 * WORKERS * 1e6),),
        reopen=False,
        self_timed=True,
    ),
)
