"""Names of dtypes, as specs carry them: "float32", "bool", "bfloat16"."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from headrace.distribute.casting import is_floating
from headrace.element.description import decode_dtype

__all__ = [
    "adding_dtype",
    "as_dtype",
    "dtype_named",
    "name_of",
    "working_dtype",
]

_PLAIN = {
    np.dtype(kind).name
    for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], *np.typecodes["Complex"], "?")
}


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype that a user gave: a type, a dtype or a name, such as "bfloat16".

    Raises:
        TypeError: It is none.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
        return found
    except TypeError:
        if not isinstance(dtype, str):
            raise
    try:
        return dtype_named(dtype)
    except ValueError:
        raise TypeError(f"`dtype` must be the name of a dtype, but got {dtype!r}") from None


def name_of(dtype: Any) -> str:
    """Return the name of a dtype that a variable can have.

    Raises:
        TypeError: No variable can: strings, objects, records.
    """
    return _name_of(dtype if isinstance(dtype, np.dtype) else as_dtype(dtype))


@lru_cache(256)  # NumPy puts a name together each time, and each array that is sent has one
def _name_of(found: np.dtype[Any]) -> str:
    name: str = found.name
    # Those that another package has registered (ml_dtypes) are "built in" with number 2.
    if name not in _PLAIN and found.isbuiltin != 2:
        raise TypeError(
            f"a variable on parameter servers holds numbers or bools, but got dtype {found}"
        )
    return name


@lru_cache(256)
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
        ValueError: There is none.
        FailedPreconditionError: It needs a package that is not installed here.
    """
    return np.dtype(name) if name in _PLAIN else decode_dtype(name)


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a rule computes in, and that slots have.

    Numbers of less than 32 bits are stored as they are and changed in float32: with the 8 bits of
    bfloat16, small steps and running averages would be lost by rounding.
    """
    return dtype if dtype.isbuiltin == 1 and dtype.itemsize >= 4 else np.dtype(np.float32)


def adding_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that numbers are added in: floats of less than 32 bits in float32."""
    return working_dtype(dtype) if is_floating(dtype) else dtype
