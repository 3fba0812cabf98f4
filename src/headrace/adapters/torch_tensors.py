"""Conversion between NumPy and torch elements, without copies where possible.

| NumPy | torch |
|---|---|
| bool, int8 to int64, uint8, float16 to float64, complex64, complex128 | the same memory |
| uint16, uint32, uint64 | the same memory; torch supports few operations on them |
| bfloat16, float8 of ml_dtypes | the same memory, as torch's own dtype of that name |
| a scalar | a tensor without axes |
| another byte order, a negative stride, read-only or unaligned memory | a copy |
| `str`, `bytes`, object arrays of them, None | unchanged |
| dates, structured dtypes, long double | an error that names the component |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.distribute.values import PerReplica
from headrace.element.description import decode_dtype
from headrace.element.structure import container_kind, describe_component, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import InvalidElementError
from headrace.frameworks.torch import EXTENDED

__all__ = ["map_tensors", "to_arrays", "to_tensors"]

_SAME_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
#: Value of `ndarray.flags.num` for writeable and aligned memory.
_WRITEABLE_ALIGNED = 0x0500
_DTYPE_HINTS = {
    "M": "an integer, as in map(lambda t: t.astype('int64'))",
    "m": "an integer, as in map(lambda t: t.astype('int64'))",
    "V": "one component for each field, or a dtype that torch supports",
    "g": "float64, as in map(lambda x: x.astype('float64'))",
    "G": "complex128, as in map(lambda x: x.astype('complex128'))",
}


def to_tensors(element: Any) -> Any:
    """Convert the arrays and numbers of an element to tensors; the structure stays the same.

    Raises:
        InvalidElementError: If torch has no such dtype; the message names the component.
    """
    if type(element) is np.ndarray:
        return _to_tensor(element)
    try:
        if type(element) is dict:
            return {
                name: _to_tensor(value) if type(value) is np.ndarray else to_tensors(value)
                for name, value in element.items()
            }
        return map_leaves(_to_tensor, element)
    except InvalidElementError:
        leaves, structure = flatten(element)
        for path, leaf in zip(structure.paths, leaves, strict=True):
            _raise_with_path(path, leaf)
        raise


def map_tensors(fn: Callable[[Any], Any], element: Any) -> Any:
    """Apply `fn` to each tensor of an element, including those in `PerReplica` values."""

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fn(leaf)
        if isinstance(leaf, PerReplica):
            return PerReplica(map_tensors(fn, value) for value in leaf.values)
        return leaf

    return map_leaves(map_leaf, element)


def _raise_with_path(path: str, leaf: Any) -> None:
    """Raise the error of an unsupported leaf again, with the leaf's path."""
    try:
        _to_tensor(leaf)
    except InvalidElementError as error:
        raise InvalidElementError(f"{describe_component(path)}: {error}") from None


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return _array_to_tensor(leaf)
    if isinstance(leaf, np.generic):
        return _array_to_tensor(np.array(leaf))
    if isinstance(leaf, PerReplica):
        return PerReplica(to_tensors(value) for value in leaf.values)
    return leaf


def _array_to_tensor(array: NDArray[Any]) -> Any:
    dtype = array.dtype
    if dtype in _SAME_DTYPES:
        if array.flags.num & _WRITEABLE_ALIGNED == _WRITEABLE_ALIGNED:
            try:
                return torch.from_numpy(array)
            except ValueError:
                pass  # strides that torch does not support: negative, or a fraction of an item
        return torch.from_numpy(array.copy("K") if _has_plain_strides(array) else array.copy())
    if dtype.kind == "O":
        return array
    if dtype.newbyteorder("=") in _SAME_DTYPES:
        return torch.from_numpy(array.astype(dtype.newbyteorder("=")))
    extended = EXTENDED.get(dtype.name)
    if extended is None:
        hint = _DTYPE_HINTS.get(
            dtype.char, _DTYPE_HINTS.get(dtype.kind, "a dtype that torch supports")
        )
        raise InvalidElementError(f"torch has no dtype for NumPy's {dtype}; convert it to {hint}")
    bits, like = extended
    return _array_to_tensor(array.view(bits)).view(like)


def _has_plain_strides(array: NDArray[Any]) -> bool:
    return all(stride >= 0 and not stride % array.itemsize for stride in array.strides)


# --- torch to NumPy -------------------------------------------------------------------------------


def to_arrays(value: Any) -> Any:
    """Convert the tensors of a torch value to arrays, and lists of them to tuples.

    Raises:
        FailedPreconditionError: If a tensor's dtype requires ml_dtypes, which is not installed.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_to_array(value)
    kind = type(value)
    if kind is dict:
        return {name: to_arrays(part) for name, part in value.items()}
    if kind is tuple:
        return tuple(map(to_arrays, value))
    if kind is list and any(isinstance(part, torch.Tensor | tuple | dict | list) for part in value):
        return _convert_list(value)
    if container_kind(kind):  # namedtuples and dataclasses
        leaves, structure = flatten(value)
        return unflatten(structure, [to_arrays(leaf) for leaf in leaves])
    return value


def _convert_list(value: list[Any]) -> Any:
    """Keep a list of numbers, also a nested one, which is an array; convert others to tuples."""
    parts = [to_arrays(part) for part in value]
    rows = all(isinstance(part, list) for part in parts)
    return parts if rows else tuple(parts)


def _tensor_to_array(tensor: Any) -> Any:
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in EXTENDED:
        return tensor.numpy()
    bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
    return tensor.view(bits).numpy().view(decode_dtype(name))
