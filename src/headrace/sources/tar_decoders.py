"""Decoders of the files of a sample, by extension."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.element.normalize import normalize
from headrace.errors import InvalidElementError

__all__ = ["DECODERS", "find_decoder"]


def _decode_int(data: bytes) -> np.int64:
    return np.int64(int(data))


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8")


def _decode_json(data: bytes) -> Any:
    return _to_element(json.loads(data))


def _to_element(value: Any) -> Any:
    """Return a JSON value as an element; lists that are not arrays become tuples."""
    if isinstance(value, dict):
        return {key: _to_element(item) for key, item in value.items()}
    if isinstance(value, list):
        try:
            return normalize(value)
        except InvalidElementError:
            return tuple([_to_element(item) for item in value])
    return normalize(value)


def _decode_npy(data: bytes) -> Any:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it is not a .npy file")
    return normalize(array)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": _decode_int,
    "cls2": _decode_int,
    "index": _decode_int,
    "json": _decode_json,
    "npy": _decode_npy,
    "txt": _decode_text,
}
"""Decoder of each extension. They raise ValueError, EOFError, OverflowError or InvalidElementError
for invalid data."""


def find_decoder(extension: str) -> Callable[[bytes], Any] | None:
    """Return the decoder of an extension or of its last part, as in `meta.json`; None if none."""
    return DECODERS.get(extension) or DECODERS.get(extension.rpartition(".")[2])
