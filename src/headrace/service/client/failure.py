"""An element's error, as the consumer is to see it: with the worker that it came from."""

from __future__ import annotations

__all__ = ["came_from"]


def came_from(worker_address: str, error: Exception) -> Exception:
    """Return the error with its worker in the first line: that one's log and files are to be seen.

    What else it carries (the position, the original traceback) stays as it is.
    """
    words, origin = str(error), f"on the worker at {worker_address}: "
    if not words.startswith(origin):  # after an interruption it is asked twice
        error.args = (f"{origin}{words}", *error.args[1:])
    return error
