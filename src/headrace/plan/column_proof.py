"""Prove that a user's function does to whole columns what it does to each element.

`lambda x: x * x` on a column of a thousand numbers is one NumPy call instead of a thousand calls
of Python. It is the same, bit for bit, only if the function is *elementwise*. The proof has three
steps; where one fails, the function is called with elements.

1. *Its code can do nothing but arithmetic.* Every instruction is on a list of harmless ones: no
   loop, no handler of exceptions, no formatting, no store outside the function, no inner function.
2. *What it reads from outside is known.* Names of its module, cells and defaults hold numbers or
   NumPy's own objects of a short list; attributes are those of that list, and `astype`. The proof
   holds while these are the same objects (`Proof.holds_for`).
3. *Called with tracers in place of the element, it returns tracers*, alone or in dicts and tuples.
   A tracer knows only operations whose result for one element depends on that element alone and
   is exactly rounded. Asked for anything else (its truth value, its items, its text) it raises,
   and there is no handler to hide that.

Components that are combined must have the same shape: broadcasting one against another would mean
something else on columns. A warning may differ: NumPy warns when a scalar integer overflows and is
silent about columns.
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

_EXACT = {
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
"""Ufuncs whose results are exactly rounded, so that no vector instruction changes a bit. A tie of
zeros in `minimum` is decided by one instruction, which vectors and scalars share."""

_SCALARS = {
    name: getattr(np, name)
    for name in (
        *("bool_", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
        *("uint64", "float16", "float32", "float64"),
    )
}
_NUMBERS = frozenset([bool, int, float, *_SCALARS.values()])
"""Exactly these types: a subclass may define its own arithmetic."""

_NUMPY = _EXACT | _SCALARS
_KNOWN = {id(value) for value in (np, abs, bool, int, float, *_NUMPY.values())}
"""What a function may read from outside besides numbers. None of these is ever freed."""

_DIVISIONS = frozenset([np.divide, np.floor_divide])
_LARGEST_EXACT = 1 << 53
"""Integers up to this one are floats too, whichever way they are converted."""

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
"""Instructions of Python 3.11 to 3.13 that arithmetic needs. Another version's are unknown and
refused. All jumps go forward, so that a function that is traced ends."""

_OPERATORS = frozenset(["+", "-", "*", "/", "//", "%", "**", "&", "|", "^", "<<", ">>"])
"""Not `+=` and the like, which may write to the element. Tracers refuse `**`: it is not exact."""


@dataclass(frozen=True)
class _Names:
    """What a code object reads from outside by name."""

    module: tuple[str, ...]
    attributes: tuple[str, ...]
    """Those of NumPy."""


@dataclass(frozen=True, eq=False)
class Proof:
    """That a function is elementwise, for elements of one spec and as long as `holds_for`."""

    result: Spec
    """The spec of what it returns for one element."""
    code: types.CodeType
    names: _Names
    outside: list[Any]
    """What the function read from outside when it was proved."""

    def holds_for(self, fn: types.FunctionType) -> bool:
        """Say whether `fn` is still the function that was proved: rebound names change it."""
        found = _outside(fn, self.names) if fn.__code__ is self.code else None
        return found is not None and _are_same(found, self.outside)


def prove(fn: Callable[..., Any], spec: Spec | None) -> Proof | None:
    """Return the proof that `fn` is elementwise on elements of `spec`, or None if there is none.

    A function that is made again and again, as in one that opens nested datasets, is proved once:
    its code, what it reads from outside and the spec decide.
    """
    if spec is None or type(fn) is not types.FunctionType:
        return None
    code = fn.__code__
    names = _names(code)
    outside = None if names is None else _outside(fn, names)
    if names is None or outside is None:
        return None
    if not all(_is_number(value) or id(value) in _KNOWN for value in outside):
        return None
    known = _found.get(code)
    if known is not None and known[0] == spec and _are_same(known[1], outside):
        return known[2]
    proof = _trace(fn, code, names, outside, spec)
    if len(_found) >= _MOST_FOUND:
        _found.clear()
    _found[code] = spec, outside, proof
    return proof


_MOST_FOUND = 1024
_found: dict[types.CodeType, tuple[Spec, list[Any], Proof | None]] = {}
"""What was found for a code last: the spec, what it read from outside, and the proof if any."""


def _trace(
    fn: types.FunctionType, code: types.CodeType, names: _Names, outside: list[Any], spec: Spec
) -> Proof | None:
    """Call the function with tracers."""
    try:
        element = _element(spec)
        # A plain tuple is passed as several arguments, as everywhere.
        result = fn(*element) if type(element) is tuple else fn(element)
        return Proof(_spec_of(result), code, names, outside)
    except Exception:
        # Whatever a tracer cannot do is not elementwise, and an error that is the user's own
        # is raised again, in its place and with its position, when the elements are computed.
        return None


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names | None:
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


def _outside(fn: types.FunctionType, names: _Names) -> list[Any] | None:
    """Return all that `fn` reads from outside now, or None if that cannot be said."""
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
        # NumPy's own, unless somebody put another in its place.
        if getattr(np, name) is not _NUMPY[name]:
            return None
    return found


def _is_number(value: object) -> bool:
    return type(value) in _NUMBERS


def _element(spec: Spec) -> Any:
    """Return an element of tracers; only plain containers, for a class may do what it likes."""
    if type(spec) is dict:
        return {key: _element(part) for key, part in spec.items()}
    if type(spec) is tuple:
        return tuple([_element(part) for part in spec])
    if not isinstance(spec, ArraySpec) or not _is_plain(spec.dtype):
        raise TypeError("only numbers are traced")
    return _Tracer(spec.dtype, spec.shape)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    # A number taken out of a column with another byte order has the native one.
    return dtype.type in _NUMBERS and dtype.isnative and not dtype.metadata


def _spec_of(result: Any) -> Spec:
    """Return the spec of what a function made of tracers; raise if that is anything else."""
    kind = type(result)
    if kind is _Tracer:
        return ArraySpec(result._shape, result._dtype)
    if kind is tuple and result:
        return tuple([_spec_of(part) for part in result])
    if kind is dict and result and all(type(key) in (str, int) for key in result):
        return {key: _spec_of(part) for key, part in result.items()}
    raise TypeError("a result that does not come from the element")


class _Tracer(NDArrayOperatorsMixin):
    """Stands for a component of an element: has a dtype and a shape, and no value."""

    # Attributes that a user's function may ask for are none: `x.shape` differs on columns.
    __slots__ = ("_dtype", "_shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("what a component's value decides is not elementwise")

    __bool__ = __repr__ = __str__ = __format__ = __hash__ = _refuse

    def astype(self, dtype: Any) -> _Tracer:
        # Named like the method of arrays; scalars have it too.
        target = np.dtype(dtype)
        if dtype is None or not _is_plain(target):
            raise TypeError("only numbers are traced")
        if self._dtype.kind == "f" and target.kind in "iu":
            # What does not fit becomes one number in a vector and another in a scalar.
            raise TypeError("a float out of an integer's range has no one value there")
        return _Tracer(target, self._shape)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> _Tracer:
        if method != "__call__" or options or _EXACT.get(ufunc.__name__) is not ufunc:
            raise TypeError(f"{ufunc.__name__} is not elementwise and exact")
        tracers = [x for x in inputs if type(x) is _Tracer]
        if any(x._shape != self._shape for x in tracers):
            raise TypeError("components of different shapes")
        whole = all(x._dtype.kind in "iu" for x in tracers) and ufunc not in _DIVISIONS
        for x in inputs:
            if type(x) is not _Tracer and not _is_number(x):
                raise TypeError("an operand that is neither the element's nor a number")
            if type(x) is int and not whole and abs(x) > _LARGEST_EXACT:
                raise TypeError("an integer that is rounded on its way to a float")
        # The dtype is that of the same operation on values of these dtypes. Python numbers are
        # passed as they are: they are weak in NumPy's promotion.
        one = [x._one() if type(x) is _Tracer else x for x in inputs]
        with np.errstate(all="ignore"):
            result = ufunc(*one)
        dtype = result.dtype
        if not _is_plain(dtype):
            raise TypeError("only numbers are traced")
        return _Tracer(dtype, self._shape)

    def _one(self) -> Any:
        # Without axes a scalar, as an element of a column of them is.
        return np.ones((1,) * len(self._shape), self._dtype)[()]
