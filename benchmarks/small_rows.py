"""Throughput of shuffling and batching small rows in memory, and of repeating tiny datasets.

60,000 rows of 784 bytes (the size of MNIST) are shuffled and read in batches of 256. The work per
row is a copy of 784 bytes, so Python calls and thread switches per row dominate. tf.data and
Headrace shuffle in a buffer of 10,000, the others permute all rows.

Datasets of one number and of 16 numbers are repeated forever; the cost of starting an epoch
dominates.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

ROWS, WIDTH, BATCH, BUFFER = 60_000, 784, 256, 10_000


def _rows() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return random rows that start with the row number in four bytes."""
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), dtype=np.uint8)
    rows[:, :4] = np.arange(ROWS, dtype="<u4").view(np.uint8).reshape(ROWS, 4)
    return rows


def _check(batches: Elements) -> None:
    rows, seen = _rows(), []
    for batch in batches:
        batch = np.asarray(batch)
        expect(
            batch.dtype == np.uint8 and batch.ndim == 2, f"a batch is {batch.dtype}, {batch.shape}"
        )
        numbers = np.ascontiguousarray(batch[:, :4]).view("<u4")[:, 0]
        expect(bool((rows[numbers] == batch).all()), "a row's bytes differ from its source")
        seen.append(numbers)
    expect(all(len(numbers) == BATCH for numbers in seen[:-1]), "a batch is not full")
    order = np.concatenate(seen)
    expect(len(order) == ROWS and len(np.unique(order)) == ROWS, "an epoch is not every row once")
    expect(bool((np.diff(order.astype(np.int64)) != 1).mean() > 0.9), "the rows are not shuffled")


def _headrace(_: Path, __: ExitStack) -> Pipeline:
    import headrace as hr

    dataset = hr.Dataset.from_tensor_slices(_rows()).shuffle(BUFFER, seed=1).batch(BATCH)
    return lambda: iter(dataset)


def _tf_data(_: Path, __: ExitStack) -> Pipeline:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(_rows()).shuffle(BUFFER, seed=1).batch(BATCH)
    return lambda: dataset.as_numpy_iterator()


def _torch(_: Path, __: ExitStack) -> Pipeline:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.rows = torch.from_numpy(_rows())

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.rows[index]

    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    return lambda: iter(loader)


def _torch_getitems(_: Path, __: ExitStack) -> Pipeline:
    import torch
    from torch.utils.data import DataLoader, Dataset, RandomSampler

    class Rows(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.rows = _rows()

        def __len__(self) -> int:
            return len(self.rows)

        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            # Gathered by NumPy: torch indexing takes eight times as long here.
            return torch.from_numpy(self.rows[indices])

    rows = Rows()
    loader = DataLoader(
        rows, batch_size=BATCH, sampler=RandomSampler(rows), collate_fn=lambda batch: batch
    )
    return lambda: iter(loader)


def _grain(threads: int | None) -> Any:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import grain

        dataset = grain.MapDataset.source(_rows()).shuffle(seed=1).batch(BATCH)
        if threads is None:
            return lambda: iter(dataset)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        read = dataset.to_iter_dataset(options)
        return lambda: iter(read)

    return build


def _numpy(_: Path, __: ExitStack) -> Pipeline:
    rows, generator = _rows(), np.random.default_rng(1)

    def epoch() -> Iterator[Any]:
        order = generator.permutation(ROWS)
        for start in range(0, ROWS, BATCH):
            yield rows[order[start : start + BATCH]]

    return epoch


_REPEATED = 42


def _repeated() -> Workload:
    """Return a workload that repeats one number forever."""
    numbers = np.array([_REPEATED])

    def headrace(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = hr.Dataset.from_tensor_slices(numbers).repeat()
        return lambda: iter(dataset)

    def tf_data(_: Path, __: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(numbers).repeat()
        return lambda: dataset.as_numpy_iterator()

    def grain(_: Path, __: ExitStack) -> Pipeline:
        import grain

        dataset = grain.MapDataset.source(numbers).repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        read = dataset.to_iter_dataset(options)
        return lambda: iter(read)

    def python(_: Path, __: ExitStack) -> Pipeline:
        return lambda: cycle(numbers)

    def check(elements: Elements) -> None:
        found = {int(x) for x in islice(elements, 100)}
        expect(found == {_REPEATED}, f"the elements are {found}")

    builds: tuple[tuple[str, Callable[[Path, ExitStack], Pipeline], tuple[str, ...]], ...] = (
        ("tf.data", tf_data, ("tensorflow",)),
        ("grain, no threads", grain, ("grain",)),
    )
    return Workload(
        name="one number, repeated",
        unit="elements",
        check=check,
        contenders=(
            Contender(name="headrace", build=headrace, needs=("headrace",), role="headrace"),
            *(Contender(name=name, build=build, needs=needs) for name, build, needs in builds),
            Contender(name="itertools.cycle", build=python, role="limit"),
        ),
        targets=(Target(of=("tf.data",), at_least=5.0),),
    )


WORKLOADS = (
    Workload(
        name="small rows",
        unit="rows",
        check=_check,
        consume=len,
        contenders=(
            Contender(name="headrace", build=_headrace, needs=("headrace",), role="headrace"),
            Contender(name="tf.data", build=_tf_data, needs=("tensorflow",)),
            Contender(name="torch DataLoader", build=_torch, needs=("torch",)),
            Contender(
                name="torch DataLoader, __getitems__", build=_torch_getitems, needs=("torch",)
            ),
            Contender(name="grain, default", build=_grain(None), needs=("grain",)),
            Contender(name="grain, no threads", build=_grain(0), needs=("grain",)),
            Contender(name="NumPy x[order[i:i+256]]", build=_numpy, role="limit"),
        ),
        targets=(
            Target(of=("tf.data",), at_least=5.0),
            Target(of=("torch DataLoader, __getitems__",), at_least=1.0),
            Target(of=("NumPy x[order[i:i+256]]",), at_least=0.7),
        ),
    ),
    _repeated(),
)
