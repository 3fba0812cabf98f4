"""How fast are elements taken in turn from several datasets?

One dataset of consecutive numbers for each outer element, `cycle_length` of them open at a time,
`block_length` elements from each in its turn; read by single elements, and in batches of 256. The
numbers are there for the asking: what is timed is the interleaving, and the hand-over.

Datasets of 10 000 elements are files of records, say; of 20, windows, or what is known about one
user. Of those, each is opened for little: a function returns it, and in Headrace and Grain that is
a Python function, while tf.data traces it once and opens datasets in C++. So they have no target.
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

__all__ = ["WORKLOADS", "in_turn"]

BATCH = 256
_ENDLESS = 1 << 40

#: The most single elements that are checked: some take 100 µs for each. Of batches, so many are
#: that every slot has had a second dataset in it.
_MOST_CHECKED_ONE_BY_ONE = 2_000


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One way to interleave.

    Attributes:
        cycle: Datasets that are open.
        block: Elements in a turn.
        length: Elements of a dataset.
        batch: Elements that are read at once; None: single ones.
    """

    cycle: int
    block: int
    length: int = 10_000
    batch: int | None = None

    @property
    def name(self) -> str:
        way = "one by one" if self.batch is None else f"by {self.batch}"
        short = "" if self.length > 1000 else f" of {self.length}"
        return f"interleave {self.cycle}{short}, blocks of {self.block}, {way}"


def in_turn(cycle: int, block: int, length: int) -> Iterator[int]:
    """Yield the numbers in the order in which they are due, by the rule and not by speed."""
    slots = [iter(range(slot * length, (slot + 1) * length)) for slot in range(cycle)]
    opened = cycle
    while True:
        for slot in range(cycle):
            given = list(islice(slots[slot], block))
            yield from given
            if not given:  # the slot is taken by the next dataset in the turn that finds it empty
                slots[slot] = iter(range(opened * length, (opened + 1) * length))
                opened += 1
                yield from islice(slots[slot], block)


def _check(case: _Case) -> Callable[[Elements], None]:
    def check(elements: Elements) -> None:
        wanted = case.cycle * case.length + 4 * BATCH
        if case.batch is None:
            wanted = min(wanted, _MOST_CHECKED_ONE_BY_ONE)
        due = np.fromiter(in_turn(case.cycle, case.block, case.length), np.int64, wanted)
        if case.batch is None:
            found = np.array(list(islice(elements, wanted)))
        else:
            found = np.concatenate([np.asarray(b) for b in islice(elements, wanted // case.batch)])
        expect(found.dtype == np.int64, f"elements are {found.dtype}")
        expect(bool((found == due[: len(found)]).all()), "elements come out of turn")

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
    """The same by arithmetic, where a dataset is a whole number of blocks."""

    def groups() -> Iterator[Any]:
        size = case.cycle * case.length
        cycles = BATCH // gcd(size, BATCH)  # so that a group is cut into whole batches
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
    if case.block == 1:  # Grain has no other blocks
        contenders.append(Contender(name="grain", build=_grain(case), needs=("grain",)))
    contenders.append(Contender(name="NumPy, by arithmetic", build=_numpy(case), role="limit"))
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
    _workload(_Case(cycle=16, block=16), 5.0),
    _workload(_Case(cycle=16, block=16, batch=BATCH), 5.0),
    _workload(_Case(cycle=4, block=1, length=20), None),
    _workload(_Case(cycle=4, block=1, length=20, batch=BATCH), None),
)
