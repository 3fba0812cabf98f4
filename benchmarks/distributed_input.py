"""Cost of distributing batches to replicas and of running a step on each.

range(n).batch(16) on eight logical CPUs: in each step a replica receives two rows and runs the
identity function on them. tf.distribute's MirroredStrategy does the same, with the step in a
tf.function, as its guide recommends. In the second workload a batch takes a millisecond to compute.
The limit is a loop over the dataset without replicas.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Bound, Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

N, BATCH, REPLICAS = 100_000_000, 16, 8
_WORK = np.random.default_rng(0).random(500)


def slow(x: Any) -> Any:
    """Return a batch after a millisecond of NumPy work, independent of the processor's speed."""
    stop = time.perf_counter() + 1e-3
    while time.perf_counter() < stop:
        np.sort(_WORK)
    return x


def _identity(x: Any) -> Any:
    return x


def _check(steps: Elements) -> None:
    for number, rows in enumerate(islice(steps, 20)):
        found = np.concatenate([np.asarray(part) for part in rows])
        expected = np.arange(number * BATCH, (number + 1) * BATCH)
        expect(np.array_equal(found, expected), f"wrong rows in step {number}")


def _headrace(function: Any) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        strategy = hr.distribute.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
        dataset = hr.Dataset.range(N).batch(BATCH).map(function)
        distributed = strategy.distribute_dataset(dataset)

        def steps() -> Elements:
            for batch in distributed:
                yield strategy.run(_identity, args=(batch,)).values

        return steps

    return build


def _plain(function: Any) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = hr.Dataset.range(N).batch(BATCH).map(function)
        return lambda: ((batch,) for batch in dataset)

    return build


def _mirrored(function: Any) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(REPLICAS)]
        tf.config.set_logical_device_configuration(cpu, parts)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
        dataset = tf.data.Dataset.range(N).batch(BATCH)
        if function is not _identity:

            def call(x: Any) -> Any:
                return tf.ensure_shape(tf.numpy_function(function, [x], tf.int64), [None])

            dataset = dataset.map(call)
        distributed = strategy.experimental_distribute_dataset(dataset)

        @tf.function
        def step(batch: Any) -> Any:
            return strategy.run(_identity, args=(batch,))

        def steps() -> Elements:
            for batch in distributed:
                yield strategy.experimental_local_results(step(batch))

        return steps

    return build


def _workload(name: str, function: Any, targets: tuple[Target | Bound, ...]) -> Workload:
    return Workload(
        name=name,
        unit="steps",
        contenders=(
            Contender(name="headrace", build=_headrace(function), role="headrace"),
            Contender(
                name="tf.distribute MirroredStrategy",
                build=_mirrored(function),
                needs=("tensorflow",),
            ),
            Contender(name="headrace without replicas", build=_plain(function), role="limit"),
        ),
        check=_check,
        targets=targets,
    )


WORKLOADS = (
    _workload(
        "distributed_no_op",
        _identity,
        (Target(of=("tf.distribute MirroredStrategy",), at_least=10.0), Bound(at_most=120e-6)),
    ),
    _workload(
        "distributed_millisecond",
        slow,
        (Target(of=("headrace without replicas",), at_least=0.8),),
    ),
)
