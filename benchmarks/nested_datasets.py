"""Throughput of datasets that a function opens, 20 elements each, in batches of 256.

The cost of opening a dataset dominates: in Headrace a Python function returns it, while tf.data
traces the function once and opens datasets in C++. `interleave` opens them four at a time.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Workload, expect

__all__ = ["WORKLOADS"]

LENGTH, BATCH = 20, 256
_ENDLESS = 1 << 40
_ROWS = np.arange(LENGTH)


def _plain(x: Any) -> Any:
    return x * 2 + 1


#: Functions of the class of a framework's datasets that return what to open.
_FUNCTIONS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "a range with a map": lambda dataset: lambda x: dataset.range(LENGTH).map(_plain),
    "an array": lambda dataset: lambda x: dataset.from_tensor_slices(_ROWS),
}


def _open(dataset: Any, name: str) -> Any:
    outer, function = dataset.range(_ENDLESS), _FUNCTIONS[name](dataset)
    return outer.flat_map(function).batch(BATCH)


def _expected(name: str) -> Iterator[int]:
    rows = _plain(_ROWS) if "map" in name else _ROWS
    while True:
        for row in rows:
            yield int(row)


def _check(name: str) -> Callable[[Elements], None]:
    def check(batches: Elements) -> None:
        found = np.concatenate([np.asarray(batch) for batch in islice(batches, 20)])
        expected = np.fromiter(_expected(name), np.int64, len(found))
        expect(bool((found == expected).all()), "elements are out of order")

    return check


def _headrace(name: str) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = _open(hr.Dataset, name)
        return lambda: iter(dataset)

    return build


def _tf_data(name: str) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = _open(tf.data.Dataset, name)
        return lambda: dataset.as_numpy_iterator()

    return build


def _workload(name: str) -> Workload:
    return Workload(
        name=f"flat_map of {name}, 20 elements each",
        unit="elements",
        check=_check(name),
        consume=len,
        contenders=(
            Contender(name="headrace", build=_headrace(name), needs=("headrace",), role="headrace"),
            Contender(name="tf.data", build=_tf_data(name), needs=("tensorflow",)),
        ),
    )


WORKLOADS = tuple(_workload(name) for name in _FUNCTIONS)
