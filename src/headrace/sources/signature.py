"""Values as a signature asks for them: what a generator yields becomes an element of its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.element.normalize import NORMAL_KINDS, normalize
from headrace.element.ownership import owned
from headrace.element.spec import ArraySpec, Spec, check
from headrace.element.structure import Element, component, flatten, unflatten
from headrace.element.transpose import flatten_like
from headrace.errors import InvalidElementError

__all__ = ["converter"]

_PYTHON_VALUES = (bool, int, float, complex, list)


def converter(signature: Spec | None) -> tuple[Callable[[Any], Element], bool]:
    """Return what makes an element of a value and checks it; whether it may share its memory.

    With a signature the result's containers are new ones.
    """
    if signature is None:
        return owned, False
    specs, structure = flatten(signature)
    # Scalars do not change, so nobody can share them.
    may_share = any(spec.shape or spec.dtype.kind == "V" for spec in specs)
    leaves = zip(specs, structure.paths, strict=True)
    converts = [_leaf_converter(spec, path) for spec, path in leaves]
    if len(specs) == 1 and specs[0] is signature:
        return converts[0], may_share

    def convert_nested(value: Any) -> Element:
        values = flatten_like(structure, value)
        return unflatten(
            structure, [convert(item) for convert, item in zip(converts, values, strict=True)]
        )

    if type(signature) is dict and all(isinstance(s, ArraySpec) for s in signature.values()):
        by_key = list(zip(structure.root.keys, converts, strict=True))
        keys = signature.keys()

        def convert_flat(value: Any) -> Element:
            # The commonest structure, without the general walk.
            if type(value) is dict and value.keys() == keys:
                return {key: convert(value[key]) for key, convert in by_key}
            return convert_nested(value)

        return convert_flat, may_share

    return convert_nested, may_share


_AS_PYTHON = frozenset([np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_)])
"""Dtypes that hold each number of Python's type, or refuse it: an int beyond int64."""
_PYTHON_TYPES = {"i": int, "u": int, "f": float, "b": bool, "S": bytes, "U": str}


def _leaf_converter(spec: ArraySpec, path: str) -> Callable[[Any], Any]:
    """Return what makes a component of a value; what is commonly yielded takes a short way."""
    convert = _Leaf(spec, path).convert
    dtype, shape, kind = spec.dtype, spec.shape, spec.dtype.kind
    if not dtype.isnative or (kind not in _PYTHON_TYPES and not shape):
        return convert
    if shape:
        if kind not in NORMAL_KINDS or None in shape:
            return convert

        def convert_array(value: Any) -> Any:
            fits = type(value) is np.ndarray and value.shape == shape and value.dtype == dtype
            return value if fits else convert(value)

        return convert_array
    python_type = _PYTHON_TYPES[kind]
    if kind in "SU":
        return lambda value: value if type(value) is python_type else convert(value)
    low, high = _limits(dtype)
    make = dtype.type
    if dtype in _AS_PYTHON:

        def convert_same(value: Any) -> Any:
            cls = type(value)
            if cls is python_type:
                try:
                    return make(value)
                except OverflowError:
                    return convert(value)
            return value if cls is make else convert(value)

        return convert_same

    def convert_number(value: Any) -> Any:
        cls = type(value)
        if cls is make:
            return value
        if cls is python_type and low <= value <= high:
            return make(value)
        return convert(value)

    return convert_number


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest number of a dtype, as Python's."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return -most, most
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


class _Leaf:
    """Makes a component of what was yielded for it, as its spec asks."""

    def __init__(self, spec: ArraySpec, path: str) -> None:
        self._spec = spec
        self._path = path
        self._dtype = spec.dtype
        self._shape = spec.shape

    def convert(self, value: Any) -> Any:
        """Return the component.

        Raises:
            InvalidElementError: It does not fit the spec.
        """
        if self._fits(value):
            return value
        plain = isinstance(value, _PYTHON_VALUES) and not isinstance(value, np.generic)
        if plain and self._dtype.kind not in "SU":
            value = self._cast(value)
            if self._fits(value):
                return value
        try:
            made = normalize(value)
            check(self._spec, made)
        except InvalidElementError as error:
            # They know the component alone, without the element that it belongs to.
            text, place = str(error), component(self._path)
            named = text.replace(component(""), place, 1)
            raise InvalidElementError(named if place in named else f"{place}: {text}") from error
        return made

    def _fits(self, value: Any) -> bool:
        if not isinstance(value, np.ndarray | np.generic) or value.dtype != self._dtype:
            return False
        if value.dtype.kind not in NORMAL_KINDS or (type(value) is np.ndarray and not value.ndim):
            return False
        found, wanted = value.shape, self._shape
        return found == wanted or (
            len(found) == len(wanted)
            and all(n is None or n == m for m, n in zip(found, wanted, strict=True))
        )

    def _cast(self, value: Any) -> Any:
        """Return a Python value as an array or scalar of the spec's dtype, if none is lost."""
        dtype = self._dtype
        found: Any = normalize(value)
        if not isinstance(found, np.ndarray | np.generic) or found.dtype.kind not in "biufc":
            return found
        if found.size == 0 or found.dtype == dtype:
            return found.astype(dtype)
        if not _may_become(found.dtype.kind, dtype.kind):
            raise self._refusal(value)
        with np.errstate(all="ignore"):
            cast: Any = found.astype(dtype)
            if found.dtype.kind in "fc":
                # A narrower float rounds; it must not run over.
                same = np.isfinite(cast) | ~np.isfinite(found)
            else:
                same = (cast.astype(found.dtype) == found) & (np.less(cast, 0) == np.less(found, 0))
        if not np.all(same):
            raise self._refusal(value)
        return cast

    def _refusal(self, value: Any) -> InvalidElementError:
        text = repr(value)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return InvalidElementError(
            f"{component(self._path)} is {shown}, which {self._dtype} cannot hold without loss; "
            f"yield other values, or change the signature"
        )


def _may_become(found: str, wanted: str) -> bool:
    """Tell whether Python values of one kind of dtype stand for those of another."""
    order = "b", "iu", "f", "c"
    ranks = {kind: rank for rank, kinds in enumerate(order) for kind in kinds}
    if found == "b" or wanted == "b":
        return found == wanted
    return wanted in ranks and ranks[found] <= ranks[wanted]
