"""What can be done with a thing that has an array, as if it were that array.

Operators, indices and the protocols by which NumPy, JAX and PyTorch take things for arrays.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from headrace.distribute.values import map_structure
from headrace.frameworks.framework import Framework

__all__ = ["ArrayOperators"]

#: The operator that NumPy has each of these for: frameworks have theirs for it.
_OPERATORS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.power: operator.pow,
    np.matmul: operator.matmul,
    np.negative: operator.neg,
    np.positive: operator.pos,
    np.absolute: operator.abs,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.bitwise_and: operator.and_,
    np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor,
    np.invert: operator.invert,
    np.left_shift: operator.lshift,
    np.right_shift: operator.rshift,
}


class ArrayOperators(NDArrayOperatorsMixin):
    """Reads itself wherever an array is wanted.

    Attributes:
        framework: Whose array it is.
    """

    framework: Framework

    @abstractmethod
    def read(self) -> Any:
        """Return the array."""

    def numpy(self) -> Any:
        """Return the array as NumPy has it, which cannot be written into."""
        array = self.framework.numpy(self.read())
        if isinstance(array, np.ndarray) and array.flags.writeable:  # PyTorch's own memory
            array = array.view()
            array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.numpy())
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ArrayOperators) for each in kwargs.get("out", ())):
            raise TypeError(
                "a Variable is not written by operators; use assign, assign_add or assign_sub"
            )
        of_operator = _OPERATORS.get(ufunc)
        if of_operator is None or self.framework.shares_host:
            plain = [each.numpy() if isinstance(each, ArrayOperators) else each for each in inputs]
            return getattr(ufunc, method)(*plain, **kwargs)
        own = self.framework.own
        return of_operator(
            *[each.read() if isinstance(each, ArrayOperators) else own(each) for each in inputs]
        )

    def __jax_array__(self) -> Any:
        return self.read()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(leaf: Any) -> Any:
            return leaf.read() if isinstance(leaf, ArrayOperators) else leaf

        return function(*map_structure(plain, args), **map_structure(plain, kwargs or {}))

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __len__(self) -> int:
        return len(self.read())

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())
