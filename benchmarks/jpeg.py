"""Throughput of decoding, resizing and batching photographs.

1024 synthetic JPEGs of 500 x 375 (about 76 kB each) are decoded, resized to 224 x 224 (bilinear)
and batched by 64. Headrace and tf.data read 8 TFRecord shards of tf.Example; Grain and torch, which
do not read TFRecord, one file per image. All files are in the page cache. OpenCV uses one thread
per call for all contenders, which parallelize the calls themselves.

All contenders use the same OpenCV calls except tf.data, which has its own operations on the same
JPEG library. Each thread of Grain works on its own batch, so by default sixteen batches (1024
images) arrive at about the same time. Rounds are therefore four times as long as elsewhere;
otherwise images decoded before the clock started would be a large part of the count. Grain also
runs with one thread per core, as the others do.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "decode", "one_threaded_cv2", "photographs", "write_inputs"]

IMAGES, SHARDS, BATCH, SIDE = 1024, 8, 64, 224
_HEIGHT, _WIDTH, _QUALITY = 375, 500, 90

#: Allowed mean difference, of 255 levels: decoders round differently (fast or exact transforms).
_TOLERANCE = 3.0


def write_inputs(directory: Path) -> None:
    """Write each image as a file, and all of them as TFRecord shards."""
    from benchmarks.inputs import encode_example, write_tfrecord

    encoded = list(photographs(IMAGES))
    for number, data in enumerate(encoded):
        (directory / f"{number:05}.jpg").write_bytes(data)
    size = IMAGES // SHARDS
    for shard in range(SHARDS):
        numbers = range(shard * size, (shard + 1) * size)
        records = (encode_example(encoded[n], n) for n in numbers)
        write_tfrecord(directory / f"{shard}.tfrecord", records)


def photographs(count: int, *, height: int = _HEIGHT, width: int = _WIDTH) -> Iterator[bytes]:
    """Yield synthetic photographs as JPEG."""
    import cv2

    generator = np.random.default_rng(0)
    for number in range(count):
        image = _synthetic_image(cv2, generator, height, width)
        done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        expect(done, f"image {number} could not be encoded")
        yield data.tobytes()


def _synthetic_image(
    cv2: Any, generator: np.random.Generator, height: int = _HEIGHT, width: int = _WIDTH
) -> Any:
    """Return an image with smooth colours, shapes, and as much grain as a photograph has."""
    coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    for _ in range(8):
        x, y, radius = (int(v) for v in generator.integers(10, 375, 3))
        colour = tuple(int(v) for v in generator.integers(0, 256, 3))
        cv2.circle(image, (x, y), radius // 4, colour, thickness=-1)
    grain = generator.integers(-_GRAIN, _GRAIN + 1, image.shape, dtype=np.int16)
    return np.clip(image + grain, 0, 255).astype(np.uint8)


#: Amplitude of the grain in levels; determines the size of the files.
_GRAIN = 19


def _jpegs(inputs: Path) -> list[str]:
    return [str(path) for path in sorted(inputs.glob("*.jpg"))]


def _shards(inputs: Path) -> list[str]:
    return [str(path) for path in sorted(inputs.glob("*.tfrecord"))]


def one_threaded_cv2() -> Any:
    """Return the OpenCV module, limited to one thread per call."""
    import cv2

    cv2.setNumThreads(1)
    return cv2


def decode(cv2: Any, data: bytes, side: int = SIDE) -> Any:
    """Decode a photograph; return RGB as uint8 of shape (side, side, 3)."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR)


class _Check:
    """Checks that an epoch has each image once, and compares the first with their sources."""

    def __init__(self, sample: int = 16) -> None:
        self.sample = sample

    def __call__(self, batches: Elements) -> None:
        cv2 = one_threaded_cv2()
        generator = np.random.default_rng(0)
        expected = {
            n: cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)[..., ::-1]
            for n, image in enumerate(_synthetic_image(cv2, generator) for _ in range(self.sample))
        }
        seen: list[int] = []
        for images, labels in islice(batches, IMAGES // BATCH):
            images, labels = np.asarray(images), np.asarray(labels)
            expect(
                images.shape == (BATCH, SIDE, SIDE, 3) and images.dtype == np.uint8,
                f"images are {images.dtype} {images.shape}",
            )
            expect(labels.shape == (BATCH,), f"labels are {labels.shape}")
            for image, label in zip(images, labels.tolist(), strict=True):
                if label in expected:
                    difference = np.abs(image.astype(np.int16) - expected[label]).mean()
                    expect(
                        difference < _LOSS + _TOLERANCE,
                        f"image {label} is off by {difference:.1f} levels",
                    )
            seen.extend(labels.tolist())
        expect(sorted(seen) == list(range(IMAGES)), "an epoch is not every image once")


#: Mean difference, in levels, caused by JPEG compression of the grain at this quality.
_LOSS = 6.0


def _headrace(inputs: Path, _: ExitStack) -> Pipeline:
    import headrace as hr

    cv2 = one_threaded_cv2()
    features = {
        "image": hr.io.FixedLenFeature((), bytes),
        "label": hr.io.FixedLenFeature((), np.int64),
    }

    def load(record: bytes) -> Any:
        example = hr.io.parse_example(record, features)
        return decode(cv2, example["image"]), example["label"]

    dataset = (
        hr.TFRecordDataset(_shards(inputs))
        .repeat()
        .map(load, num_parallel_calls=hr.AUTOTUNE)
        .batch(BATCH)
        .prefetch(hr.AUTOTUNE)
    )
    return lambda: iter(dataset)


def _tf_data(inputs: Path, _: ExitStack) -> Pipeline:
    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def load(record: Any) -> Any:
        example = tf.io.parse_single_example(record, features)
        image = tf.io.decode_jpeg(example["image"], channels=3)
        return tf.cast(tf.image.resize(image, [SIDE, SIDE]), tf.uint8), example["label"]

    dataset = (
        tf.data.TFRecordDataset(_shards(inputs))
        .repeat()
        .map(load, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda: dataset.as_numpy_iterator()


def _grain(threads: int | None) -> Any:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        import grain

        cv2, paths = one_threaded_cv2(), _jpegs(inputs)

        def load(number: int) -> Any:
            return decode(cv2, Path(paths[number]).read_bytes()), number

        images = grain.MapDataset.source(range(IMAGES)).repeat().map(load).batch(BATCH)
        options = None if threads is None else grain.ReadOptions(num_threads=threads)
        dataset = images.to_iter_dataset(options)
        return lambda: iter(dataset)

    return build


def _torch(inputs: Path, _: ExitStack) -> Pipeline:
    import torch
    from torch.utils.data import DataLoader, Dataset

    cv2, paths = one_threaded_cv2(), _jpegs(inputs)

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return 1000 * IMAGES  # like the others, never ends: workers would drain

        def __getitem__(self, number: int) -> Any:
            number %= IMAGES
            data = Path(paths[number]).read_bytes()
            return torch.from_numpy(decode(cv2, data)), number

    def start(_: int) -> None:
        cv2.setNumThreads(1)

    loader = DataLoader(Images(), batch_size=BATCH, num_workers=2, worker_init_fn=start)
    return lambda: iter(loader)


def _two_threads(inputs: Path, stack: ExitStack) -> Pipeline:
    cv2 = one_threaded_cv2()
    data = [Path(path).read_bytes() for path in _jpegs(inputs)]
    pool = stack.enter_context(ThreadPoolExecutor(2))

    def load(numbers: range) -> Any:
        return np.stack([decode(cv2, data[n]) for n in numbers]), np.array(numbers)

    def batches() -> Iterator[Any]:
        starts = cycle(range(0, IMAGES, BATCH))
        waiting: deque[Future[Any]] = deque()
        while True:
            while len(waiting) < 4:
                start = next(starts)
                waiting.append(pool.submit(load, range(start, start + BATCH)))
            yield waiting.popleft().result()

    return batches


def _count(batch: Any) -> int:
    return len(batch[1])


_BEST = (
    "tf.data",
    "grain, default threads",
    "grain, 2 threads",
    "torch DataLoader, 2 workers",
)

WORKLOADS = (
    Workload(
        name="JPEG, decode + resize",
        unit="images",
        check=_Check(),
        consume=_count,
        long_rounds=True,
        contenders=(
            Contender(name="headrace", build=_headrace, needs=("headrace", "cv2"), role="headrace"),
            Contender(name="tf.data", build=_tf_data, needs=("tensorflow",)),
            Contender(name="grain, default threads", build=_grain(None), needs=("grain", "cv2")),
            Contender(name="grain, 2 threads", build=_grain(2), needs=("grain", "cv2")),
            Contender(name="torch DataLoader, 2 workers", build=_torch, needs=("torch", "cv2")),
            Contender(
                name="OpenCV, 2 threads, one batch each",
                build=_two_threads,
                needs=("cv2",),
                role="limit",
            ),
        ),
        targets=(Target(of=_BEST, at_least=1.0),),
    ),
)
