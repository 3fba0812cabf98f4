"""An optional value: the result of reading an iterator that may have ended."""

from __future__ import annotations

from typing import Any, Generic

from headrace.data.element_type import T_co
from headrace.errors import InvalidArgumentError

__all__ = ["Optional"]

_NOTHING: Any = object()


class Optional(Generic[T_co]):
    """An element, or no value.

    >>> import headrace as hr
    >>> iterator = iter(hr.Dataset.range(1))
    >>> iterator.get_next_as_optional().get_value()
    np.int64(0)
    >>> iterator.get_next_as_optional().has_value()
    False

    Args:
        value: The element; omitted if there is none.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T_co = _NOTHING) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> T_co:
        """Return the element.

        Raises:
            InvalidArgumentError: If there is none.
        """
        if self._value is _NOTHING:
            raise InvalidArgumentError("Optional has no value; check has_value() first")
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"
