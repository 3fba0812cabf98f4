"""Recognition of functions that make one batch of each window.

`windows.flat_map(lambda w: w.batch(32))` opens a dataset per window, which costs a hundred times
more than copying its elements. If the function does nothing else, `BatchedWindows` yields the same
batches without calling it. That is proved as in `plan/column_proof.py`:

1. The function's code is a straight line of instructions on an allow list. Attributes are `batch`,
   `zip` and `Dataset`, and values read from outside are integers, the package, or `Dataset`.
2. Called with a placeholder for each component of a window, it returns `w.batch(n)` of its only
   argument, or `Dataset.zip` of one batch of each of its arguments, in a tuple and in their order.
3. A batch holds all elements of a window. The proof is valid while the values read from outside
   are the same (`WindowBatchProof.holds`).
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from headrace.element.structure import flatten
from headrace.plan.batching import Batch
from headrace.plan.combining import Interleave, Zip
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.sliding_windows import BatchedWindows, Window, WindowBatchProof
from headrace.plan.source import Source

__all__ = ["mark_window_batches"]


def mark_window_batches(node: Node) -> Node:
    """Return a step, or the faster equivalent of a `flat_map` that batches windows."""
    if not (
        isinstance(node, Interleave)
        and isinstance(node.input, Window)
        and node.cycle_length == 1
        and node.num_parallel_calls is None
    ):
        return node
    proof = _prove(node.fn, node.input)
    if proof is None:
        return node
    return BatchedWindows(
        input=node.input.input,
        window=node.input,
        flat_map=node,
        proof=proof,
        location=node.location,
        number=node.number,
    )


def _prove(fn: Callable[..., Any], window: Window) -> WindowBatchProof | None:
    make_dataset: Any = window.make_dataset
    if type(fn) is not types.FunctionType or fn.__defaults__ or fn.__kwdefaults__:
        return None
    code = fn.__code__
    names = _global_names(code)
    if names is None or not code.co_argcount or code.co_flags & _VARIADIC:
        return None
    if (make_dataset.__module__, make_dataset.__qualname__) != ("headrace.data.dataset", "Dataset"):
        return None  # a subclass may change the methods
    allowed = (sys.modules.get("headrace"), make_dataset)
    proof = WindowBatchProof(fn=fn, code=code, names=names, values=None, batches=())
    values = proof.read_values()
    if values is None or not all(type(v) in (int, bool) or v in allowed for v in values):
        return None
    leaves = [FromSource(source=_Placeholder()) for _ in range(code.co_argcount)]
    try:
        plan = fn(*map(make_dataset, leaves)).plan
    except Exception:
        return None  # raised again, in its turn, when the windows are read
    members: tuple[Any, ...] = (plan,)
    if len(leaves) > 1:
        if not isinstance(plan, Zip) or plan.structure != flatten((0,) * len(leaves))[1]:
            return None
        members = plan.datasets
    for member, leaf in zip(members, leaves, strict=True):
        if not isinstance(member, Batch) or member.input is not leaf:
            return None
        if member.size < window.size or (member.drop_remainder and member.size > window.size):
            return None
    return WindowBatchProof(
        fn=fn,
        code=code,
        names=names,
        values=values,
        batches=tuple([member for member in members if isinstance(member, Batch)]),
    )


@lru_cache(maxsize=256)
def _global_names(code: types.CodeType) -> tuple[str, ...] | None:
    """Return the globals that `code` reads, or None if it may do more than batch its arguments."""
    if code.co_exceptiontable:
        return None
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _INSTRUCTIONS:
            return None
        if instruction.opname == "LOAD_GLOBAL":
            names[instruction.argval] = None
        elif (
            instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            and instruction.argval not in _ATTRIBUTES
        ):
            return None
    return tuple(names)


class _Placeholder(Source):
    """Stands for the elements of a window while a function is proved."""

    @property
    def size(self) -> int:
        return 1

    @property
    def elements_per_index(self) -> int | None:
        return None

    def open(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the placeholder of a window has no elements")


_ATTRIBUTES = frozenset(["batch", "zip", "Dataset"])
_INSTRUCTIONS = frozenset(
    [
        *("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "COPY_FREE_VARS", "PUSH_NULL"),
        *("LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_CONST", "LOAD_GLOBAL"),
        *("LOAD_ATTR", "LOAD_METHOD", "BUILD_TUPLE"),
        *("PRECALL", "KW_NAMES", "CALL", "CALL_KW", "RETURN_VALUE"),
    ]
)
"""Instructions of Python 3.11 to 3.13 without jumps and stores."""
_VARIADIC = 0x04 | 0x08
"""Code flags of functions with *args or **kwargs."""
