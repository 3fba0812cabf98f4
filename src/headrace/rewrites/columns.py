"""Apply a user's function to whole columns, where that provably gives the same elements.

`lambda x: x * x` on a column of a thousand numbers is one NumPy call instead of a thousand calls
of Python. It is the same only if the function is *elementwise*, which is proved in two steps:

1. Its code can do nothing but arithmetic: every name that it mentions is a NumPy function of a
   short list, a dtype, a number, or an argument; it stores nothing and calls nothing else.
2. Called with *tracers* in place of the element, it returns tracers (alone or in a dict or tuple).
   A tracer knows only operations whose result for one element depends on that element alone and
   is exactly rounded, so that a column and a scalar give the same bits; asked for its truth
   value, its items or anything else, it raises, and the function is left alone.

Elements that are combined must have the same shape: broadcasting one component against another
would mean something else on columns. What does differ is a warning: NumPy warns when a scalar
integer overflows and is silent about columns.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from dataclasses import replace
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from headrace.element.spec import ArraySpec, Spec
from headrace.element.tree import map_leaves
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.traverse import element_spec

__all__ = ["map_columns", "trace"]

_EXACT = frozenset(
    [
        "add",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "floor_divide",
        "remainder",
        "mod",
        "negative",
        "positive",
        "absolute",
        "abs",
        "square",
        "sqrt",
        "equal",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "invert",
        "left_shift",
        "right_shift",
        "minimum",
        "maximum",
        "sign",
        "floor",
        "ceil",
        "trunc",
        "rint",
    ]
)
"""Ufuncs whose results are exactly rounded, so that no vector instruction changes a bit."""

_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "DELETE_", "IMPORT_")
_DTYPE_NAMES = frozenset(
    [
        "bool_",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
)


def map_columns(node: Node) -> Node:
    """Mark a map or filter whose function is elementwise."""
    match node:
        case Map(output_spec=None):
            result = trace(node.fn, element_spec(node.input))
            return node if result is None else replace(node, output_spec=result)
        case Filter(columnar=False):
            verdict = trace(node.predicate, element_spec(node.input))
            if isinstance(verdict, ArraySpec) and verdict == ArraySpec((), np.bool_):
                return replace(node, columnar=True)
    return node


def trace(fn: Callable[..., Any], spec: Spec | None) -> Spec | None:
    """Return the spec of `fn`'s result if `fn` is elementwise on elements of `spec`, else None."""
    if spec is None or not isinstance(fn, types.FunctionType) or not _is_arithmetic(fn):
        return None
    try:
        element = map_leaves(_tracer_of, spec)
        result = fn(*element) if isinstance(element, tuple) else fn(element)
        return map_leaves(_spec_of_result, result)
    except Exception:
        # Whatever a tracer cannot do is not elementwise, and an error that is the user's own
        # comes again, in its place and with its position, when the elements do.
        return None


def _is_arithmetic(fn: types.FunctionType) -> bool:
    code = fn.__code__
    if code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return False
    if any(isinstance(const, types.CodeType) for const in code.co_consts):
        return False  # a function within: its names are not among these
    if any(i.opname.startswith(_STORES) for i in dis.get_instructions(code)):
        return False
    try:
        held = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # a variable that is assigned later
        return False
    held += list(fn.__defaults__ or ()) + list((fn.__kwdefaults__ or {}).values())
    if not all(_is_number(value) for value in held):
        return False
    return all(_is_known(name, fn.__globals__) for name in code.co_names)


def _is_known(name: str, names: dict[str, Any]) -> bool:
    if name in names:
        return names[name] is np or _is_number(names[name])
    return name in _EXACT or name in _DTYPE_NAMES or name == "astype"


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | np.number | np.bool_)


def _tracer_of(leaf: ArraySpec) -> _Tracer:
    if leaf.dtype.kind not in "biuf":
        raise TypeError("only numbers are traced")
    return _Tracer(leaf.dtype, leaf.shape)


def _spec_of_result(leaf: Any) -> ArraySpec:
    if not isinstance(leaf, _Tracer):
        raise TypeError("a result that does not come from the element")
    return ArraySpec(leaf.shape, leaf.dtype)


class _Tracer(NDArrayOperatorsMixin):
    """Stands for a component of an element: has a dtype and a shape, and no value."""

    # Attributes that a user's function may ask for are none: `x.shape` differs on columns.
    __slots__ = ("_dtype", "_shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        return self._shape

    def __bool__(self) -> bool:
        raise TypeError("a branch on the element's value")

    def astype(self, dtype: Any) -> _Tracer:
        # Named like the method of arrays; scalars have it too.
        target = np.dtype(dtype)
        if target.kind not in "biuf":
            raise TypeError("only numbers are traced")
        return _Tracer(target, self._shape)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> _Tracer:
        if method != "__call__" or options or ufunc.__name__ not in _EXACT or ufunc.nout != 1:
            raise TypeError(f"{ufunc.__name__} is not elementwise and exact")
        shapes = {x.shape for x in inputs if isinstance(x, _Tracer)}
        if len(shapes) != 1:
            raise TypeError("components of different shapes")
        if not all(isinstance(x, _Tracer) or _is_number(x) for x in inputs):
            raise TypeError("an operand that is neither the element's nor a number")
        # The dtype is that of the same operation on values of these dtypes. Python numbers are
        # passed as they are: they are weak in NumPy's promotion.
        one = [np.ones((), x.dtype)[()] if isinstance(x, _Tracer) else x for x in inputs]
        with np.errstate(all="ignore"):
            result = ufunc(*one)
        return _Tracer(np.asarray(result).dtype, shapes.pop())
