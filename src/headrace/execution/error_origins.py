"""Origins of errors: where one stands among the elements of its unit.

An error that is raised at the root or below is counted there (`root`), as an element is. At a step
above the root an element fails that has an origin. An error carries its own to whoever reads.

Rule. Whoever reads a unit, from the start or from an element on, finds the same origins.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.execution.places import Places

__all__ = [
    "ErrorOrigin",
    "Failed",
    "blame_element",
    "fails_below",
    "give_origin",
    "origin_of_error",
]


class ErrorOrigin(NamedTuple):
    """Where an error stands. Sorted, those of a unit are in order."""

    unit: int
    """Of the stream of the plan."""
    ordinal: int
    """Of the element before which it stands, at the root."""
    number: int
    """1, 2, ... among those that stand there; 0: the element before that one has failed itself;
    -1: so it has, below steps of the client's half that choose (`plan.units`)."""
    is_last: bool = False
    """Whether it is known that nothing of the unit comes after it."""

    @property
    def element(self) -> int:
        """The ordinal of the element that is to be read for the error to be met."""
        return self.ordinal if self.number > 0 else self.ordinal - 1

    @property
    def stands_for_all(self) -> bool:
        """Whether the unit has nothing else: what it was to be made of failed."""
        return self.is_last and self.ordinal == 0


class Failed:
    """Stands in the place of an element that has failed, until its turn has come.

    Args:
        error: To be raised then.
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


_NAME = "_headrace_origin"


def give_origin(error: BaseException, origin: ErrorOrigin) -> None:
    """Let an error carry where it stands."""
    setattr(error, _NAME, origin)


def blame_element(error: BaseException, places: Places | None, index: int) -> None:
    """Let an error carry that it is of an element, if elements have origins.

    Args:
        error: Which.
        places: What travels with elements.
        index: Which of them has failed.
    """
    if places is not None and (places.dtype.names or ("",))[-1] == "ordinal":
        unit, ordinal = int(places["unit"][index]), int(places["ordinal"][index])
        give_origin(error, ErrorOrigin(unit, ordinal + 1, 0))


def fails_below(error: BaseException) -> None:
    """Let an error of an element say that it comes from below steps that choose."""
    origin = origin_of_error(error)
    if origin is not None and not origin.number:
        give_origin(error, origin._replace(number=-1))


def origin_of_error(error: BaseException) -> ErrorOrigin | None:
    """Return where an error stands, if it carries that."""
    return getattr(error, _NAME, None)
