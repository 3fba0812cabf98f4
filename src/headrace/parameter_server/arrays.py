"""Conversion of arrays of any framework to NumPy, and detection of tracing.

No framework is imported here: if a value is an array of one, it has been imported already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.bag_combiner import are_large_integers
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.specs import parse_dtype

__all__ = ["IndexedSlices", "as_array", "is_framework_array", "raise_if_tracing"]


def as_array(value: Any) -> NDArray[Any]:
    """Return a number or framework array as a NumPy array, without a copy if possible.

    Raises:
        FailedPreconditionError: If JAX is tracing the value, so that it has no numbers yet.
    """
    if type(value) is np.ndarray:
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_tensor(value, torch)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        raise FailedPreconditionError(
            "a JAX tracer has no concrete value: return it from the traced function, and pass the "
            "result of that function"
        )
    return np.asarray(value)


def _from_tensor(tensor: Any, torch: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        bits: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(parse_dtype("bfloat16"))
    found: NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    return found


def is_framework_array(value: Any) -> bool:
    """Return whether a value is an array of a framework."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        jax is not None and isinstance(value, jax.Array)
    )


def raise_if_tracing(description: str, instead: str = "read it outside and pass the array") -> None:
    """Raise if JAX is tracing a function: a value read now would become a constant in it.

    Args:
        description: Description of the object that is read.
        instead: What to do instead.

    Raises:
        FailedPreconditionError: If JAX is tracing.
    """
    core = sys.modules.get("jax._src.core")
    is_clean = getattr(core, "trace_state_clean", None)
    if is_clean is not None and not is_clean():
        raise FailedPreconditionError(
            f"{description} is read while JAX traces a function, and its current value would "
            f"become a constant of the compiled function: {instead}"
        )


# --- sparse gradients: rows of a variable or table, with a value for each -------------------------


class IndexedSlices:
    """Values for some rows of an array; a repeated row counts each time.

    >>> import headrace as hr
    >>> import numpy as np
    >>> hr.IndexedSlices(np.ones((2, 4), np.float32), [7, 3])
    <IndexedSlices of 2 rows, values (2, 4) float32>

    Args:
        values: A value for each index: an array of NumPy, JAX or PyTorch. Its first axes are those
            of `indices`, the others those of a row. Values broadcast along one of the first axes
            (`np.broadcast_to`, `expand`) are sent once.
        indices: Integers.
        dense_shape: Shape of the whole array; None means that of the variable.

    Raises:
        TypeError: If the indices are not integers.
        InvalidArgumentError: If the axes of the values do not begin with those of the indices.
    """

    __slots__ = ("_axes", "_given", "_values", "dense_shape", "indices")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        rows = as_array(indices)
        if rows.dtype.kind not in "iu":
            if are_large_integers(rows):
                raise InvalidArgumentError(
                    f"`indices` must fit in 64 bits, but one is {max(rows.flat, key=abs)}"
                )
            if rows.size:
                raise TypeError(f"`indices` must be integers, but got dtype {rows.dtype}")
            rows = rows.astype(np.int64)
        found = as_array(values)
        if found.shape[: rows.ndim] != rows.shape:
            has_bags = rows.ndim > 1 and found.shape[: rows.ndim - 1] == rows.shape[:-1]
            raise InvalidArgumentError(
                f"`values` must begin with the axes of `indices`, {rows.shape}, but has shape "
                f"{found.shape}"
                + "; if the ids of a bag share values, pass np.broadcast_to(values[..., None, "
                ":], (*ids.shape, dim))" * has_bags
            )
        #: Has the axes of the indices, along which it may be broadcast.
        self._given = found
        self._axes = rows.shape
        self._values: NDArray[Any] | None = None
        self.indices: NDArray[np.int64] = rows.reshape(-1).astype(np.int64, copy=False)
        self.dense_shape: tuple[int, ...] | None = (
            None if dense_shape is None else tuple(int(each) for each in dense_shape)
        )

    @property
    def values(self) -> NDArray[Any]:
        """Values, one for each of `indices`."""
        if self._values is None:
            self._values = self._given.reshape(
                len(self.indices), *self._given.shape[len(self._axes) :]
            )
        return self._values

    def shared_values(self) -> tuple[NDArray[Any], NDArray[np.intp] | None]:
        """Return values, and the index of each one's value; None if each index has its own.

        If the values were broadcast along an axis of the indices, like the gradient of a mean over
        ids, they are returned once.
        """
        axes = len(self._axes)
        strides = zip(self._given.strides[:axes], self._axes, strict=True)
        repeats = [stride == 0 and count > 1 for stride, count in strides]
        if not any(repeats) or not self._given.size:
            return self.values, None
        distinct = self._given[tuple(slice(0, 1) if each else slice(None) for each in repeats)]
        shape = distinct.shape[:axes]
        indices = np.arange(math.prod(shape)).reshape(shape)
        return (
            distinct.reshape(-1, *distinct.shape[axes:]),
            np.broadcast_to(indices, self._axes).reshape(-1),
        )

    def __repr__(self) -> str:
        return (
            f"<IndexedSlices of {len(self.indices)} rows, values {self.values.shape} "
            f"{self.values.dtype}>"
        )
