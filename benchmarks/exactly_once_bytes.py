"""Cost of exactly-once delivery for large elements, and for elements that are costly to compute.

Like `exactly_once`, for arrays of 64 KiB in epochs of 64 MiB, and for photographs from
interleaved record files that are decoded, resized and batched by 32.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exactly_once import compare_visitations
from benchmarks.inputs import write_tfrecord
from benchmarks.jpeg import decode, one_threaded_cv2, photographs
from benchmarks.workload import Elements, expect

__all__ = ["WORKLOADS", "write_inputs"]

IMAGES, SHARDS, SIDE, BATCH = 128, 8, 112, 32
ELEMENT_BYTES, EPOCH_BYTES = 64 << 10, 64 << 20
"""Size of an epoch of distinct arrays. Chunks of large rows end with the epoch, so epochs of a few
rows would not be representative."""
_CHECKED = 16
_PAGE = 4096


def write_inputs(directory: Path) -> None:
    """Write shards of photographs of half the usual width and height."""
    encoded = list(photographs(IMAGES, height=188, width=250))
    for shard in range(SHARDS):
        write_tfrecord(directory / f"{shard}.tfrecord", encoded[shard::SHARDS])


def _arrays(_: Path) -> Any:
    import headrace as hr

    shape = (EPOCH_BYTES // ELEMENT_BYTES, ELEMENT_BYTES)
    rows = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return hr.Dataset.from_tensor_slices(rows).repeat()


def _decoded(inputs: Path) -> Any:
    import headrace as hr

    def load(record: bytes) -> Any:
        return decode(one_threaded_cv2(), record, SIDE)

    files = hr.Dataset.list_files(str(inputs / "*.tfrecord"), shuffle=False).repeat()
    return files.interleave(hr.TFRecordDataset, cycle_length=4).map(load).batch(BATCH)


def _touch(element: Any) -> int:
    element[::_PAGE].sum()
    return 1


def _check_arrays(elements: Elements) -> None:
    for element in islice(elements, _CHECKED):
        expect(element.shape == (ELEMENT_BYTES,), f"an element is {element.shape}")


def _check_images(batches: Elements) -> None:
    for batch in islice(batches, 4):
        expect(batch.shape == (BATCH, SIDE, SIDE, 3), f"a batch is {batch.shape}")


WORKLOADS = (
    compare_visitations("64 KiB elements", _arrays, _check_arrays, consume=_touch),
    compare_visitations(
        "JPEG files",
        _decoded,
        _check_images,
        unit="images",
        consume=len,
        needs=("headrace", "cv2"),
    ),
)
