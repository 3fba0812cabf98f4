"""Call a user's function with whole columns, where that gives the same elements as rows.

Rule 1. The function was proved elementwise for these very columns and for what it reads from
        outside at this moment; a name that was rebound since is proved again.
Rule 2. Whatever the call raises, and whatever it returns that the proof did not say, is dropped:
        the chunk is done again by rows, so that an error is raised in its place. That is free of
        effects, for a function that was proved has none.
Rule 3. Where a warning would raise, rows it is: NumPy warns when a scalar integer overflows, and is
        silent about columns.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import Stacked
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.plan.column_proof import Proof, prove

__all__ = ["call_on_columns", "may_raise_on_warnings"]

_RAISING = frozenset(["raise", "call", "log"])
"""Modes of `np.errstate` in which a floating-point error runs code or raises."""


def call_on_columns(
    fn: Callable[..., Any], columns: Stacked, size: int, expected: Spec | None = None
) -> Stacked | None:
    """Return the results of `fn` for `size` elements as one stacked element, or None: do rows.

    A column that `fn` returns as it is comes back as the same array; the other arrays are fresh,
    and no two share memory.

    Args:
        fn: The user's function, of one element.
        columns: The elements, stacked.
        size: The number of elements.
        expected: The spec of the results, where only those are of use; an axis of None may have
            any length.
    """
    if may_raise_on_warnings():
        return None
    proof = _proof_of(fn, columns)
    if proof is None or not (expected is None or _agree(proof.result, expected)):
        return None
    try:
        result = fn(*columns) if type(columns) is tuple else fn(columns)
    except Exception:
        return None  # rows find the element at fault, if it is one
    try:
        return _checked(result, proof.result, size, set())
    except _UnexpectedError:
        return None


def may_raise_on_warnings() -> bool:
    """Say whether arithmetic may raise here for a value that NumPy only warns of by default."""
    modes = np.geterr().values()
    if not _RAISING.isdisjoint(modes):
        return True
    filters = warnings.filters
    if "warn" not in modes or "error" not in [entry[0] for entry in filters]:
        return False
    for action, message, category, module, line in filters:
        if issubclass(RuntimeWarning, category):
            if action == "error":
                return True
            if message is None and module is None and not line:
                return False  # the first filter that matches decides
    return False


_proofs: WeakKeyDictionary[types.FunctionType, tuple[Any, Proof | None]] = WeakKeyDictionary()
"""The last proof of each function, and for which columns it was."""


def _proof_of(fn: Callable[..., Any], columns: Stacked) -> Proof | None:
    if type(fn) is not types.FunctionType:
        return None
    key: Any
    if type(columns) is np.ndarray:
        if not columns.ndim:
            return None
        key = (columns.dtype, columns.shape[1:])
    else:
        leaves, structure = flatten(columns)
        if any(type(leaf) is not np.ndarray or not leaf.ndim for leaf in leaves):
            return None
        key = (structure, [(leaf.dtype, leaf.shape[1:]) for leaf in leaves])
    known = _proofs.get(fn)
    if known is not None and known[0] == key:
        proof = known[1]
        if proof is not None and proof.holds_for(fn):
            return proof
    proof = prove(fn, map_leaves(_row_spec, columns))
    _proofs[fn] = (key, proof)
    return proof


def _row_spec(column: np.ndarray[Any, Any]) -> ArraySpec | None:
    # Objects are bytes and str, which are not proved about.
    return None if column.dtype.hasobject else ArraySpec(column.shape[1:], column.dtype)


def _agree(found: Spec, expected: Spec) -> bool:
    if found == expected:
        return True
    leaves, structure = flatten(found)
    others, other_structure = flatten(expected)
    return structure == other_structure and all(
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(n in (m, None) for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in zip(leaves, others, strict=True)
    )


class _UnexpectedError(Exception):
    """A result is not what was proved."""


def _checked(result: Any, spec: Spec, size: int, seen: set[int]) -> Stacked:
    """Return the result in fresh containers, no array twice."""
    if type(result) is not (np.ndarray if isinstance(spec, ArraySpec) else type(spec)):
        raise _UnexpectedError
    if isinstance(spec, ArraySpec):
        if result.shape != (size, *spec.shape) or result.dtype != spec.dtype:
            raise _UnexpectedError
        if id(result) in seen:
            return result.copy()
        seen.add(id(result))
        return result
    if len(result) != len(spec):
        raise _UnexpectedError
    if type(spec) is dict:
        if list(result) != list(spec):
            raise _UnexpectedError
        return {key: _checked(result[key], part, size, seen) for key, part in spec.items()}
    return tuple([_checked(a, b, size, seen) for a, b in zip(result, spec, strict=True)])
