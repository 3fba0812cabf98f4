"""Random elements, for the tests of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Example:
    features: Any
    weight: Any


_PACKED = np.dtype([("x", "<f4"), ("y", ">i2", (2,)), ("tag", "S3")])
_PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)

dtypes = st.sampled_from(
    [np.dtype(name) for name in ("?", "i1", "u2", "<i4", ">i4", "i8", "u8", "f2", "f4", ">f8")]
    + [np.dtype(name) for name in ("c8", ">c16", "M8[ns]", "M8[D]", ">M8[s]", "m8[us]", "V5", "g")]
    + [_PACKED, _PADDED, np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)]
)
strings = st.one_of(st.binary(max_size=12), st.text(max_size=8))


def array_of(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Make an array of random bytes, whatever the dtype; its padding, if any, is arbitrary."""
    if dtype.kind in "fc" and dtype.char in "gG":
        return np.random.default_rng(seed).integers(0, 9, shape).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2, size, np.uint8)
    return np.ndarray(shape, dtype, raw.tobytes()).copy()


def object_array(shape: tuple[int, ...], kind: type, seed: int) -> np.ndarray[Any, Any]:
    array = np.empty(shape, object)
    flat = array.reshape(-1)
    rng = np.random.default_rng(seed)
    for index in range(flat.size):
        raw = rng.integers(0, 128, rng.integers(0, 9), np.uint8).tobytes()
        flat[index] = raw if kind is bytes else raw.decode("ascii")
    return array


seeds = st.integers(0, 2**31)
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
arrays = st.one_of(
    st.builds(array_of, dtypes, shapes, seeds),
    st.builds(object_array, shapes, st.sampled_from([bytes, str]), seeds),
)
scalars = st.one_of(
    st.builds(lambda dtype, seed: array_of(dtype, (1,), seed)[0], dtypes, seeds),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(allow_nan=False).map(np.float64),
)
leaves = st.one_of(arrays, scalars, strings)
keys = st.one_of(st.text(max_size=5), st.integers(-5, 5))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(keys, children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Example, children, children),
    )


elements = st.recursive(st.one_of(leaves, st.none()), containers, max_leaves=6)


def same(a: Any, b: Any) -> bool:
    """Whether two elements are equal in types, structure, dtypes and bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype.kind == "O":
            held = list(map(type, a.reshape(-1))) == list(map(type, b.reshape(-1)))
            return held and a.tolist() == b.tolist()
        if a.dtype.names is not None:
            return all(same(np.asarray(a[name]), np.asarray(b[name])) for name in a.dtype.names)
        return bool(np.all(a == b)) if a.dtype.char == "g" else a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Example):
        return same(a.features, b.features) and same(a.weight, b.weight)
    return bool(a == b)
