"""Throughput of sliding windows and of batches of similar length.

window(32, shift=1).flat_map(lambda w: w.batch(32)) over rows of an array, and
bucket_by_sequence_length over sequences of 1 to 63 numbers.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

SIZE = 32
_ROWS = np.arange(400_000, dtype=np.float32).reshape(-1, 4)
_LENGTHS = np.random.default_rng(1).integers(1, 64, 4096)
_BOUNDARIES, _BATCH_SIZES = [16, 32, 48], [64, 32, 16, 16]


def _windows(source: Any) -> Any:
    return source.window(SIZE, shift=1, drop_remainder=True).flat_map(lambda w: w.batch(SIZE))


def _rows(dataset: Any) -> Any:
    return _windows(dataset.from_tensor_slices(_ROWS).repeat())


def _check_rows(batches: Elements) -> None:
    for first, batch in enumerate(islice(batches, 100)):
        expect(np.array_equal(batch, _ROWS[first : first + SIZE]), f"wrong window {first}")


def _check_buckets(batches: Elements) -> None:
    for batch in islice(batches, 100):
        found = np.asarray(batch)
        expect(found.shape[0] in _BATCH_SIZES, f"a batch of {found.shape[0]} sequences")
        expect(bool((np.count_nonzero(found, axis=1) > 0).all()), "an empty sequence")


def _headrace(make: Callable[[Any], Any]) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = make(hr.Dataset)
        return lambda: iter(dataset)

    return build


def _tf_data(make: Callable[[Any], Any]) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = make(tf.data.Dataset)
        return lambda: dataset.as_numpy_iterator()

    return build


def _headrace_buckets(_: Path, __: ExitStack) -> Pipeline:
    import headrace as hr

    dataset = (
        hr.Dataset.from_tensor_slices(_LENGTHS)
        .repeat()
        .map(lambda n: np.full(n, 1))
        .bucket_by_sequence_length(len, _BOUNDARIES, _BATCH_SIZES)
    )
    return lambda: iter(dataset)


def _tf_data_buckets(_: Path, __: ExitStack) -> Pipeline:
    import tensorflow as tf

    dataset = (
        tf.data.Dataset.from_tensor_slices(_LENGTHS)
        .repeat()
        .map(lambda n: tf.fill([n], tf.constant(1, tf.int64)))
        .bucket_by_sequence_length(lambda x: tf.shape(x)[0], _BOUNDARIES, _BATCH_SIZES)
    )
    return lambda: dataset.as_numpy_iterator()


def _workload(
    name: str, unit: str, check: Any, headrace: Any, tf_data: Any, consume: Any
) -> Workload:
    return Workload(
        name=name,
        unit=unit,
        check=check,
        consume=consume,
        contenders=(
            Contender(name="headrace", build=headrace, needs=("headrace",), role="headrace"),
            Contender(name="tf.data", build=tf_data, needs=("tensorflow",)),
        ),
        targets=(Target(of=("tf.data",), at_least=5.0),),
    )


WORKLOADS = (
    _workload(
        "windows of 32 rows of an array, shift 1",
        "windows",
        _check_rows,
        _headrace(_rows),
        _tf_data(_rows),
        None,
    ),
    _workload(
        "bucket_by_sequence_length, 1 to 63 numbers",
        "sequences",
        _check_buckets,
        _headrace_buckets,
        _tf_data_buckets,
        len,
    ),
)
