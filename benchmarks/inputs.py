"""Synthetic input files, generated from a seed without the libraries under test.

A file written by Headrace or TensorFlow could hide an error that its reader shares; the TFRecord
frame and the tf.Example message are short enough to encode here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

__all__ = ["encode_example", "write_tfrecord"]


def write_tfrecord(path: Path, records: Iterable[bytes]) -> None:
    """Write a TFRecord file; a frame is the length, its CRC, the bytes and their CRC."""
    with path.open("wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc(length) + record + _masked_crc(record))


def encode_example(image: bytes, label: int) -> bytes:
    """Encode `{"image": bytes, "label": int64}` as a tf.Example message."""
    features = {
        b"image": _field(1, _field(1, image)),  # Feature.bytes_list.value
        b"label": _field(3, _field(1, _varint(label))),  # Feature.int64_list.value, packed
    }
    entries = b"".join(
        _field(1, _field(1, key) + _field(2, value)) for key, value in features.items()
    )
    return _field(1, entries)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
