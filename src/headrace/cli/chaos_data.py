"""What the chaos demonstration reads: files of compressed images, and the hashes of what comes.

Apart from the demonstration itself, because workers import it.
"""

from __future__ import annotations

import functools
import hashlib
import random
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr

__all__ = ["ElementsHash", "SequenceHash", "batches", "decode", "images", "write_files"]

_BATCH_SIZE = 16
_SHUFFLE_BUFFER = 64
_SIDE = 16
_NUMBER_BYTES = 8


def write_files(folder: Path, files: int, rows: int, seed: int) -> int:
    """Write files of rows; return how many rows there are in all.

    Args:
        folder: Where to.
        files: How many files.
        rows: How many rows a file has about: files differ, as real ones do.
        seed: Of their contents.
    """
    chance = random.Random(seed)
    total = 0
    for file in range(files):
        with hr.io.TFRecordWriter(str(folder / f"images-{file:03d}.tfrecord")) as writer:
            for _ in range(chance.randint(rows // 2, rows + rows // 2)):
                image = chance.randbytes(_SIDE * _SIDE)
                writer.write(total.to_bytes(_NUMBER_BYTES, "little") + zlib.compress(image))
                total += 1
    return total


def decode(record: bytes, pause: float) -> dict[str, Any]:
    """Turn a record into an image and its number; take a while, as the decoding of photos does."""
    if pause:
        time.sleep(pause)
    image = np.frombuffer(zlib.decompress(record[_NUMBER_BYTES:]), np.uint8)
    return {
        "image": image.reshape(_SIDE, _SIDE).astype(np.float32) / np.float32(255),
        "number": np.int64(int.from_bytes(record[:_NUMBER_BYTES], "little")),
    }


def images(folder: Path, pause: float) -> hr.Dataset:
    """Return the images: of files in a random order, several open, decoded.

    Args:
        folder: Where the files are.
        pause: Seconds that a row takes to decode.
    """
    return (
        hr.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)
        .interleave(hr.TFRecordDataset, cycle_length=4)
        .map(functools.partial(decode, pause=pause))
    )


def batches(rows: hr.Dataset) -> hr.Dataset:
    """Return images shuffled and in batches."""
    return rows.shuffle(_SHUFFLE_BUFFER, seed=2).batch(_BATCH_SIZE)


class SequenceHash:
    """Hash of batches in their order: of shape, dtype and bytes of each array."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def take(self, batch: Mapping[str, Any]) -> None:
        """Take in the next batch."""
        _feed(self._hash.update, batch)

    @property
    def text(self) -> str:
        """The hash of what was taken in so far."""
        return self._hash.hexdigest()


class ElementsHash:
    """Hash of elements in any order and in batches of any size: one that comes twice counts twice.

    It is the sum of the elements' own hashes.
    """

    _MODULUS = 1 << 128

    def __init__(self) -> None:
        self._sum = 0

    def take(self, batch: Mapping[str, Any]) -> None:
        """Take in the elements of another batch."""
        for row in range(len(next(iter(batch.values())))):
            own = hashlib.blake2b(digest_size=16)
            _feed(own.update, {name: array[row] for name, array in batch.items()})
            self._sum = (self._sum + int.from_bytes(own.digest(), "big")) % self._MODULUS

    @property
    def text(self) -> str:
        """The hash of what was taken in so far."""
        return f"{self._sum:032x}"


def _feed(update: Callable[[bytes], object], arrays: Mapping[str, Any]) -> None:
    for name, each in sorted(arrays.items()):
        array = np.asarray(each)
        update(f"{name} {array.shape} {array.dtype.str}\n".encode())
        update(array.tobytes())
