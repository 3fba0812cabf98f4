"""Cost and scaling of ordered reading, which delivers elements in the order of a single process.

Whole batches: the plan is partitioned after the batch, so that workers compute whole batches of
rows. Photographs from interleaved record files:
`list_files().interleave(TFRecordDataset).map(decode).batch(32)`; `ordered_shuffled` adds
`.shuffle(10_000)` before the map. Each is read ordered and unordered, exactly once, through two
worker processes, and the photographs also through one. The map uses one thread, so that a second
worker can increase the rate if a core is free for it.
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

__all__ = ["WORKLOADS", "check_images", "compare_orders", "decoded", "write_inputs"]

IMAGES, SHARDS, SIDE, BATCH = 512, 16, 112, 32
ROWS, ROWS_PER_BATCH, WIDTH = 1_000_000_000, 256, 1024


def write_inputs(directory: Path) -> None:
    """Write shards of photographs of half the usual width and height."""
    encoded = list(photographs(IMAGES, height=188, width=250))
    for shard in range(SHARDS):
        write_tfrecord(directory / f"{shard:02}.tfrecord", encoded[shard::SHARDS])


def _rows(_: Path) -> Any:
    import headrace as hr

    def made(number: Any) -> Any:
        return np.full(WIDTH, int(number), np.int32)  # a call for each row

    return hr.Dataset.range(ROWS).map(made).batch(ROWS_PER_BATCH)


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
        expect(batch.shape == (ROWS_PER_BATCH, WIDTH), f"a batch is {batch.shape}")
        expect(bool((np.diff(batch[:, 0]) == 1).all()), "a batch has gaps")


def _check_rows_in_order(batches: Elements) -> None:
    first = [int(batch[0, 0]) for batch in islice(batches, 20)]
    expect(first == [n * ROWS_PER_BATCH for n in range(20)], f"batches start with {first}")


def check_images(batches: Elements) -> None:
    """Check the shape of a few batches."""
    for batch in islice(batches, 4):
        expect(batch.shape == (BATCH, SIDE, SIDE, 3), f"a batch is {batch.shape}")


def compare_orders(
    name: str,
    dataset: Callable[[Path], Any],
    *,
    check: Check,
    in_order: Check,
    at_least: float,
    needs: tuple[str, ...] = ("headrace", "cv2"),
) -> Workload:
    """Return a workload that compares ordered and unordered reading.

    Args:
        name: Name in the table, after "ordered, ".
        dataset: Returns the dataset, given the directory of input files.
        check: Check of unordered elements.
        in_order: Check of ordered elements.
        at_least: Minimum ratio of the rate of ordered to that of unordered reading.
        needs: Modules that the dataset needs.
    """
    return Workload(
        name=f"ordered, {name}",
        unit="rows" if dataset is _rows else "images",
        check=check,
        consume=len,
        reopen=False,
        contenders=tuple(
            Contender(
                name=contender,
                build=local_service(dataset, workers=2, ordered=ordered),
                needs=needs,
                role="headrace" if ordered else "peer",
                check=in_order if ordered else check,
            )
            for contender, ordered in (("headrace", True), ("headrace, unordered", False))
        ),
        targets=(Target(of=("headrace, unordered",), at_least=at_least),),
    )


WORKLOADS = (
    compare_orders(
        "whole batches",
        _rows,
        check=_check_rows,
        in_order=_check_rows_in_order,
        at_least=0.95,
        needs=("headrace",),
    ),
    compare_orders(
        "JPEG files interleaved",
        _files,
        check=check_images,
        in_order=check_images,
        at_least=0.9,
    ),
)
