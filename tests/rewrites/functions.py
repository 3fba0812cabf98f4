"""Random functions of an element, as source text: plain arithmetic, and whatever else users write.

Functions are made from a seed, so that a failure is repeated by its seed alone.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

NUMBERS = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
OTHERS = [">i4", ">f8", "g", "q", "c8", "M8[s]", "m8[s]"]
SHAPES = [(), (), (), (3,), (2, 2), (0,)]

#: Names of the module that functions are written in; some are those of attributes of arrays.
MODULE = {
    "np": np,
    "K": 3,
    "ZERO": 0,
    "BIG": 2**63,
    "HALF": 0.5,
    "SINGLE": np.float32(1.1),
    "BYTE": np.uint8(200),
    "WAVE": np.complex64(1 + 2j),
    "HOURS": np.timedelta64(3, "h"),
    "TABLE": np.arange(3),
    "shape": 7,
    "size": 7,
    "ndim": 2,
    "real": 1.5,
    "T": 2,
    "sqrt": np.sqrt,
}

_CONSTANTS = (
    *("0", "1", "-1", "2", "3", "7", "8", "31", "63", "64", "127", "128", "255", "256", "-128"),
    *("65535", "2**31", "-2**31", "2**53", "2**53 + 1", "2**60+2**36+1", "2**63-1", "-2**63"),
    *("2**64-1", "2**70", "0.0", "-0.0", "0.1", "2.5", "-1.5", "1e-8", "70000.0", "1e300"),
    *("float('nan')", "float('inf')", "True", "False", "K", "ZERO", "BIG", "HALF", "SINGLE"),
    *("BYTE", "c", "k", "np.float16(3)", "np.int64(5)", "np.uint64(9)", "np.bool_(True)"),
)
_HOSTILE_CONSTANTS = ("WAVE", "HOURS", "1j", "TABLE", "None", "'a'", "(1, 2)")
_OPERATORS = ("+", "-", "*", "/", "//", "%", "&", "|", "^", "<<", ">>")
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_UNARY = ("-{}", "+{}", "~{}", "abs({})")
_ONE = ("negative", "absolute", "square", "sqrt", "sign", "floor", "ceil", "trunc", "rint")
_ONE += ("logical_not", "invert", "positive")
_TWO = ("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "minimum", "maximum")
_TWO += ("equal", "less", "greater_equal", "logical_and", "logical_or", "logical_xor")
_TWO += ("bitwise_and", "left_shift", "right_shift")
_TYPES = (
    "'bool'",
    "'int8'",
    "'u1'",
    "'u2'",
    "'u4'",
    "np.int32",
    "'int64'",
    "np.uint64",
    "np.float16",
    "'f4'",
)
_TYPES += ("float", "'f8'", "bool", "int", "'>f4'", "'c8'", "'g'", "object", "None", "'f4,i4'")
_HOSTILE = (
    "({0}).shape[0]",
    "({0}).size",
    "({0}).ndim",
    "({0}).real",
    "({0}).T",
    "np.shape({0})",
    "np.size({0})",
    "np.ndim({0})",
    "np.exp({0})",
    "np.sum({0})",
    "np.where({0} > 1, {0}, {1})",
    "np.add.reduce({0})",
    "np.add({0}, {1}, dtype='f8')",
    "({0}) ** 2",
    "({0}) @ ({1})",
    "({0} if {1} else {1})",
    "({0} < {1} < 9)",
    "({0} and {1})",
    "({0} or {1})",
    "(not {0})",
    "({0} is {1})",
    "({0} in (1, 2))",
    "(1, 2)[{0}]",
    "[{0} for _ in (1,)][0]",
    "next({0} for _ in (1,))",
    "(lambda v: v + 1)({0})",
    "({0})[0]",
    "({0})[...]",
    "({0})[()]",
    "int({0})",
    "float({0})",
    "np.int8({0})",
    "np.float32({0})",
    "divmod({0}, 3)[0]",
    "round({0})",
    "len(str({0}))",
    "len(format({0}))",
    "('%s' % ({0},) == '1')",
    "isinstance({0}, np.ndarray)",
    "getattr({0}, 'ndim')",
    "(({0},) == ({1},))",
    "({0}).sum()",
    "({0}).item()",
    "({0}).astype('int64', copy=False)",
)
_BODIES = (
    ("return {0}", 10),
    ("return ({0}, {1})", 3),
    ("return ({0}, ({1}, {0}))", 1),
    ("y = {0}\n    return (y, y)", 2),
    ("return {{'a': {0}, 'b': {1}}}", 3),
    ("return {{'a' + 'b': {0}, 1: {1}}}", 1),
    ("y = {0}\n    z = y * (w := {1})\n    return z - w", 2),
    ("if K > 2:\n        return {0}\n    return {1}", 2),
    ("return {0} if c else {1}", 1),
    ("y = {0}\n    y += {1}\n    return y", 1),
    ("try:\n        if {0} > 5:\n            return {1}\n    except Exception:\n"
     "        pass\n    return {1} * 2", 2),
    ("with np.errstate(all='ignore'):\n        return {0}", 1),
    ("for _ in (1, 2):\n        y = {0}\n    return y", 1),
    ("while False:\n        pass\n    return {0}", 1),
    ("if {0}:\n        return {1}\n    return {0}", 1),
    ("assert {0} is not None\n    return {1}", 1),
    ('return {{f"""{{{0}}}""": {1}}}', 1),
    ("return {{'%s' % ({0},): {1}}}", 1),
    ("return {{1.5: {0}}}", 1),
    ("return {{True: {0}}}", 1),
    ("return 7", 1),
    ("return ({0}, 7)", 1),
    ("return None", 1),
    ("return ()", 1),
    ("return [{0}, {1}]", 1),
    ("return ({0}, None)", 1),
    ("return K", 1),
    ("yield {0}", 1),
    ("global K\n    K = 3\n    return {0}", 1),
    ("y = {0}\n    del y\n    return {1}", 1),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A function and elements for it."""

    fn: Callable[..., Any]
    source: str
    columns: Any
    size: int

    def __repr__(self) -> str:
        leaves = self.columns.values() if isinstance(self.columns, dict) else self.columns
        kinds = [self.columns] if isinstance(self.columns, np.ndarray) else leaves
        return f"{self.source}\n{[(leaf.dtype, leaf.shape) for leaf in kinds]}"


def random_case(seed: int) -> Case:
    """Return a function of a random kind of element, and elements of extreme values."""
    rng = random.Random(seed)
    hostility = rng.choice([0.0, 0.0, 0.0, 0.15])
    form = rng.choice(["bare", "bare", "tuple", "dict", "whole"])
    arguments, variables, leaves = {
        "bare": ("x", ["x"], 1),
        "tuple": ("a, b", ["a", "b"], 2),
        "dict": ("d", ["d['a']", "d['b']"], 2),
        "whole": ("*args", ["args[0]", "args[1]"], 2),
    }[form]
    size = rng.choice([1, 2, 3, 5, 40, 70])
    shape = rng.choice(SHAPES)
    columns = []
    for _ in range(leaves):
        own = rng.choice(SHAPES) if rng.random() < 0.1 else shape
        dtype = rng.choice(OTHERS if rng.random() < 0.08 else NUMBERS)
        columns.append(extreme_values(rng, np.dtype(dtype), (size, *own)))
    if rng.random() < 0.4:
        columns = [columns[0].copy() for _ in columns]
    # A default of a positional argument, of one that is not, or a local.
    k = "k = 5\n    " if form == "whole" and rng.random() < 0.8 else ""
    arguments += "" if k else ", k=5"
    source = f"def f({arguments}):\n    {k}{_body(rng, variables, hostility)}"
    fn = compile_function(source)
    if form == "bare":
        return Case(fn, source, columns[0], size)
    if form == "dict":
        return Case(fn, source, {"a": columns[0], "b": columns[1]}, size)
    return Case(fn, source, tuple(columns), size)


def compile_function(source: str) -> Callable[..., Any]:
    """Return the function `f` of the text, which may read `MODULE` and a number `c` around it."""
    names = dict(MODULE)
    text = "def around(c):\n" + "".join(f"    {line}\n" for line in source.split("\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        exec(compile(f"{text}    return f\n", "<random>", "exec"), names)
    return names["around"](4)


def extreme_values(
    rng: random.Random, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return values from the ends of the dtype's range, and a few between them."""
    made = np.zeros(shape, dtype)
    if dtype.kind == "b":
        chosen: list[Any] = [False, True]
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        chosen = [info.min, info.max, info.min + 1, info.max // 2, 0, 1, 2, 3, 7, 8, 63, 64, 100]
        chosen += [-1, -2, -7] if dtype.kind == "i" else []
    elif dtype.kind == "f":
        low = np.finfo(dtype)
        chosen = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, 3.7, -3.7, 100.25, np.nan, np.inf]
        chosen += [-np.inf, low.max, low.min, low.tiny, low.smallest_subnormal, low.eps]
    else:
        chosen = [0, 1, 2, 5]
    for index in np.ndindex(shape):
        made[index] = np.asarray(rng.choice(chosen)).astype(dtype)
    return made


def _body(rng: random.Random, variables: list[str], hostility: float) -> str:
    bodies = _BODIES if hostility else _BODIES[:9]
    body = rng.choices([text for text, _ in bodies], [weight for _, weight in bodies])[0]
    depth = rng.choice([1, 1, 2, 3])
    return body.format(*(_expression(rng, variables, depth, hostility) for _ in range(2)))


def _expression(rng: random.Random, variables: list[str], depth: int, hostility: float) -> str:
    if depth == 0:
        return rng.choice(variables)

    def below() -> str:
        return _expression(rng, variables, rng.randrange(depth), hostility)

    def other() -> str:
        if rng.random() < 0.5:
            return below()
        return rng.choice(_HOSTILE_CONSTANTS if rng.random() < hostility else _CONSTANTS)

    if rng.random() < hostility:
        return rng.choice(_HOSTILE).format(below(), other())
    pair = (below(), other()) if rng.random() < 0.7 else (other(), below())
    match rng.randrange(6):
        case 0 | 1:
            return f"({pair[0]} {rng.choice(_OPERATORS)} {pair[1]})"
        case 2:
            return f"({pair[0]} {rng.choice(_COMPARISONS)} {pair[1]})"
        case 3:
            return f"({rng.choice(_UNARY).format(below())})"
        case 4:
            if rng.random() < 0.5:
                return f"np.{rng.choice(_ONE)}({below()})"
            return f"np.{rng.choice(_TWO)}({pair[0]}, {pair[1]})"
        case _:
            return f"({below()}).astype({rng.choice(_TYPES)})"
