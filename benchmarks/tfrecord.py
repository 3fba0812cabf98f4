"""Throughput of reading small records from TFRecord files.

200,000 records of 100 bytes in 4 files (23 MB with frames, in the page cache) are read with
verified checksums: as single records, where the cost per element dominates, and in batches of 256,
the better case for tf.data.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "write_inputs"]

RECORDS, LENGTH, FILES, BATCH = 200_000, 100, 4, 256
_FRAME = 16
_BLOCK = 1 << 20


def write_inputs(directory: Path) -> None:
    """Write the four files."""
    from benchmarks.inputs import write_tfrecord

    rows = _rows().reshape(FILES, RECORDS // FILES, LENGTH)
    for number, part in enumerate(rows):
        write_tfrecord(directory / f"{number}.tfrecord", (row.tobytes() for row in part))


def _rows() -> np.ndarray[Any, np.dtype[np.uint8]]:
    # No zero bytes: NumPy strips them from the end of fixed-width bytes.
    return np.random.default_rng(0).integers(1, 256, (RECORDS, LENGTH), dtype=np.uint8)


def _files(inputs: Path) -> list[str]:
    return [str(path) for path in sorted(inputs.glob("*.tfrecord"))]


def _check_records(records: Elements) -> None:
    found = list(records)
    expect(all(type(record) is bytes for record in found), f"a record is a {type(found[0])}")
    expect(b"".join(found) == _rows().tobytes(), "the records differ from what was written")


def _check_batches(batches: Elements) -> None:
    found = list(batches)
    expect(all(len(batch) == BATCH for batch in found[:-1]), "a batch is not full")
    _check_records(iter([record for batch in found for record in batch.tolist()]))


def _headrace(batch: int | None) -> Any:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import headrace as hr

        dataset = hr.TFRecordDataset(_files(inputs))
        if batch is not None:
            dataset = dataset.batch(batch)
        return lambda: iter(dataset)

    return build


def _tf_data(batch: int | None) -> Any:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import tensorflow as tf

        dataset = tf.data.TFRecordDataset(_files(inputs))
        if batch is not None:
            dataset = dataset.batch(batch)
        return lambda: dataset.as_numpy_iterator()

    return build


def _read_and_sum(inputs: Path, _: ExitStack) -> Pipeline:
    import google_crc32c

    def epoch() -> Iterator[tuple[int, int]]:
        for name in _files(inputs):
            crc, length = 0, 0
            with open(name, "rb") as file:
                while block := file.read(_BLOCK):
                    crc = google_crc32c.extend(crc, block)
                    length += len(block)
            yield length // (LENGTH + _FRAME), crc

    return epoch


def _check_sums(files: Elements) -> None:
    found = list(files)
    expect(
        [records for records, _ in found] == [RECORDS // FILES] * FILES,
        "wrong number of records in a file",
    )
    expect(len({crc for _, crc in found}) == FILES, "checksums of different files are equal")


def _read_and_slice(inputs: Path, _: ExitStack) -> Pipeline:
    def epoch() -> Iterator[bytes]:
        for name in _files(inputs):
            data = Path(name).read_bytes()
            for start in range(_FRAME - 4, len(data), LENGTH + _FRAME):
                yield data[start : start + LENGTH]

    return epoch


def _count(part: tuple[int, int]) -> int:
    return part[0]


_LIMIT = Contender(
    name="file read + crc32c",
    build=_read_and_sum,
    needs=("google_crc32c",),
    role="limit",
    consume=_count,
    check=_check_sums,
)

WORKLOADS = (
    Workload(
        name="TFRecord, single records",
        unit="records",
        check=_check_records,
        contenders=(
            Contender(name="headrace", build=_headrace(None), needs=("headrace",), role="headrace"),
            Contender(name="tf.data", build=_tf_data(None), needs=("tensorflow",)),
            Contender(
                name="file read + slices in a Python generator, no checksum",
                build=_read_and_slice,
                role="limit",
            ),
            _LIMIT,
        ),
        targets=(Target(of=("tf.data",), at_least=5.0),),
    ),
    Workload(
        name="TFRecord, batch(256)",
        unit="records",
        check=_check_batches,
        consume=len,
        contenders=(
            Contender(
                name="headrace", build=_headrace(BATCH), needs=("headrace",), role="headrace"
            ),
            Contender(name="tf.data", build=_tf_data(BATCH), needs=("tensorflow",)),
            _LIMIT,
        ),
    ),
)
