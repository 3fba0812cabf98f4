"""Plans as bytes, users' functions included."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle

from headrace.errors import FailedPreconditionError
from headrace.plan.fingerprint import looked_up_names
from headrace.plan.node import Node, describe_function
from headrace.plan.traverse import walk
from headrace.plan.user_function import step_name

__all__ = ["Pickler", "dump_plan", "held_by", "load_plan", "references"]


def dump_plan(plan: Node) -> bytes:
    """Return the plan as bytes.

    Raises:
        FailedPreconditionError: Something in the plan cannot be pickled; the message names the
            step, the function and what it holds.
    """
    try:
        return _dumped(plan)
    except Exception as error:
        raise FailedPreconditionError(
            f"this dataset cannot be sent to another process: {_culprit(plan) or error}. Create "
            "such things inside the function (or once per process, in a module), not outside it"
        ) from error


def load_plan(data: bytes) -> Node:
    """Return the plan that `dump_plan` made. Runs code: only for bytes that are trusted."""
    plan = pickle.loads(data)
    if not isinstance(plan, Node):
        raise FailedPreconditionError(f"expected a pickled plan, found {type(plan).__name__}")
    return plan


def _culprit(plan: Node) -> str | None:
    for node in walk(plan):
        for name, value in node.parameters().items():
            problem = _problem(value)
            if problem is None:
                continue
            if callable(value):
                inside = held_by(value) or problem
                name = describe_function(value)
                return f"the function {name} of {step_name(node)} holds {inside}"
            return f"{type(node).__name__}.{name}: {problem}"
    return None


def references(fn: object) -> dict[str, Any]:
    """Return what a function refers to, global or enclosed, by the names that it uses."""
    fn = getattr(fn, "func", fn)  # of a functools.partial
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    names = looked_up_names(code)
    held = {n: v for n, v in getattr(fn, "__globals__", {}).items() if n in names}
    cells = getattr(fn, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # a variable that is assigned later
            held[name] = cell.cell_contents
    return held


def held_by(fn: object) -> str | None:
    """Return words for what a function holds that cannot be pickled; None: there is nothing."""
    for name, value in references(fn).items():
        if (problem := _problem(value)) is not None:
            return f"`{name}`, {problem}"
    return None


def _problem(value: object) -> str | None:
    try:
        _dumped(value)
    except Exception as error:
        return f"a {type(value).__name__} that cannot be pickled ({error})"
    return None


def _refuse_open_file(file: io.TextIOWrapper) -> Any:
    # cloudpickle sends the text of a file that is read: a copy of what stands in it now, and a file
    # that was read in part comes whole.
    if file in (sys.stdout, sys.stderr):
        return _as_ever[io.TextIOWrapper](file)
    raise TypeError(f"cannot pickle the open file {file.name!r}")


_as_ever: Any = cloudpickle.Pickler.dispatch_table


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by value, as cloudpickle does, and no open files."""

    dispatch_table: ClassVar = ChainMap[Any, Any]({io.TextIOWrapper: _refuse_open_file}, _as_ever)


def _dumped(value: object) -> bytes:
    with io.BytesIO() as file:
        Pickler(file, protocol=5).dump(value)
        return file.getvalue()
