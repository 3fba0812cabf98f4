"""Calls of user functions: argument passing and error wrapping."""

from __future__ import annotations

import re
import reprlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from headrace.element.ownership import take_ownership
from headrace.errors import (
    HeadraceError,
    InvalidElementError,
    OutOfRangeError,
    UserFunctionError,
    describe_error,
)
from headrace.plan.node import Node, describe_function

__all__ = ["UserFunction", "map_rows", "step_name"]

_UNKNOWN_ELEMENT: Any = object()
_MAX_SHOWN_LENGTH = 200
_MAX_SHOWN_ITEMS = 8
"""Largest size of an array whose numbers are shown; others are shown by shape and dtype."""


def step_name(node: Node, kind: str | None = None) -> str:
    """Return the name of a step in errors: its kind, and the user's file and line."""
    kind = kind or node.kind
    return f"{kind} ({node.location})" if node.location else kind


class UserFunction:
    """A user's function, as called by a step.

    Args:
        fn: The function.
        step: Name of the step, from `step_name`.
        contain_exits: Whether to convert KeyboardInterrupt, SystemExit and the like to
            UserFunctionError as well. On a server thread only the function itself raises them.
    """

    __slots__ = ("_contain_exits", "_step", "fn")

    def __init__(self, fn: Callable[..., Any], step: str, contain_exits: bool) -> None:
        self.fn = fn
        self._step = step
        self._contain_exits = contain_exits

    def __call__(self, element: Any) -> Any:
        """Call the function; a plain tuple is passed as several arguments."""
        return self.fn(*element) if type(element) is tuple else self.fn(element)

    def wrap_error(
        self, error: BaseException, position: int, element: Any = _UNKNOWN_ELEMENT
    ) -> Exception:
        """Return the error to raise for one raised by a call, with its traceback and the element.

        Headrace's own errors (such as a corrupt record in a nested dataset) are returned unchanged.
        KeyboardInterrupt, SystemExit and the like are raised at once unless they are contained.

        Args:
            error: Error raised by the call.
            position: Position of the element, for the message.
            element: Argument of the call; the message shows its beginning.
        """
        if not isinstance(error, Exception):
            if not self._contain_exits:
                raise error
        elif isinstance(error, InvalidElementError):
            result = InvalidElementError(f"element {position} of {self._step}: {error}")
            result.__cause__ = error
            return result
        elif isinstance(error, HeadraceError) and not isinstance(error, OutOfRangeError):
            return error
        kind = type(error).__name__
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
        message = describe_error(error).removeprefix(kind).removeprefix(": ")
        if kind == "TypeError" and _ARITY_ERROR.search(message) and _user_frames(error) is None:
            message += (
                "; an element that is a tuple is passed as one argument per component (write "
                "lambda a, b: ... or lambda *components: ...), any other element as a single "
                "argument"
            )
        wrapped = UserFunctionError(
            f"the function {describe_function(self.fn)} of {self._step} raised {kind} for element "
            f"{position}: {message}{_format_element(element)}\n\nOriginal traceback:\n{text}",
            position=position,
            original_type=kind,
            original_traceback=text,
        )
        wrapped.__cause__ = error
        return wrapped


def map_rows(call: UserFunction, rows: Iterable[Any], results: list[Any]) -> None:
    """Append the result of `call` for each row.

    If a row fails, the results of the rows before it have been appended, and the function's
    original error propagates; see `UserFunction.wrap_error`.
    """
    fn, append = call.fn, results.append
    for row in rows:
        append(take_ownership(fn(*row) if type(row) is tuple else fn(row)))


class _ElementRepr(reprlib.Repr):
    """Short representations of elements that call no user code."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxother, self.maxlevel = 160, 60, 3
        self.maxdict = self.maxlist = self.maxtuple = 8

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, np.ndarray):
            if x.size > _MAX_SHOWN_ITEMS or x.dtype.hasobject:
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
_ELEMENT_REPR = _ElementRepr()


def _format_element(element: Any) -> str:
    """Return a line that shows an element, or "" if the element is unknown."""
    if element is _UNKNOWN_ELEMENT:
        return ""
    try:
        shown = _ELEMENT_REPR.repr(element)
    except Exception:
        return ""
    if len(shown) > _MAX_SHOWN_LENGTH:
        shown = f"{shown[: _MAX_SHOWN_LENGTH - 3]}..."
    return f"\nThe element: {shown}"


def _user_frames(error: BaseException) -> Any:
    """Return the traceback from the first frame outside this package on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        _INTERNAL_MODULES
    ):
        frames = frames.tb_next
    return frames


_ARITY_ERROR = re.compile("takes .*positional argument|missing .*positional argument")
_INTERNAL_MODULES = ("headrace.execution", "headrace.plan")
