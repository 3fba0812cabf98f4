"""Values of the user's in states: elements as JSON, and back bit for bit.

    [structure, [leaf, ...]]     structure as in `element.description`
    leaf: "text"                 str
          {"b": base64}          bytes
          {"d": dtype, "v": base64}                 a NumPy scalar
          {"d": dtype, "s": shape, "v": base64}     an array, in the order of C
          {"o": "b" or "t", "s": shape, "v": [...]} an array of bytes (base64) or of str

It is a format: values that were saved once are read for ever. Nothing is pickled.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from headrace.element.description import (
    decode_dtype,
    decode_structure,
    encode_dtype,
    encode_structure,
)
from headrace.element.structure import Element, flatten, unflatten

__all__ = ["decode_value", "encode_value"]


def encode_value(value: Element) -> Any:
    """Return a normal element as a JSON value.

    Raises:
        InvalidElementError: It is nested too deeply, or holds Python objects.
    """
    leaves, structure = flatten(value)
    return [encode_structure(structure), [_encode_leaf(leaf) for leaf in leaves]]


def decode_value(saved: Any) -> Element:
    """Return the element that `encode_value` was given, in memory of its own."""
    structure, leaves = saved
    return unflatten(decode_structure(structure), [_decode_leaf(leaf) for leaf in leaves])


def _encode_leaf(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return leaf
    if isinstance(leaf, bytes):
        return {"b": _text(leaf)}
    if leaf.dtype.kind == "O":
        held = leaf.ravel().tolist()
        if held and isinstance(held[0], str):
            return {"o": "t", "s": list(leaf.shape), "v": held}
        return {"o": "b", "s": list(leaf.shape), "v": [_text(item) for item in held]}
    encoded = {"d": encode_dtype(leaf.dtype), "v": _text(leaf.tobytes())}
    return {**encoded, "s": list(leaf.shape)} if isinstance(leaf, np.ndarray) else encoded


def _decode_leaf(saved: Any) -> Any:
    if isinstance(saved, str):
        return saved
    if "b" in saved:
        return base64.b64decode(saved["b"])
    if "o" in saved:
        made = np.empty(len(saved["v"]), object)
        made[:] = saved["v"] if saved["o"] == "t" else [base64.b64decode(v) for v in saved["v"]]
        return made.reshape(saved["s"])
    dtype = decode_dtype(saved["d"])
    flat = np.frombuffer(bytearray(base64.b64decode(saved["v"])), dtype)
    return flat.reshape(saved["s"]) if "s" in saved else flat[0]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
