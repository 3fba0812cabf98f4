"""Throughput of interleaving several datasets.

There is a dataset of consecutive numbers for each outer element, `cycle_length` of them are open at
a time, and `block_length` elements are taken from each in turn; they are read as single elements or
in batches of 256. Numbers cost almost nothing, so the interleaving and the cost per element
dominate.

Datasets of 10,000 elements stand for record files; datasets of 20, for windows or the records of a
user. The cost of opening a dataset dominates with the latter: in Headrace and Grain a Python
function returns it, while tf.data traces the function once and opens datasets in C++. These
workloads have no target.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "expected_order"]

BATCH = 256
_ENDLESS = 1 << 40

#: Maximum number of single elements to check, some of which take 100 µs each. The check of batches
#: goes on until each slot has opened a second dataset.
_MAX_CHECKED_SINGLY = 2_000


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Parameters of an interleave.

    Attributes:
        cycle: Number of open datasets.
        block: Number of consecutive elements from a dataset.
        length: Number of elements of a dataset.
        batch: Batch size; None reads single elements.
    """

    cycle: int
    block: int
    length: int = 10_000
    batch: int | None = None

    @property
    def name(self) -> str:
        reading = "single elements" if self.batch is None else f"batches of {self.batch}"
        length = "" if self.length > 1000 else f" datasets of {self.length}"
        return f"interleave {self.cycle}{length}, blocks of {self.block}, {reading}"


def expected_order(cycle: int, block: int, length: int) -> Iterator[int]:
    """Yield the numbers in the specified order; written for clarity, not speed."""
    slots = [iter(range(slot * length, (slot + 1) * length)) for slot in range(cycle)]
    opened = cycle
    while True:
        for slot in range(cycle):
            found = list(islice(slots[slot], block))
            yield from found
            if not found:  # an exhausted dataset is replaced, and the new one takes this turn
                slots[slot] = iter(range(opened * length, (opened + 1) * length))
                opened += 1
                yield from islice(slots[slot], block)


def _check(case: _Case) -> Callable[[Elements], None]:
    def check(elements: Elements) -> None:
        count = case.cycle * case.length + 4 * BATCH
        if case.batch is None:
            count = min(count, _MAX_CHECKED_SINGLY)
        expected = np.fromiter(expected_order(case.cycle, case.block, case.length), np.int64, count)
        if case.batch is None:
            found = np.array(list(islice(elements, count)))
        else:
            found = np.concatenate([np.asarray(b) for b in islice(elements, count // case.batch)])
        expect(found.dtype == np.int64, f"elements are {found.dtype}")
        expect(bool((found == expected[: len(found)]).all()), "elements are out of order")

    return check


def _headrace(case: _Case) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        length = case.length
        dataset = hr.Dataset.range(_ENDLESS).interleave(
            lambda n: hr.Dataset.range(int(n) * length, (int(n) + 1) * length),
            cycle_length=case.cycle,
            block_length=case.block,
        )
        if case.batch is not None:
            dataset = dataset.batch(case.batch)
        return lambda: iter(dataset)

    return build


def _tf_data(case: _Case) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        length = case.length
        dataset = tf.data.Dataset.range(_ENDLESS).interleave(
            lambda n: tf.data.Dataset.range(n * length, (n + 1) * length),
            cycle_length=case.cycle,
            block_length=case.block,
        )
        if case.batch is not None:
            dataset = dataset.batch(case.batch)
        return lambda: dataset.as_numpy_iterator()

    return build


def _grain(case: _Case) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import grain

        length, plain = case.length, grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        datasets = grain.MapDataset.range(1 << 30).map(
            lambda n: grain.MapDataset.range(n * length, (n + 1) * length).to_iter_dataset(plain)
        )
        dataset = grain.experimental.InterleaveIterDataset(datasets, cycle_length=case.cycle)
        if case.batch is not None:
            dataset = dataset.batch(case.batch)
        return lambda: iter(dataset)

    return build


def _numpy(case: _Case) -> Any:
    """Return the builder of the same numbers by arithmetic; `block` must divide `length`."""

    def groups() -> Iterator[Any]:
        size = case.cycle * case.length
        cycles = BATCH // gcd(size, BATCH)  # a group is a whole number of batches
        shape = (cycles, case.cycle, case.length // case.block, case.block)
        first = 0
        while True:
            numbers = np.arange(first, first + cycles * size)
            yield numbers.reshape(shape).swapaxes(1, 2).reshape(-1)
            first += cycles * size

    def batches() -> Iterator[Any]:
        for group in groups():
            for start in range(0, len(group), BATCH):
                yield group[start : start + BATCH].copy()

    def singles() -> Iterator[Any]:
        for group in groups():
            yield from group

    def build(_: Path, __: ExitStack) -> Pipeline:
        return singles if case.batch is None else batches

    return build


def _workload(case: _Case, at_least: float | None) -> Workload:
    contenders = [
        Contender(name="headrace", build=_headrace(case), needs=("headrace",), role="headrace"),
        Contender(name="tf.data", build=_tf_data(case), needs=("tensorflow",)),
    ]
    if case.block == 1:  # Grain supports no other block length
        contenders.append(Contender(name="grain", build=_grain(case), needs=("grain",)))
    contenders.append(Contender(name="NumPy arithmetic", build=_numpy(case), role="limit"))
    return Workload(
        name=case.name,
        unit="elements",
        check=_check(case),
        consume=None if case.batch is None else len,
        contenders=tuple(contenders),
        targets=() if at_least is None else (Target(of=("tf.data",), at_least=at_least),),
    )


WORKLOADS = (
    _workload(_Case(cycle=4, block=1), 5.0),
    _workload(_Case(cycle=4, block=1, batch=BATCH), 5.0),
    _workload(_Case(cycle=4, block=1, length=20, batch=BATCH), None),
)
