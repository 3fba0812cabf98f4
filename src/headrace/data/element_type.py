"""The type of the elements of a dataset, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers know this module even where it is not installed
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

__all__ = ["T_co"]
