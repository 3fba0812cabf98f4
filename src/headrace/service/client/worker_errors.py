"""Error of an element, with the worker that raised it."""

from __future__ import annotations

__all__ = ["add_worker_address"]


def add_worker_address(worker_address: str, error: Exception) -> Exception:
    """Return the error with its worker in the first line, whose log and files can help.

    Its other attributes (the position, the original traceback) are unchanged.
    """
    message, prefix = str(error), f"on the worker at {worker_address}: "
    if not message.startswith(prefix):  # an interrupt may repeat the call
        error.args = (f"{prefix}{message}", *error.args[1:])
    return error
