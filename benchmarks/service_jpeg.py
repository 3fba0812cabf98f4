"""Overhead of a data service for a realistic workload: photographs decoded on the same cores.

The photographs and the pipeline of `jpeg`: 8 TFRecord shards, decoded, resized and batched by 64,
with one thread per core. They run in the consumer's process, and in one worker process on the same
host that sends the batches; both use the same cores.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import encode_example, write_tfrecord
from benchmarks.jpeg import BATCH, SIDE, decode, one_threaded_cv2, photographs
from benchmarks.local_service import local_service
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "write_inputs"]

IMAGES, SHARDS = 256, 8


def write_inputs(directory: Path) -> None:
    """Write the shards of photographs."""
    encoded = list(photographs(IMAGES))
    for shard in range(SHARDS):
        numbers = range(shard, IMAGES, SHARDS)
        records = (encode_example(encoded[n], n) for n in numbers)
        write_tfrecord(directory / f"{shard}.tfrecord", records)


def _decoded(inputs: Path) -> Any:
    import headrace as hr

    features = {
        "image": hr.io.FixedLenFeature((), bytes),
        "label": hr.io.FixedLenFeature((), np.int64),
    }

    def load(record: bytes) -> Any:
        example = hr.io.parse_example(record, features)
        return decode(one_threaded_cv2(), example["image"]), example["label"]

    return (
        hr.TFRecordDataset([str(path) for path in sorted(inputs.glob("*.tfrecord"))])
        .repeat()
        .map(load, num_parallel_calls=hr.AUTOTUNE)
        .batch(BATCH)
        .prefetch(hr.AUTOTUNE)
    )


def _in_process(inputs: Path, _: ExitStack) -> Pipeline:
    dataset = _decoded(inputs)
    return lambda: iter(dataset)


def _check(batches: Elements) -> None:
    for images, labels in islice(batches, 4):
        expect(images.shape == (BATCH, SIDE, SIDE, 3), f"images are {images.shape}")
        expect(len(set(labels.tolist())) == BATCH, "a batch contains an image twice")


def _count(batch: Any) -> int:
    return len(batch[1])


WORKLOADS = (
    Workload(
        name="service, JPEG, decode + resize",
        unit="images",
        check=_check,
        consume=_count,
        reopen=False,
        contenders=(
            Contender(
                name="headrace",
                build=local_service(_decoded),
                needs=("headrace", "cv2"),
                role="headrace",
            ),
            Contender(name="headrace, in process", build=_in_process, needs=("headrace", "cv2")),
        ),
        targets=(Target(of=("headrace, in process",), at_least=0.95),),
    ),
)
