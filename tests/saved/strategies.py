"""Random datasets that can be saved: elements of one structure, each component of one dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

Rng: TypeAlias = np.random.Generator
Make: TypeAlias = Callable[[Rng], Any]
"""Makes a component of the next element."""


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Example:
    features: Any
    weight: Any


DTYPES = [
    np.dtype(name)
    for name in (
        *("?", "i1", "u1", "i2", ">i2", "u2", "i4", ">u4", "i8", ">i8", "u8", "f2", ">f2", "f4"),
        *("f8", ">f8", "g", "c8", ">c8", "c16", "G", "M8[ns]", "M8[s]", "M8[D]", ">M8[us]"),
        *("M8[25s]", "m8[ms]", "m8[h]", ">m8[ns]", "V5"),
    )
] + [
    np.dtype([("x", "<f4"), ("y", ">i2", (2,)), ("tag", "S3")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
]


def array_of(rng: Rng, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Make an array of random bits, including NaN payloads, NaT and infinities."""
    if dtype.kind == "b" or dtype.char in "gG":
        return rng.integers(0, 2, shape).astype(dtype)
    made = np.zeros(shape, dtype)
    if dtype.names is not None:
        for name in dtype.names:
            field = made[name]
            field[...] = np.frombuffer(rng.bytes(field.nbytes), field.dtype).reshape(field.shape)
        return made
    return np.frombuffer(rng.bytes(made.nbytes), dtype).reshape(shape).copy()


def text(rng: Rng) -> str:
    letters = "abc\0é√𝄞" + ("\ud800" if rng.integers(50) == 0 else "")
    return "".join(rng.choice(list(letters), rng.integers(0, 6)))


def binary(rng: Rng) -> bytes:
    return rng.bytes(int(rng.integers(0, 9)))


def random_leaf(rng: Rng) -> Make:
    """Return a function that makes a component with one dtype and number of axes."""
    kind = rng.choice(["scalar", "fixed", "varying", "text", "binary", "texts", "binaries"])
    if kind == "text":
        return text
    if kind == "binary":
        return binary
    ndim = int(rng.integers(1, 4))
    shape = tuple(rng.integers(0, 4, ndim).tolist())
    if kind in ("texts", "binaries"):
        make = text if kind == "texts" else binary
        varies = bool(rng.integers(2))
        return lambda r: objects(
            r, make, tuple(r.integers(0, 3, ndim).tolist()) if varies else shape
        )
    dtype = DTYPES[rng.integers(len(DTYPES))]
    if kind == "scalar":
        return lambda r: array_of(r, dtype, (1,))[0]
    if kind == "fixed":
        return lambda r: array_of(r, dtype, shape)
    return lambda r: array_of(r, dtype, tuple(r.integers(0, 4, ndim).tolist()))


def objects(rng: Rng, make: Make, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    made = np.empty(shape, object)
    made.reshape(-1)[:] = [make(rng) for _ in range(made.size)]
    return made


def random_structure(rng: Rng, depth: int = 0) -> Make:
    """Return a function that makes elements of one random structure."""
    kind = rng.choice(["leaf", "dict", "tuple", "pair", "example", "none"])
    if kind == "leaf" or depth > 2:
        return random_leaf(rng)
    if kind == "none" and depth:
        return lambda r: None
    if kind == "pair":
        left, right = random_structure(rng, depth + 1), random_structure(rng, depth + 1)
        return lambda r: Pair(left(r), right(r))
    if kind == "example":
        left, right = random_structure(rng, depth + 1), random_structure(rng, depth + 1)
        return lambda r: Example(left(r), right(r))
    children = [random_structure(rng, depth + 1) for _ in range(rng.integers(1, 4))]
    if kind == "dict":
        keys = ["a", "a.b", "x\udc80", 3, "3", "é"]
        named = dict(zip(rng.permutation(len(keys)).tolist(), children, strict=False))
        return lambda r: {keys[place]: child(r) for place, child in named.items()}
    return lambda r: tuple(child(r) for child in children)


def bits(element: Any) -> Any:
    """Return an element in a form for exact comparison: types, dtypes, shapes and bytes."""
    match element:
        case np.ndarray() | np.generic() if element.dtype.kind == "O":
            return "objects", element.shape, [(type(x), x) for x in element.reshape(-1)]
        case np.ndarray() | np.generic():
            kind = type(element).__name__
            array = np.asarray(element)
            if array.dtype.names is not None:
                held: Any = [bits(np.ascontiguousarray(array[n])) for n in array.dtype.names]
            elif array.dtype.char in "gG":
                held = array.tolist()  # ten bytes of sixteen count
            else:
                held = array.tobytes()
            return kind, array.dtype.str, str(array.dtype), array.shape, held
        case dict():
            return "dict", [(key, bits(value)) for key, value in element.items()]
        case tuple():
            return type(element), [bits(value) for value in element]
        case Example():
            return Example, bits(element.features), bits(element.weight)
    return type(element), element
