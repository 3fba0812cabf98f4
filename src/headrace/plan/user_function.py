"""Calls of users' functions: how an element is passed, and what an error of theirs becomes."""

from __future__ import annotations

import re
import reprlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from headrace.element.ownership import owned
from headrace.errors import (
    HeadraceError,
    InvalidElementError,
    OutOfRangeError,
    UserFunctionError,
    describe_error,
)
from headrace.plan.node import Node, describe_function

__all__ = ["UserFunction", "map_rows", "step_name"]

_UNKNOWN: Any = object()
_LONGEST_SHOWN = 200
_MOST_SHOWN = 8
"""Numbers of an array; a larger one is shown by its shape and dtype."""


def step_name(node: Node, kind: str | None = None) -> str:
    """Return how errors name a step: what it is, and where the user wrote it."""
    kind = kind or node.kind
    return f"{kind} ({node.location})" if node.location else kind


class UserFunction:
    """A user's function, as a step calls it.

    Args:
        fn: The function.
        step: The name of the step, as `step_name` gives it.
        contain_exits: Whether KeyboardInterrupt, SystemExit and the like become a
            UserFunctionError, too: on a thread of a server nobody but the function raises them.
    """

    __slots__ = ("_contain_exits", "_step", "fn")

    def __init__(self, fn: Callable[..., Any], step: str, contain_exits: bool) -> None:
        self.fn = fn
        self._step = step
        self._contain_exits = contain_exits

    def __call__(self, element: Any) -> Any:
        """Call the function; a plain tuple is passed as several arguments."""
        return self.fn(*element) if type(element) is tuple else self.fn(element)

    def blame(self, error: BaseException, position: int, element: Any = _UNKNOWN) -> Exception:
        """Return the error to raise for one that a call raised: its traceback, and where it was.

        Args:
            error: What the call raised.
            position: Number of the element.
            element: What the function was called with; the message shows the beginning of it.

        Errors of Headrace's own (a corrupt record in a nested dataset, say) stay as they are. So
        do KeyboardInterrupt, SystemExit and the like where they are not contained: they are raised
        at once.
        """
        if not isinstance(error, Exception):
            if not self._contain_exits:
                raise error
        elif isinstance(error, InvalidElementError):
            made = InvalidElementError(f"element {position} of {self._step}: {error}")
            made.__cause__ = error
            return made
        elif isinstance(error, HeadraceError) and not isinstance(error, OutOfRangeError):
            return error
        kind = type(error).__name__
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
        said = describe_error(error).removeprefix(kind).removeprefix(": ")
        if kind == "TypeError" and _ARITY.search(said) and _user_frames(error) is None:
            said += (
                "; a tuple is passed as several arguments, one for each of its parts (write "
                "lambda a, b: ... or lambda *parts: ...), and any other element as one"
            )
        wrapped = UserFunctionError(
            f"the function {describe_function(self.fn)} of {self._step} raised {kind} for element "
            f"{position}: {said}{_shown_line(element)}\n\nOriginal traceback:\n{text}",
            position=position,
            original_type=kind,
            original_traceback=text,
        )
        wrapped.__cause__ = error
        return wrapped


def map_rows(call: UserFunction, rows: Iterable[Any], results: list[Any]) -> None:
    """Append what a `map` makes of each row; one that fails raises, and those before it are there.

    The error is as the function raised it: see `UserFunction.blame`.
    """
    fn, append = call.fn, results.append
    for row in rows:
        append(owned(fn(*row) if type(row) is tuple else fn(row)))


class _Shown(reprlib.Repr):
    """Represents elements in few letters, and calls no code of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxother, self.maxlevel = 160, 60, 3
        self.maxdict = self.maxlist = self.maxtuple = 8

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, np.ndarray):
            if x.size > _MOST_SHOWN or x.dtype.hasobject:
                return f"array of shape {x.shape}, {x.dtype}"
            return self.repr1(x.tolist(), level)
        if isinstance(x, np.generic) and not x.dtype.hasobject:
            return self.repr1(x.item(), level)
        if type(x) is bytes:
            return repr(x) if len(x) <= self.maxother else f"{x[: self.maxother]!r}..."
        if type(x) not in _PLAIN:
            return f"<{type(x).__name__}>"
        return super().repr1(x, level)


_PLAIN = (type(None), bool, int, float, complex, str, tuple, list, dict)
_SHOWN = _Shown()


def _shown_line(element: Any) -> str:
    """Return a line that shows an element; empty where it is not known."""
    if element is _UNKNOWN:
        return ""
    try:
        shown = _SHOWN.repr(element)
    except Exception:
        return ""
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[: _LONGEST_SHOWN - 3]}..."
    return f"\nThe element: {shown}"


def _user_frames(error: BaseException) -> Any:
    """Return the traceback without the frames of this package that lead to the user's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    return frames


_ARITY = re.compile("takes .*positional argument|missing .*positional argument")
_OURS = ("headrace.execution", "headrace.plan")
