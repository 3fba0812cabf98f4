"""What went wrong in a task's thread, as its clients are to see it."""

from __future__ import annotations

import traceback
from types import TracebackType

from headrace.errors import HeadraceError, OutOfRangeError, UserFunctionError, missing_module_hint

__all__ = ["describe", "for_clients"]

_OWN = "headrace."
_MISSING_MODULE = (
    "install the package there; a module of yours is made importable (PYTHONPATH, or "
    "`headrace worker --preload FOLDER/NAME.py`), or travels with the dataset: "
    '`modules=["name"]` of `distribute`'
)


def for_clients(error: BaseException) -> HeadraceError:
    """Return the error to send to clients for one that escaped from a task's iterator.

    What is no `Exception` (sys.exit, a cancelled asyncio task) and what would end a loop
    (StopIteration, OutOfRangeError) comes from a function of the user's; no step of ours lets
    either escape. Errors of Headrace's own pass as they are.
    """
    if isinstance(error, UserFunctionError):
        return _with_hint(error)
    if isinstance(error, HeadraceError) and not isinstance(error, OutOfRangeError):
        return error
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return HeadraceError(describe(error))
    text = "".join(traceback.format_exception(type(error), error, _frames_of_the_user(error)))
    return UserFunctionError(
        f"a function of the dataset raised {describe(error)}\n\nOriginal traceback:\n{text}",
        original_type=type(error).__name__,
        original_traceback=text,
    )


def _with_hint(error: UserFunctionError) -> UserFunctionError:
    """Return an error of the user's that also says how a missing module gets to the worker."""
    hint = missing_module_hint(error.original_type, _MISSING_MODULE)
    if not hint:
        return error
    said, mark, rest = str(error).partition("\n")
    return UserFunctionError(
        said + hint + mark + rest,
        position=error.position,
        original_type=error.original_type,
        original_traceback=error.original_traceback,
    )


def describe(error: BaseException) -> str:
    """Return the class and the words of an error, also where it cannot say its words."""
    name = type(error).__name__
    try:
        words = str(error)
    except BaseException as second:
        words = f"(its words are not known: str() of it raised {type(second).__name__})"
    return f"{name}: {words}" if words else name


def _frames_of_the_user(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of this package that lead to the user's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OWN):
        frames = frames.tb_next
    return frames
