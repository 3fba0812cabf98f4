"""The demo's data: digits as TFRecord shards, and the pipeline that reads them.

Separate from the demo itself, because workers import it: they need neither JAX nor scikit-learn.

Shards are many and small, and steps that need many examples (shuffle, batch) come after
`distribute`, in the training process. So a worker holds the examples of only a few shards at any
time, and only those are lost with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headrace as hr

__all__ = ["BATCH_SIZE", "NUM_SHARDS", "augment", "parse", "training_data", "write_shards"]

BATCH_SIZE = 32
NUM_SHARDS = 96

_SHUFFLE_BUFFER = 256

_FEATURES = {
    "image": hr.io.FixedLenFeature((), bytes),
    "label": hr.io.FixedLenFeature((), np.int64),
    "number": hr.io.FixedLenFeature((), np.int64),
}


def write_shards(folder: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Write one TFRecord of an Example (8x8 image, label, running number) for each digit."""
    for shard in range(NUM_SHARDS):
        with hr.io.TFRecordWriter(str(folder / f"digits-{shard:02d}.tfrecord")) as writer:
            for number in range(shard, len(images), NUM_SHARDS):
                example = {
                    "image": images[number].tobytes(),
                    "label": labels[number],
                    "number": number,
                }
                writer.write(hr.io.encode_example(example))


def parse(record: bytes) -> dict[str, Any]:
    """Turn a serialized Example into an image in [0, 1], its label and its number."""
    example = hr.io.parse_example(record, _FEATURES)
    image = np.frombuffer(example["image"], np.uint8).reshape(8, 8)
    return {
        "image": image.astype(np.float32) / np.float32(16),
        "label": example["label"],
        "number": example["number"],
    }


def augment(example: dict[str, Any]) -> dict[str, Any]:
    """Rotate, shift and dim an image a little and add noise, at random: plain NumPy."""
    rng = np.random.default_rng()
    angle, scale = rng.normal(0, 0.12), rng.normal(1, 0.05)
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    middle = np.array([[3.5], [3.5]])
    points = turn @ (_PIXELS - middle) + middle + rng.normal(0, 0.3, (2, 1))
    image = _interpolate(example["image"], np.clip(points, 0, 6.999))
    image = image * rng.uniform(0.9, 1) + rng.normal(0, 0.02, image.shape)
    return {**example, "image": np.clip(image, 0, 1).astype(np.float32)}


_PIXELS = np.mgrid[0:8, 0:8].reshape(2, 64).astype(np.float64)


def _interpolate(image: NDArray[np.float32], points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the image at 64 points between its pixels, interpolated bilinearly."""
    low = points.astype(np.int64)
    (dy, dx), (y, x) = points - low, low
    top = image[y, x] * (1 - dx) + image[y, x + 1] * dx
    bottom = image[y + 1, x] * (1 - dx) + image[y + 1, x + 1] * dx
    mixed: NDArray[np.float64] = (top * (1 - dy) + bottom * dy).reshape(8, 8)
    return mixed


def training_data(folder: Path, target: str, *, read_ahead: int) -> hr.Dataset:
    """Return the batches of an epoch; the service at `target` reads, parses and augments.

    Args:
        folder: Directory of the shards.
        target: Address of the dispatcher.
        read_ahead: Number of result batches buffered in this process.
    """
    files = hr.Dataset.list_files(str(folder / "*.tfrecord"))
    return (
        files.interleave(hr.TFRecordDataset, cycle_length=2)
        .map(parse)
        .map(augment)
        .apply(
            hr.service.distribute(
                processing_mode=hr.service.ShardingPolicy.DYNAMIC,
                service=target,
                max_outstanding_requests=read_ahead,
            )
        )
        .shuffle(_SHUFFLE_BUFFER)
        .batch(BATCH_SIZE)
    )
