"""Proof that a user's function does to whole columns what it does to each element.

`lambda x: x * x` on a column of a thousand numbers is one NumPy call instead of a thousand Python
calls. The result is the same, bit for bit, only if the function is *elementwise*. The proof has
three steps; if one fails, the function is called once per element.

1. *Its code does arithmetic only.* Every instruction is on an allow list: no loop, no exception
   handler, no formatting, no store outside the function, no inner function.
2. *The values it reads from outside are known.* Module globals, cells and defaults are numbers or
   objects of NumPy on a short list; attributes are on that list, or `astype`. The proof is valid
   while these are the same objects (`Proof.holds_for`).
3. *Called with tracers instead of an element, it returns tracers*, alone or in dicts and tuples.
   A tracer supports only operations whose result for an element depends on that element alone
   and is exactly rounded. Any other use (truth value, items, text) raises, and there is no
   exception handler that could hide it.

Combined components must have the same shape, because broadcasting means something else on
columns. Warnings may differ: NumPy warns when a scalar integer overflows, but not for columns.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from headrace.element.spec import ArraySpec, Spec

__all__ = ["Proof", "prove"]

_EXACT_UFUNCS = {
    name: getattr(np, name)
    for name in (
        *("add", "subtract", "multiply", "divide", "true_divide", "floor_divide", "remainder"),
        *("mod", "negative", "positive", "absolute", "abs", "square", "sqrt", "sign"),
        *("floor", "ceil", "trunc", "rint", "minimum", "maximum"),
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift"),
    )
}
"""Ufuncs whose results are exactly rounded, so that vector instructions change no bit. The sign of
zero in `minimum` is decided by one instruction, which vectors and scalars share."""

_SCALARS = {
    name: getattr(np, name)
    for name in (
        *("bool_", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
        *("uint64", "float16", "float32", "float64"),
    )
}
_NUMBERS = frozenset([bool, int, float, *_SCALARS.values()])
"""Exact types only: a subclass may define its own arithmetic."""

_NUMPY = _EXACT_UFUNCS | _SCALARS
_KNOWN_OBJECTS = {id(value) for value in (np, abs, bool, int, float, *_NUMPY.values())}
"""Objects besides numbers that a function may read from outside. None of them is ever freed."""

_DIVISIONS = frozenset([np.divide, np.floor_divide])
_LARGEST_EXACT = 1 << 53
"""Largest integer N such that all integers up to N are exact as floats."""

_INSTRUCTIONS = frozenset(
    [
        *("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "COPY_FREE_VARS"),
        *("PUSH_NULL", "POP_TOP", "COPY", "SWAP"),
        *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_DEREF"),
        *("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"),
        *("LOAD_CONST", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"),
        *("PRECALL", "KW_NAMES", "CALL", "CALL_KW"),
        *("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT", "UNARY_NOT", "TO_BOOL"),
        *("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP", "CALL_INTRINSIC_1"),
        *("BUILD_TUPLE", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "DICT_UPDATE", "UNPACK_SEQUENCE"),
        *("JUMP_FORWARD", "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"),
        *("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE"),
        *("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"),
        *("RETURN_VALUE", "RETURN_CONST"),
    ]
)
"""Instructions of Python 3.11 to 3.13 that arithmetic needs; all others are refused. All jumps go
forward, so that a traced function terminates."""

_OPERATORS = frozenset(["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>"])
"""No `+=` and the like, which may write to the element. Tracers refuse `**`: it is not exact."""


@dataclass(frozen=True)
class _Names:
    """Names that a code object reads from outside."""

    module: tuple[str, ...]
    attributes: tuple[str, ...]
    """Attributes of NumPy."""


@dataclass(frozen=True, eq=False)
class Proof:
    """Proof that a function is elementwise for one spec, valid while `holds_for` returns True."""

    result: Spec
    """Spec of the result for one element."""
    code: types.CodeType
    names: _Names
    external_values: list[Any]
    """Values that the function read from outside when it was proved."""

    def holds_for(self, fn: types.FunctionType) -> bool:
        """Return whether `fn` is still the proved function: rebinding a name changes it."""
        found = _external_values(fn, self.names) if fn.__code__ is self.code else None
        return found is not None and _are_unchanged(found, self.external_values)


def prove(fn: Callable[..., Any], spec: Spec | None) -> Proof | None:
    """Return the proof that `fn` is elementwise on elements of `spec`, or None.

    The result is cached by code, external values and spec, so that a function which is created
    repeatedly, such as one inside a function that opens nested datasets, is proved once.
    """
    if spec is None or type(fn) is not types.FunctionType:
        return None
    code = fn.__code__
    names = _names_read(code)
    outside = None if names is None else _external_values(fn, names)
    if names is None or outside is None:
        return None
    if not all(_is_number(value) or id(value) in _KNOWN_OBJECTS for value in outside):
        return None
    known = _cached_proofs.get(code)
    if known is not None and known[0] == spec and _are_unchanged(known[1], outside):
        return known[2]
    proof = _trace(fn, code, names, outside, spec)
    if len(_cached_proofs) >= _MAX_CACHED_PROOFS:
        _cached_proofs.clear()
    _cached_proofs[code] = spec, outside, proof
    return proof


_MAX_CACHED_PROOFS = 1024
_cached_proofs: dict[types.CodeType, tuple[Spec, list[Any], Proof | None]] = {}
"""Last result for each code object: spec, external values, and the proof or None."""


def _trace(
    fn: types.FunctionType, code: types.CodeType, names: _Names, outside: list[Any], spec: Spec
) -> Proof | None:
    """Call the function with tracers."""
    try:
        element = _trace_element(spec)
        # A plain tuple is passed as several arguments, as in every step.
        result = fn(*element) if type(element) is tuple else fn(element)
        return Proof(_spec_of(result), code, names, outside)
    except Exception:
        # Operations that a tracer lacks are not elementwise. An error of the user's own code is
        # raised again, for the right element, when the elements are computed.
        return None


def _are_unchanged(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


@lru_cache(maxsize=1024)
def _names_read(code: types.CodeType) -> _Names | None:
    """Return the names that `code` reads, or None if it may do more than arithmetic."""
    if code.co_exceptiontable:
        return None  # a handler would hide what tracers raise
    module: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name not in _INSTRUCTIONS:
            return None
        match name:
            case "LOAD_GLOBAL":
                module[value] = None
            case "LOAD_ATTR" | "LOAD_METHOD":
                if value in _NUMPY:
                    attributes[value] = None
                elif value != "astype":
                    return None
            case "LOAD_CONST" | "RETURN_CONST":
                if not _is_constant(value):
                    return None
            case "BINARY_OP":
                if instruction.argrepr not in _OPERATORS:
                    return None
            case "CALL_INTRINSIC_1":
                if instruction.argrepr != "INTRINSIC_UNARY_POSITIVE":
                    return None
    return _Names(tuple(module), tuple(attributes))


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str)


def _external_values(fn: types.FunctionType, names: _Names) -> list[Any] | None:
    """Return all values that `fn` reads from outside now, or None if they cannot be determined."""
    module = fn.__globals__
    builtins = fn.__builtins__
    if fn.__kwdefaults__ or type(module) is not dict or type(builtins) is not dict:
        return None
    try:
        found = [cell.cell_contents for cell in fn.__closure__ or ()]
        found += [module[n] if n in module else builtins[n] for n in names.module]
    except (KeyError, ValueError):  # a name that is bound later
        return None
    found += fn.__defaults__ or ()
    for name in names.attributes:
        # NumPy's own object, unless someone patched the module.
        if getattr(np, name) is not _NUMPY[name]:
            return None
    return found


def _is_number(value: object) -> bool:
    return type(value) in _NUMBERS


def _trace_element(spec: Spec) -> Any:
    """Return an element of tracers. Plain containers only: a class may run arbitrary code."""
    if type(spec) is dict:
        return {key: _trace_element(part) for key, part in spec.items()}
    if type(spec) is tuple:
        return tuple([_trace_element(part) for part in spec])
    if not isinstance(spec, ArraySpec) or not _is_plain(spec.dtype):
        raise TypeError("only numbers are traced")
    return _Tracer(spec.dtype, spec.shape)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    # A number taken from a column with foreign byte order has native order.
    return dtype.type in _NUMBERS and dtype.isnative and not dtype.metadata


def _spec_of(result: Any) -> Spec:
    """Return the spec of a function's result; raise TypeError unless it consists of tracers."""
    kind = type(result)
    if kind is _Tracer:
        return ArraySpec(result._shape, result._dtype)
    if kind is tuple and result:
        return tuple([_spec_of(part) for part in result])
    if kind is dict and result and all(type(key) in (str, int) for key in result):
        return {key: _spec_of(part) for key, part in result.items()}
    raise TypeError("the result is not computed from the element")


class _Tracer(NDArrayOperatorsMixin):
    """Placeholder for a component of an element: a dtype and a shape without a value."""

    # No array attributes are offered: `x.shape` differs on columns.
    __slots__ = ("_dtype", "_shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("a decision based on a component's value is not elementwise")

    __bool__ = __repr__ = __str__ = __format__ = __hash__ = _refuse

    def astype(self, dtype: Any) -> _Tracer:
        # Named like the method of arrays and scalars.
        target = np.dtype(dtype)
        if dtype is None or not _is_plain(target):
            raise TypeError("only numbers are traced")
        if self._dtype.kind == "f" and target.kind in "iu":
            # Out-of-range floats become different integers in vectors and in scalars.
            raise TypeError("converting out-of-range floats to integers is not well defined")
        return _Tracer(target, self._shape)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> _Tracer:
        if method != "__call__" or options or _EXACT_UFUNCS.get(ufunc.__name__) is not ufunc:
            raise TypeError(f"{ufunc.__name__} is not elementwise and exact")
        tracers = [x for x in inputs if type(x) is _Tracer]
        if any(x._shape != self._shape for x in tracers):
            raise TypeError("components have different shapes")
        whole = all(x._dtype.kind in "iu" for x in tracers) and ufunc not in _DIVISIONS
        for x in inputs:
            if type(x) is not _Tracer and not _is_number(x):
                raise TypeError("an operand is neither a component nor a number")
            if type(x) is int and not whole and abs(x) > _LARGEST_EXACT:
                raise TypeError("an integer loses precision when converted to float")
        # The dtype is that of the same operation on values of these dtypes. Python numbers are
        # passed unchanged, because NumPy's promotion treats them as weak.
        one = [x._sample() if type(x) is _Tracer else x for x in inputs]
        with np.errstate(all="ignore"):
            result = ufunc(*one)
        dtype = result.dtype
        if not _is_plain(dtype):
            raise TypeError("only numbers are traced")
        return _Tracer(dtype, self._shape)

    def _sample(self) -> Any:
        # Without axes, a scalar: that is what an element of a column of scalars is.
        return np.ones((1,) * len(self._shape), self._dtype)[()]
