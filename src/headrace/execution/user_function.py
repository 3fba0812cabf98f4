"""Calls of users' functions: how an element is passed, and what an error of theirs becomes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError, UserFunctionError
from headrace.plan.node import describe_function

__all__ = ["caller", "user_error"]


def caller(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return `fn` as a function of one element: a tuple is passed as several arguments."""

    def call(element: Any) -> Any:
        return fn(*element) if isinstance(element, tuple) else fn(element)

    return call


def user_error(error: Exception, fn: Callable[..., Any], stage: str, position: int) -> Exception:
    """Return the error to raise for one that `fn` raised: its traceback, and where it was.

    Errors of Headrace's own (a corrupt record in a nested dataset, say) pass as they are.
    """
    if isinstance(error, HeadraceError):
        return error
    text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
    wrapped = UserFunctionError(
        f"the function {describe_function(fn)} of {stage} raised {type(error).__name__} for "
        f"element {position}: {error}\n\nOriginal traceback:\n{text}",
        position=position,
        original_type=type(error).__name__,
        original_traceback=text,
    )
    wrapped.__cause__ = error
    return wrapped


def _user_frames(error: Exception) -> Any:
    """Return the traceback without the frames of this package that lead to the user's."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(
        "headrace.execution"
    ):
        frames = frames.tb_next
    return frames
