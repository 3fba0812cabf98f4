"""What an error of a scheduled function becomes: its traceback, and where it was."""

from __future__ import annotations

import traceback
from types import TracebackType

from headrace.errors import HeadraceError, UserFunctionError, describe_error, missing_module_hint

__all__ = ["MISSING_MODULE", "blame"]

MISSING_MODULE = (
    "install the package there, or make your module importable for it (PYTHONPATH, or "
    "`headrace server --preload FOLDER/NAME.py`)"
)
_OURS = ("headrace.coordinator", "headrace.parameter_server.origin", "contextlib")


def blame(function: str, worker: int, error: BaseException) -> Exception:
    """Return the error to send for one that a function raised.

    Errors of Headrace's own (a dataset's end, a server that is gone) stay as they are. All others,
    SystemExit and the like included, are a UserFunctionError: on a thread of a worker nobody but
    the function raises them.
    """
    if isinstance(error, HeadraceError):
        return error
    kind = type(error).__name__
    text = "".join(traceback.format_exception(type(error), error, _users(error.__traceback__)))
    said = describe_error(error).removeprefix(kind).removeprefix(": ")
    said += missing_module_hint(kind, MISSING_MODULE)
    return UserFunctionError(
        f"the function {function} raised {kind} on worker {worker}: {said}\n\n"
        f"Original traceback:\n{text}",
        original_type=kind,
        original_traceback=text,
    )


def _users(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that lead to the function."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        frames = frames.tb_next
    return frames
