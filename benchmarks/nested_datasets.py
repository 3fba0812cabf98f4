"""Throughput of datasets that a function opens, 20 elements each, in batches of 256.

The cost of opening a dataset dominates: in Headrace a Python function returns it, while tf.data
traces the function once and opens datasets in C++.
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

LENGTH, BATCH, CYCLE = 20, 256, 4
_ENDLESS = 1 << 40
_ROWS = np.arange(LENGTH)


def _plain(x: Any) -> Any:
    return x * 2 + 1


#: Functions of the class of a framework's datasets that return what to open.
_FUNCTIONS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "a range": lambda dataset: lambda x: dataset.range(LENGTH),
    "a range with a map": lambda dataset: lambda x: dataset.range(LENGTH).map(_plain),
    "an array": lambda dataset: lambda x: dataset.from_tensor_slices(_ROWS),
}


def _open(dataset: Any, name: str, cycle: int) -> Any:
    outer, function = dataset.range(_ENDLESS), _FUNCTIONS[name](dataset)
    opened = (
        outer.flat_map(function) if cycle == 1 else outer.interleave(function, cycle_length=cycle)
    )
    return opened.batch(BATCH)


def _expected(name: str, cycle: int) -> Iterator[int]:
    rows = _plain(_ROWS) if "map" in name else _ROWS
    while True:
        for row in rows:
            yield from [int(row)] * cycle


def _check(name: str, cycle: int) -> Callable[[Elements], None]:
    def check(batches: Elements) -> None:
        found = np.concatenate([np.asarray(batch) for batch in islice(batches, 20)])
        expected = np.fromiter(_expected(name, cycle), np.int64, len(found))
        expect(bool((found == expected).all()), "elements are out of order")

    return check


def _headrace(name: str, cycle: int) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = _open(hr.Dataset, name, cycle)
        return lambda: iter(dataset)

    return build


def _tf_data(name: str, cycle: int) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = _open(tf.data.Dataset, name, cycle)
        return lambda: dataset.as_numpy_iterator()

    return build


def _workload(name: str, cycle: int) -> Workload:
    step = "flat_map" if cycle == 1 else f"interleave {cycle}"
    return Workload(
        name=f"{step} of {name}, 20 elements each",
        unit="elements",
        check=_check(name, cycle),
        consume=len,
        contenders=(
            Contender(
                name="headrace", build=_headrace(name, cycle), needs=("headrace",), role="headrace"
            ),
            Contender(name="tf.data", build=_tf_data(name, cycle), needs=("tensorflow",)),
        ),
    )


WORKLOADS = tuple(_workload(name, cycle) for cycle in (1, CYCLE) for name in _FUNCTIONS)
