"""A plan node: a frozen record of one step, its inputs and what it does to spec and cardinality.

Rule 1. A node does nothing: it is built, looked at, rewritten, pickled.
Rule 2. A node's arguments are checked when it is made, in `__post_init__`.
Rule 3. A node is compared by identity; two plans that say the same have equal fingerprints.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from headrace.element.spec import Spec
from headrace.plan.source import INFINITE, UNKNOWN

__all__ = ["AUTOTUNE", "Node", "call_site", "check_callable", "check_int", "describe_function"]

AUTOTUNE = -1
"""Let Headrace choose: where tf.data takes `tf.data.AUTOTUNE`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """One step of a plan."""

    location: str = dataclasses.field(default="", repr=False)
    """The user's file and line that made it, for `explain` and errors."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes whose elements this one takes."""
        found: list[Node] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Node):
                found.append(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Node):
                found.extend(value)
        return tuple(found)

    def with_inputs(self, inputs: Sequence[Node]) -> Self:
        """Return the same step over other inputs."""
        rest = list(inputs)
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Node):
                changes[field.name] = rest.pop(0)
            elif isinstance(value, tuple) and value and isinstance(value[0], Node):
                changes[field.name] = tuple(rest[: len(value)])
                del rest[: len(value)]
        return dataclasses.replace(self, **changes)

    def spec(self, *inputs: Spec) -> Spec | None:
        """Return the element spec for inputs of these specs; None when only running can tell."""
        return inputs[0]

    def cardinality(self, *inputs: int) -> int:
        """Return the number of elements for inputs of these many (INFINITE, UNKNOWN or >= 0)."""
        return inputs[0]

    def parameters(self) -> dict[str, Any]:
        """Return what distinguishes this step from another of its kind, without its inputs."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name != "location"
            and not isinstance(value := getattr(self, field.name), Node)
            and not (isinstance(value, tuple) and value and isinstance(value[0], Node))
        }

    def describe(self) -> str:
        """Return one line for `explain`: the step, its arguments, where the user wrote it."""
        arguments = ", ".join(
            f"{name}={_shown(value)}"
            for name, value in self.parameters().items()
            if value is not None
        )
        place = f"  # {self.location}" if self.location else ""
        return f"{type(self).__name__}({arguments}){place}"


def describe_function(fn: Callable[..., Any]) -> str:
    """Return a short name for a function: its qualified name, and where it was written."""
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{name}:{code.co_firstlineno}" if code is not None else str(name)


def call_site() -> str:
    """Return "file:line" of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("headrace."):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def check_int(name: str, value: object, *, minimum: int, also: Sequence[int] = ()) -> int:
    """Return `value` as an int of at least `minimum` (or one of `also`).

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, but got {value!r} of type {_name(value)}")
    if value < minimum and value not in also:
        allowed = "".join(f" or {_SPELLINGS.get(a, a)}" for a in also)
        raise ValueError(f"`{name}` must be at least {minimum}{allowed}, but got {value}")
    return int(value)


def check_callable(name: str, value: object) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, but got {value!r} of type {_name(value)}")


def _shown(value: object) -> str:
    if callable(value):
        return describe_function(value)
    spec = getattr(value, "element_spec", None)
    if spec is not None:  # a source: its data would fill the page
        return f"{type(value).__name__}[{getattr(value, 'size', '?')} x {spec!r}]"
    text = repr(value)
    return text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..."


def _name(value: object) -> str:
    return type(value).__name__


_LONGEST_ARGUMENT = 80
_SPELLINGS = {INFINITE: "-1", UNKNOWN: "-2"}
