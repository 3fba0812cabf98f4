"""Calls of user functions: argument passing and error wrapping."""

from __future__ import annotations

import dataclasses
import re
import reprlib
import traceback
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import PurePath
from typing import Any, NamedTuple

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

__all__ = ["ErrorParts", "UserFunction", "map_rows", "split_message", "step_name"]

_UNKNOWN_ELEMENT: Any = object()
_MAX_SHOWN_LENGTH = 200
_MAX_TEXT_LENGTH = 80
_MAX_SHOWN_ITEMS = 8
"""Largest size of an array whose numbers are shown; others are shown by shape and dtype."""


def step_name(node: Node, kind: str | None = None) -> str:
    """Return the name of a step in errors: its method, and the user's file and line."""
    kind = kind or node.method
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
            f"{position}: {message}{_format_element(element)}{_TRACEBACK_HEADING}{text}",
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
    """Short representations of elements that call no user code and take bounded time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxother, self.maxlevel = _MAX_TEXT_LENGTH, 60, 3
        self.maxdict = self.maxlist = self.maxtuple = 8

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, np.ndarray):
            if x.size > _MAX_SHOWN_ITEMS or x.dtype.hasobject:
                return f"array of shape {x.shape}, {x.dtype}"
            return self.repr1(np.asarray(x).tolist(), level)
        if isinstance(x, np.generic) and not x.dtype.hasobject:
            return self.repr1(x.item(), level)
        if type(x) is bytes:
            return repr(x) if len(x) <= self.maxother else f"{x[: self.maxother]!r}..."
        if isinstance(x, PurePath):
            return self.repr1(PurePath.__str__(x), level)
        if type(x) is dict:
            keys = ((self.repr1(key, level - 1) + ": ", value) for key, value in x.items())
            return f"{{{self._repr_items(keys, len(x), level)}}}"
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            labels = ((f"{name}=", value) for name, value in zip(x._fields, x, strict=False))
            return f"{type(x).__name__}({self._repr_items(labels, len(x), level)})"
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = [f.name for f in dataclasses.fields(x)]
            labels = ((f"{name}=", object.__getattribute__(x, name)) for name in fields)
            return f"{type(x).__name__}({self._repr_items(labels, len(fields), level)})"
        if type(x) not in _PLAIN:
            return f"<{type(x).__name__}>"
        return super().repr1(x, level)

    def _repr_items(self, items: Iterable[tuple[str, Any]], count: int, level: int) -> str:
        """Return the first labels and values; `reprlib` sorts keys, which calls user code."""
        if level <= 0 and count:
            return self.fillvalue
        shown = [
            label + self.repr1(value, level - 1) for label, value in islice(items, self.maxdict)
        ]
        return ", ".join(shown + [self.fillvalue] * (count > self.maxdict))


_PLAIN = (type(None), bool, int, float, complex, str, tuple, list)
_ELEMENT_REPR = _ElementRepr()
_ELEMENT_PREFIX = "The element: "
_TRACEBACK_HEADING = "\n\nOriginal traceback:\n"


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
    return f"\n{_ELEMENT_PREFIX}{shown}"


class ErrorParts(NamedTuple):
    """The parts of the message of an error; "" if unknown."""

    message: str
    step: str = ""
    element: str = ""


def split_message(error: BaseException) -> ErrorParts:
    """Return the parts of an error's message, without its traceback.

    An error that crosses processes is text, so the parts are found in the text.
    """
    name = type(error).__name__
    text = describe_error(error).removeprefix(name).removeprefix(": ")
    message = text.partition(_TRACEBACK_HEADING)[0]
    message, _, element = message.partition(f"\n{_ELEMENT_PREFIX}")
    found = _STEP_IN_MESSAGE.match(message)
    return ErrorParts(message, found.group("step") if found else "", element)


_STEP_IN_MESSAGE = re.compile(
    r"(?:the function .{1,200}? of|element -?\d+ of) "
    r"(?P<step>\w+(?: \([^()]{1,200}\))?)(?: raised |: )"
)


def _user_frames(error: BaseException) -> Any:
    """Return the traceback from the first frame outside this package on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        _INTERNAL_MODULES
    ):
        frames = frames.tb_next
    return frames


_ARITY_ERROR = re.compile("takes .*positional argument|missing .*positional argument")
_INTERNAL_MODULES = ("headrace.data.resampling", "headrace.execution", "headrace.plan")
