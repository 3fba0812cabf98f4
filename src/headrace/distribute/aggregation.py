"""How copies of a variable become one value, and when: by what users say of it."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

__all__ = ["VariableAggregation", "VariableSynchronization", "member_named"]

E = TypeVar("E", bound=enum.Enum)


class VariableAggregation(enum.Enum):
    """How values that replicas have for one variable become one."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(enum.Enum):
    """When they do."""

    AUTO = "AUTO"
    """ON_WRITE."""
    NONE = "NONE"
    """Not supported."""
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


def member_named(argument: str, kind: type[E], value: Any) -> E:
    """Return which member of an enumeration is meant.

    Args:
        argument: What the user passed it as.
        kind: The enumeration.
        value: A member, or its name in letters of any case; or a member of that name of another
            library's enumeration.

    Raises:
        ValueError: There is no such member.
    """
    if isinstance(value, kind):
        return value
    name = str(getattr(value, "name", value)).upper()
    if value is not None and name in kind.__members__:
        return kind[name]
    raise ValueError(
        f"`{argument}` must be one of {', '.join(each.name for each in kind)}, but got {value!r}"
    )
