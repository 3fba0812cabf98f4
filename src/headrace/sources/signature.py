"""Conversion of values to an output signature, as for the values of a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.element.normalize import NORMAL_KINDS, normalize
from headrace.element.ownership import take_ownership
from headrace.element.spec import ArraySpec, Spec, check_element
from headrace.element.structure import Element, describe_component, flatten, unflatten
from headrace.element.transpose import flatten_like
from headrace.errors import InvalidElementError

__all__ = ["make_converter"]

_PYTHON_VALUES = (bool, int, float, complex, list)


def make_converter(signature: Spec | None) -> tuple[Callable[[Any], Element], bool]:
    """Return a function that converts and checks a value, and whether its result may share memory.

    With a signature, the containers of results are new.
    """
    if signature is None:
        return take_ownership, False
    specs, structure = flatten(signature)
    # Scalars are immutable, so sharing them is harmless.
    may_share = any(spec.shape or spec.dtype.kind == "V" for spec in specs)
    leaves = zip(specs, structure.paths, strict=True)
    converts = [_make_leaf_converter(spec, path) for spec, path in leaves]
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
            # Fast path for the most common structure.
            if type(value) is dict and value.keys() == keys:
                return {key: convert(value[key]) for key, convert in by_key}
            return convert_nested(value)

        return convert_flat, may_share

    return convert_nested, may_share


_DTYPES_OF_PYTHON_VALUES = frozenset([np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_)])
"""Dtypes that represent every Python number of their type, or raise (for ints beyond int64)."""
_PYTHON_TYPES = {"i": int, "u": int, "f": float, "b": bool, "S": bytes, "U": str}


def _make_leaf_converter(spec: ArraySpec, path: str) -> Callable[[Any], Any]:
    """Return a function that converts a component, with a fast path for common values."""
    convert = _LeafConverter(spec, path).convert
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
    if dtype in _DTYPES_OF_PYTHON_VALUES:

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
    """Return the smallest and the largest number of a dtype, as Python numbers."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return -most, most
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


class _LeafConverter:
    """Converts values to a component with a given spec."""

    def __init__(self, spec: ArraySpec, path: str) -> None:
        self._spec = spec
        self._path = path
        self._dtype = spec.dtype
        self._shape = spec.shape

    def convert(self, value: Any) -> Any:
        """Return the value as a component.

        Raises:
            InvalidElementError: If it does not fit the spec.
        """
        if self._fits(value):
            return value
        plain = isinstance(value, _PYTHON_VALUES) and not isinstance(value, np.generic)
        if plain and self._dtype.kind not in "SU":
            value = self._cast(value)
            if self._fits(value):
                return value
        try:
            result = normalize(value)
            check_element(self._spec, result)
        except InvalidElementError as error:
            # These errors describe the component as if it were the whole element: insert its path.
            text, component = str(error), describe_component(self._path)
            named = text.replace(describe_component(""), component, 1)
            raise InvalidElementError(
                named if component in named else f"{component}: {text}"
            ) from error
        return result

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
        """Return a Python value as an array or scalar of the spec's dtype if no value is lost."""
        dtype = self._dtype
        found: Any = normalize(value)
        if not isinstance(found, np.ndarray | np.generic) or found.dtype.kind not in "biufc":
            return found
        if found.size == 0 or found.dtype == dtype:
            return found.astype(dtype)
        if not _is_convertible(found.dtype.kind, dtype.kind):
            raise self._mismatch_error(value)
        with np.errstate(all="ignore"):
            cast: Any = found.astype(dtype)
            if found.dtype.kind in "fc":
                # A narrower float may round, but must not overflow.
                same = np.isfinite(cast) | ~np.isfinite(found)
            else:
                same = (cast.astype(found.dtype) == found) & (np.less(cast, 0) == np.less(found, 0))
        if not np.all(same):
            raise self._mismatch_error(value)
        return cast

    def _mismatch_error(self, value: Any) -> InvalidElementError:
        text = repr(value)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return InvalidElementError(
            f"{describe_component(self._path)} is {shown}, which {self._dtype} cannot hold without "
            "loss; "
            f"yield other values, or change the signature"
        )


def _is_convertible(found: str, wanted: str) -> bool:
    """Return whether Python values of one dtype kind may be converted to another."""
    order = "b", "iu", "f", "c"
    ranks = {kind: rank for rank, kinds in enumerate(order) for kind in kinds}
    if found == "b" or wanted == "b":
        return found == wanted
    return wanted in ranks and ranks[found] <= ranks[wanted]
