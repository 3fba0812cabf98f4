"""Cost of mapping a function over scalars.

range(n).map(f).batch(1024) for two functions: x * x, which works on whole arrays unchanged, and a
step of the Collatz sequence, which branches on the value and does not. tf.data traces both into a
graph; its `numpy_function` row is its way to run arbitrary Python, which cannot be traced. The row
"by hand" has the batch before the map, since x * x also works on arrays.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

N, BATCH = 100_000_000, 1024
CHUNK = 64 * BATCH
"""Numbers per call in the NumPy row: a call per batch takes 1.5 times as long, and Headrace makes
larger calls, too."""

Function = Callable[[Any], Any]


def collatz(x: Any) -> Any:
    """Return the next number of the Collatz sequence."""
    if x % 2 == 0:
        return x // 2
    return 3 * x + 1


def _check(expected: Callable[[Any], Any]) -> Callable[[Elements], None]:
    def check(batches: Elements) -> None:
        for number, batch in enumerate(islice(batches, 10)):
            batch = np.asarray(batch)
            x = np.arange(number * BATCH, (number + 1) * BATCH)
            expect(batch.dtype == np.int64, f"a batch is {batch.dtype}, not int64")
            expect(np.array_equal(batch, expected(x)), f"wrong values in batch {number}")

    return check


def _headrace(function: Function, parallel: bool) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        calls = hr.AUTOTUNE if parallel else None
        dataset = hr.Dataset.range(N).map(function, num_parallel_calls=calls).batch(BATCH)
        return lambda: iter(dataset)

    return build


def _tf_data(function: Function, parallel: bool) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        calls = tf.data.AUTOTUNE if parallel else None
        dataset = tf.data.Dataset.range(N).map(function, num_parallel_calls=calls).batch(BATCH)
        return lambda: dataset.as_numpy_iterator()

    return build


def _tf_data_by_hand(function: Function) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = tf.data.Dataset.range(N).batch(BATCH).map(function)
        return lambda: dataset.as_numpy_iterator()

    return build


def _tf_data_numpy_function(function: Function) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        def call(x: Any) -> Any:
            return tf.numpy_function(function, [x], tf.int64)

        dataset = tf.data.Dataset.range(N).map(call).batch(BATCH)
        return lambda: dataset.as_numpy_iterator()

    return build


def _chunks(function: Function) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        def batches() -> Iterator[Any]:
            for start in range(0, N, CHUNK):
                values = function(np.arange(start, min(start + CHUNK, N)))
                for first in range(0, len(values), BATCH):
                    yield values[first : first + BATCH]

        return batches

    return build


def _python_loop(function: Function) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        def batches() -> Iterator[Any]:
            for start in range(0, N, BATCH):
                yield np.array([function(x) for x in range(start, start + BATCH)])

        return batches

    return build


def _square(x: Any) -> Any:
    return x * x


WORKLOADS = (
    Workload(
        name="scalar map, x * x",
        unit="elements",
        check=_check(_square),
        consume=len,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(lambda x: x * x, parallel=False),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="tf.data",
                build=_tf_data(lambda x: x * x, parallel=False),
                needs=("tensorflow",),
            ),
            Contender(
                name="tf.data, map AUTOTUNE",
                build=_tf_data(lambda x: x * x, parallel=True),
                needs=("tensorflow",),
            ),
            Contender(
                name="tf.data, batch before map by hand",
                build=_tf_data_by_hand(lambda x: x * x),
                needs=("tensorflow",),
            ),
            Contender(name="NumPy arange ** 2", build=_chunks(_square), role="limit"),
        ),
        targets=(Target(of=("tf.data", "tf.data, map AUTOTUNE"), at_least=20.0),),
    ),
    Workload(
        name="scalar map, a branch",
        unit="elements",
        check=_check(lambda x: np.where(x % 2 == 0, x // 2, 3 * x + 1)),
        consume=len,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(collatz, parallel=False),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, map AUTOTUNE",
                build=_headrace(collatz, parallel=True),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="tf.data, AutoGraph",
                build=_tf_data(collatz, parallel=False),
                needs=("tensorflow",),
            ),
            Contender(
                name="tf.data, AutoGraph, map AUTOTUNE",
                build=_tf_data(collatz, parallel=True),
                needs=("tensorflow",),
            ),
            Contender(
                name="tf.data, numpy_function",
                build=_tf_data_numpy_function(collatz),
                needs=("tensorflow",),
            ),
            Contender(name="a Python loop", build=_python_loop(collatz), role="limit"),
        ),
    ),
)
