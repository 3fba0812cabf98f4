"""Errors as messages: what a worker raises is what came about at the place, by name and words."""

from __future__ import annotations

from headrace import errors
from headrace.distribute.meeting.messages import Failed
from headrace.errors import FailedPreconditionError, HeadraceError, UnavailableError

__all__ = ["error_of", "failed"]

_FOR_GOOD = (UnavailableError.__name__, FailedPreconditionError.__name__)
"""After these no meeting of the session takes place."""


def failed(error: HeadraceError) -> Failed:
    """Return the message that says an error."""
    name = type(error).__name__
    return Failed(error=name, text=str(error), is_for_good=name in _FOR_GOOD)


def error_of(message: Failed) -> HeadraceError:
    """Return the error that a message says."""
    error: HeadraceError = getattr(errors, message.error)(message.text)
    return error
