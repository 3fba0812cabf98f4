"""Errors of a task's thread, as reported to its clients."""

from __future__ import annotations

import traceback
from types import TracebackType

from headrace.errors import HeadraceError, OutOfRangeError, UserFunctionError, missing_module_hint

__all__ = ["format_error", "to_client_error"]

_PACKAGE_PREFIX = "headrace."
_MISSING_MODULE = (
    "install the package there; make your own module importable (PYTHONPATH, or "
    "`headrace worker --preload FOLDER/NAME.py`), or send it with the dataset: "
    '`modules=["name"]` of `distribute`'
)


def to_client_error(error: BaseException) -> HeadraceError:
    """Return the error to send to clients for an error raised by a task's iterator.

    Errors that are no `Exception` (`sys.exit`, a cancelled asyncio task) or would end a loop
    (StopIteration, OutOfRangeError) come from user functions, because steps let neither escape.
    Other Headrace errors are returned unchanged.
    """
    if isinstance(error, UserFunctionError):
        return _with_hint(error)
    if isinstance(error, HeadraceError) and not isinstance(error, OutOfRangeError):
        return error
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return HeadraceError(format_error(error))
    text = "".join(traceback.format_exception(type(error), error, _user_traceback(error)))
    return UserFunctionError(
        f"a function of the dataset raised {format_error(error)}\n\nOriginal traceback:\n{text}",
        original_type=type(error).__name__,
        original_traceback=text,
    )


def _with_hint(error: UserFunctionError) -> UserFunctionError:
    """Return a user function's error, with advice about a missing module if it is one."""
    hint = missing_module_hint(error.original_type, _MISSING_MODULE)
    if not hint:
        return error
    summary, newline, rest = str(error).partition("\n")
    return UserFunctionError(
        summary + hint + newline + rest,
        position=error.position,
        original_type=error.original_type,
        original_traceback=error.original_traceback,
    )


def format_error(error: BaseException) -> str:
    """Return the class and message of an error, even if `str` of it fails."""
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as second:
        message = f"(no message: its __str__ raised {type(second).__name__})"
    return f"{name}: {message}" if message else name


def _user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback without Headrace's frames before the user's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        _PACKAGE_PREFIX
    ):
        frames = frames.tb_next
    return frames
