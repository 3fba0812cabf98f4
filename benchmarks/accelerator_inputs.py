"""Input files of the accelerator benchmarks, and the functions that prepare their samples.

Three tasks, modelled on those of MLPerf Storage but small enough for two cores. Its U-Net 3D reads
files of about 147 MB, its ResNet-50 photographs of about 115 kB, and its CosmoFlow records of 2.8
MB. Here:

    images   batches of 32 JPEGs of 500 x 375: decode, crop, resize to 224 x 224, flip (OpenCV)
    volumes  batches of 2 arrays of 96 MB: read the file, crop 128^3, flip, standardize (NumPy)
    tokens   batches of 64 texts of 1,024 words: look up, mask 15 % (pure Python, holds the GIL)

Files are in the page cache, in a folder per task. A sample's number selects its file and seeds its
augmentation, so all contenders prepare the same samples.
"""
# ruff: noqa: PLC0415  (OpenCV is needed for images only)

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = [
    "BUSY_CORES",
    "CROPPED",
    "TASKS",
    "VOCABULARY",
    "Images",
    "Task",
    "Tokens",
    "Volumes",
    "batch_seconds",
    "load",
    "step_seconds",
]

VOCABULARY = 32_768

#: Share of the cores that preparing batches at the rate of the training steps keeps busy.
BUSY_CORES = 0.75

_MASK, _MASKED = 0, 0.15

#: Height and width of crops of images, relative to those of the images.
CROPPED = 0.8


class Task(Protocol):
    """Files, and the samples made of them."""

    @property
    def name(self) -> str: ...

    @property
    def batch(self) -> int: ...

    def write(self, inputs: Path) -> None:
        """Write the files."""

    def prepare(self, inputs: Path, number: int) -> Any:
        """Return sample `number`, an array, as a training step needs it."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Photographs; samples are uint8 of shape (side, side, 3)."""

    name: str = "images"
    batch: int = 32
    files: int = 256
    side: int = 224

    def write(self, inputs: Path) -> None:
        """Write a JPEG per image."""
        folder = _folder(self, inputs)
        from benchmarks.jpeg import photographs

        for number, data in enumerate(photographs(self.files)):
            (folder / f"{number}.jpg").write_bytes(data)

    def prepare(self, inputs: Path, number: int) -> Any:
        """Decode an image, and augment it as in the training of ResNets."""
        cv2 = _one_threaded_cv2()
        data = np.fromfile(inputs / self.name / f"{number % self.files}.jpg", np.uint8)
        image = cv2.imdecode(data, cv2.IMREAD_COLOR)
        generator = random.Random(number)
        height, width = (int(CROPPED * size) for size in image.shape[:2])
        top = generator.randint(0, image.shape[0] - height)
        left = generator.randint(0, image.shape[1] - width)
        image = image[top : top + height, left : left + width]
        image = cv2.resize(image, (self.side, self.side), interpolation=cv2.INTER_LINEAR)
        if generator.random() < 0.5:
            image = cv2.flip(image, 1)
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Large arrays; samples are float32 of shape (crop, crop, crop)."""

    name: str = "volumes"
    batch: int = 2
    files: int = 4
    side: int = 288
    crop: int = 128

    def write(self, inputs: Path) -> None:
        """Write a file of side^3 float32 per volume."""
        folder = _folder(self, inputs)
        generator = np.random.default_rng(0)
        for number in range(self.files):
            generator.random(self.side**3, np.float32).tofile(folder / f"{number}.raw")

    def prepare(self, inputs: Path, number: int) -> Any:
        """Read a volume and return a standardized crop."""
        path = inputs / self.name / f"{number % self.files}.raw"
        volume = np.fromfile(path, np.float32).reshape((self.side,) * 3)
        generator = random.Random(number)
        starts = [generator.randint(0, self.side - self.crop) for _ in range(3)]
        crop = volume[tuple(slice(start, start + self.crop) for start in starts)]
        if generator.random() < 0.5:
            crop = crop[::-1]
        crop = crop - crop.mean()
        crop /= crop.std()
        return crop


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Texts; samples are int32 of shape (length,)."""

    name: str = "tokens"
    batch: int = 64
    files: int = 512
    length: int = 1024

    def write(self, inputs: Path) -> None:
        """Write a file of words per text."""
        folder = _folder(self, inputs)
        generator = np.random.default_rng(0)
        for number in range(self.files):
            words = generator.integers(1, VOCABULARY, self.length).tolist()
            (folder / f"{number}.txt").write_text(" ".join(f"w{word}" for word in words))

    def prepare(self, inputs: Path, number: int) -> Any:
        """Look up the words of a text, and mask some."""
        ids = _word_ids()
        generator = random.Random(number)
        words = (inputs / self.name / f"{number % self.files}.txt").read_text().split()
        tokens = [_MASK if generator.random() < _MASKED else ids[word] for word in words]
        return np.array(tokens, np.int32)


TASKS: tuple[Task, ...] = (Images(), Volumes(), Tokens())


def load(task: Task, inputs: Path) -> Callable[[Any], tuple[Any, Any]]:
    """Return the function from a sample's number to the sample and its number (int32)."""

    def prepared(number: Any) -> tuple[Any, Any]:
        return task.prepare(inputs, int(number)), np.int32(number)

    return prepared


def batch_seconds(task: Task, inputs: Path, batches: int = 5) -> float:
    """Return the processor time in which one thread prepares a batch, a median."""
    times = []
    for index in range(batches + 1):
        began = time.thread_time()
        first = index * task.batch
        np.stack([task.prepare(inputs, n) for n in range(first, first + task.batch)])
        times.append(time.thread_time() - began)
    return statistics.median(times[1:])  # the first fills the page cache


def step_seconds(task: Task, inputs: Path) -> float:
    """Return the duration of a training step.

    An input pipeline that keeps `BUSY_CORES` of the cores busy, and no more, keeps the accelerator
    busy. Processor time does not depend on other load.
    """
    return batch_seconds(task, inputs) / (BUSY_CORES * len(os.sched_getaffinity(0)))


def _folder(task: Task, inputs: Path) -> Path:
    folder = inputs / task.name
    folder.mkdir(exist_ok=True)
    return folder


@cache
def _word_ids() -> dict[str, int]:
    return {f"w{number}": number for number in range(VOCABULARY)}


@cache
def _one_threaded_cv2() -> Any:
    import cv2

    cv2.setNumThreads(1)
    return cv2
