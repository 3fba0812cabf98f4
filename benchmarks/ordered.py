"""What does it cost that a service gives elements in the order of one process, and does it scale?

Rows in batches: the plan is cut above the batch, so that workers make whole batches. Photographs in
record files, read in turn: `list_files().interleave(TFRecordDataset).map(decode).batch(32)`; the
same with `.shuffle(10_000)` before the map is in `ordered_shuffled`. Each is read in order and in
any order, exactly once, through two worker processes, and the photographs also through one. The map
has one thread, so that a second worker has something to add where a core is left for it.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import write_tfrecord
from benchmarks.jpeg import decode, one_threaded_cv2, photographs
from benchmarks.local_service import local_service
from benchmarks.workload import Check, Contender, Elements, Target, Workload, expect

__all__ = ["WORKLOADS", "beside_any_order", "check_images", "decoded", "write_inputs"]

IMAGES, SHARDS, SIDE, BATCH = 512, 16, 112, 32
ROWS, ROWS_A_BATCH, WIDTH = 1_000_000_000, 256, 1024


def write_inputs(directory: Path) -> None:
    """Write shards of photographs of half the size."""
    encoded = list(photographs(IMAGES, height=188, width=250))
    for shard in range(SHARDS):
        write_tfrecord(directory / f"{shard:02}.tfrecord", encoded[shard::SHARDS])


def _rows(_: Path) -> Any:
    import headrace as hr

    def made(number: Any) -> Any:
        return np.full(WIDTH, int(number), np.int32)  # a call for each

    return hr.Dataset.range(ROWS).map(made).batch(ROWS_A_BATCH)


def decoded(inputs: Path, *, shuffled: bool) -> Any:
    """Return the dataset of decoded photographs, in batches."""
    import headrace as hr

    def load(record: bytes) -> Any:
        return decode(one_threaded_cv2(), record, SIDE)

    records = (
        hr.Dataset.list_files(str(inputs / "*.tfrecord"), shuffle=False)
        .repeat()
        .interleave(hr.TFRecordDataset, cycle_length=4)
    )
    if shuffled:
        records = records.shuffle(10_000, seed=1)
    return records.map(load).batch(BATCH)


def _files(inputs: Path) -> Any:
    return decoded(inputs, shuffled=False)


def _check_rows(batches: Elements) -> None:
    for batch in islice(batches, 20):
        expect(batch.shape == (ROWS_A_BATCH, WIDTH), f"a batch is {batch.shape}")
        expect(bool((np.diff(batch[:, 0]) == 1).all()), "a batch has gaps")


def _check_rows_in_order(batches: Elements) -> None:
    first = [int(batch[0, 0]) for batch in islice(batches, 20)]
    expect(first == [n * ROWS_A_BATCH for n in range(20)], f"batches start with {first}")


def check_images(batches: Elements) -> None:
    """Check the shape of a few batches."""
    for batch in islice(batches, 4):
        expect(batch.shape == (BATCH, SIDE, SIDE, 3), f"a batch is {batch.shape}")


def beside_any_order(
    name: str,
    dataset: Callable[[Path], Any],
    *,
    check: Check,
    in_order: Check,
    at_least: float,
    one_worker: bool,
) -> Workload:
    """Ordered and not, with two workers and, where that is asked, with one."""
    counts = (2, 1) if one_worker else (2,)
    contenders = [
        Contender(
            name=("headrace" if is_ordered else "headrace, any order")
            + (", 1 worker" if workers == 1 else ""),
            build=local_service(dataset, workers=workers, ordered=is_ordered),
            needs=("headrace", "cv2") if one_worker else ("headrace",),
            # Each is compared with the same of one worker.
            role="headrace" if workers == 2 and (is_ordered or one_worker) else "peer",
            check=in_order if is_ordered else check,
        )
        for workers in counts
        for is_ordered in (True, False)
    ]
    return Workload(
        name=f"ordered, {name}",
        unit="rows" if dataset is _rows else "images",
        check=check,
        consume=len,
        reopen=False,
        stretch=0.6,
        contenders=tuple(contenders),
        targets=(Target(of=("headrace, any order",), at_least=at_least),),
    )


WORKLOADS = (
    beside_any_order(
        "cut above the batch",
        _rows,
        check=_check_rows,
        in_order=_check_rows_in_order,
        at_least=0.95,
        one_worker=False,
    ),
    beside_any_order(
        "JPEG files interleaved",
        _files,
        check=check_images,
        in_order=check_images,
        at_least=0.9,
        one_worker=True,
    ),
)
