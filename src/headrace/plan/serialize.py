"""Serialization of plans, including users' functions.

A pickled plan begins with a line that names its format and the Python version that wrote it:
functions are sent as bytecode, which another minor version of Python must not run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle

from headrace.errors import FailedPreconditionError
from headrace.plan.fingerprint import global_names
from headrace.plan.node import Node, describe_function
from headrace.plan.traverse import walk
from headrace.plan.user_function import step_name
from headrace.versions import OLDEST_PLAN_FORMAT, PLAN_FORMAT, own_versions, python_mismatch

__all__ = [
    "Pickler",
    "describe_unpicklable",
    "dump_plan",
    "find_references",
    "is_pickled_by_name",
    "load_plan",
]

_MAGIC = b"headrace-plan "
_MAX_HEADER_LENGTH = 200
_READABLE_FORMATS = {str(number) for number in range(OLDEST_PLAN_FORMAT, PLAN_FORMAT + 1)}


def dump_plan(plan: Node) -> bytes:
    """Return the plan as bytes.

    Raises:
        FailedPreconditionError: If part of the plan cannot be pickled; the message names the step,
            the function and the object it refers to.
    """
    try:
        return _dump(plan, _header())
    except Exception as error:
        raise FailedPreconditionError(
            "this dataset cannot be sent to another process: "
            f"{_describe_culprit(plan) or error}. Create such objects inside the function, or "
            "once per process in a module"
        ) from error


def load_plan(data: bytes) -> Node:
    """Return the plan that `dump_plan` serialized. Runs code, so pass trusted bytes only.

    Raises:
        FailedPreconditionError: If another minor version of Python pickled the plan, or if the data
            is not a plan in a format that this version of Headrace reads.
    """
    plan = pickle.loads(memoryview(data)[_check_header(data) :])
    if not isinstance(plan, Node):
        raise FailedPreconditionError(f"expected a pickled plan, found {type(plan).__name__}")
    return plan


def _header() -> bytes:
    mine = own_versions()
    return b"%b%d %b %b\n" % (
        _MAGIC,
        PLAN_FORMAT,
        mine.python.encode(),
        mine.headrace.encode(),
    )


def _check_header(data: bytes) -> int:
    """Return the length of a plan's header."""
    mine = own_versions()
    end = data.find(b"\n", 0, _MAX_HEADER_LENGTH)
    fields = data[len(_MAGIC) : end].decode("ascii", "replace").split(" ")
    is_plan = data.startswith(_MAGIC) and end >= 0 and len(fields) == 3
    if not is_plan or fields[0] not in _READABLE_FORMATS:
        found = f"format {fields[0]:.20}" if data.startswith(_MAGIC) else "unknown data"
        if is_plan:
            found += f" of Headrace {fields[2]:.20}"
        raise FailedPreconditionError(
            f"this process ({mine}) reads pickled plans of formats {OLDEST_PLAN_FORMAT} to "
            f"{PLAN_FORMAT}, but got {found}; register the dataset again, with the same version "
            "of Headrace on both sides"
        )
    if python_mismatch(fields[1], mine.python):
        raise FailedPreconditionError(
            f"the dataset was pickled by Python {fields[1]} with Headrace {fields[2]}, but this "
            f"process runs {mine}. Functions are sent as bytecode, which differs between minor "
            "versions of Python; run the same minor version on both sides, and register the "
            "dataset again"
        )
    return end + 1


def _describe_culprit(plan: Node) -> str | None:
    for node in walk(plan):
        for name, value in node.parameters().items():
            problem = _pickling_problem(value)
            if problem is None:
                continue
            if callable(value):
                inside = describe_unpicklable(value) or problem
                name = describe_function(value)
                return f"the function {name} of {step_name(node)} refers to {inside}"
            return f"{type(node).__name__}.{name}: {problem}"
    return None


def find_references(fn: object) -> dict[str, Any]:
    """Return the globals and enclosed variables that a function refers to, by name."""
    fn = getattr(fn, "func", fn)  # of a functools.partial
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    names = global_names(code)
    references = {n: v for n, v in getattr(fn, "__globals__", {}).items() if n in names}
    cells = getattr(fn, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # a variable that is assigned later
            references[name] = cell.cell_contents
    return references


def is_pickled_by_name(fn: object) -> bool:
    """Return whether a function is pickled by module and name, without what it refers to."""
    fn = getattr(fn, "func", fn)  # of a functools.partial
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<locals>")
    if module in ("__main__", None) or module in cloudpickle.list_registry_pickle_by_value():
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is fn


def describe_unpicklable(fn: object) -> str | None:
    """Return a description of the first unpicklable object a function refers to, or None."""
    for name, value in find_references(fn).items():
        if (problem := _pickling_problem(value)) is not None:
            return f"`{name}`, {problem}"
    return None


def _pickling_problem(value: object) -> str | None:
    try:
        _dump(value)
    except Exception as error:
        return f"a {type(value).__name__} that cannot be pickled ({error})"
    return None


def _cache_results(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


_CACHED_FUNCTION = type(functools.lru_cache(_cache_results))


def _refuse_open_file(file: io.TextIOWrapper) -> Any:
    # cloudpickle would send the file's current text, and a partly read file would start over.
    if file in (sys.stdout, sys.stderr):
        return _default_dispatch_table[io.TextIOWrapper](file)
    raise TypeError(f"cannot pickle the open file {file.name!r}")


_default_dispatch_table: Any = cloudpickle.Pickler.dispatch_table


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by value, as cloudpickle does, and refuses open files."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of a value, as cloudpickle does, with two exceptions.

        Modules of a custom class are pickled by name. Functions with `functools.cache` in a script
        are pickled by value, without the cached results.
        """
        kind = type(obj)
        if kind is not types.ModuleType and issubclass(kind, types.ModuleType):  # such as torch.ops
            name = getattr(obj, "__name__", "")
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        if kind is _CACHED_FUNCTION and not is_pickled_by_name(obj):
            # By name it would not be found: `__main__` is another module in worker processes.
            return _cache_results, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)

    dispatch_table: ClassVar = ChainMap[Any, Any](
        {io.TextIOWrapper: _refuse_open_file}, _default_dispatch_table
    )


def _dump(value: object, header: bytes = b"") -> bytes:
    with io.BytesIO() as file:
        file.write(header)
        Pickler(file, protocol=5).dump(value)
        return file.getvalue()
