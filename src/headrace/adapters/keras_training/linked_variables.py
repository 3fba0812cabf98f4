"""Keras variables whose reads and assignments go through an owner.

`link` keeps the variable object and replaces its class with a subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from headrace.adapters.keras_training.keras_internals import in_stateless_scope
from headrace.frameworks.keras_state import LINKED

__all__ = ["StepCounter", "link", "owner_of"]

_OWNER = "_headrace_owner"


class _Owner(Protocol):
    """Reads and writes the value of a variable in another place."""

    def pull(self) -> None:
        """Bring the variable up to date."""

    def before_write(self) -> None:
        """Prepare for an assignment in this process."""

    def write(self, variable: Any) -> None:
        """Handle an assignment in this process."""


class StepCounter:
    """Keeps `optimizer.iterations` equal to the servers' count of steps.

    Args:
        variable: `optimizer.iterations`.
        count: Returns the number of steps.
        may_change: Returns whether it may have changed since this was last asked.

    Attributes:
        is_assigned: Whether this process assigned a count, which then is not the servers' any more.
    """

    def __init__(
        self, variable: Any, count: Callable[[], int], may_change: Callable[[], bool]
    ) -> None:
        self._variable = variable
        self._count = count
        self._may_change = may_change
        self._is_pulling = False
        self.is_assigned = False
        link(variable, self)

    def pull(self) -> None:
        """Ask the servers, if that is necessary."""
        if not (self._is_pulling or self.is_assigned) and self._may_change():
            self._is_pulling = True
            try:
                self._variable.assign(self._count())
            finally:
                self._is_pulling = False

    def before_write(self) -> None:
        """Do nothing."""

    def write(self, variable: Any) -> None:
        """Note that the count is not that of the servers any more."""
        self.is_assigned = self.is_assigned or not self._is_pulling


def link(variable: Any, owner: _Owner) -> None:
    """Make reads and assignments of a Keras variable call its owner."""
    variable.__dict__[_OWNER] = owner
    kind: Any = type(variable)
    if not hasattr(kind, LINKED):
        variable.__class__ = _linked(kind)


def owner_of(variable: Any) -> Any:
    """Return the owner of a variable, or None."""
    return vars(variable).get(_OWNER)


@functools.cache
def _linked(kind: Any) -> type:
    base: Any = kind

    class ServerBackedVariable(base):  # type: ignore[misc]
        """A Keras variable whose value is on parameter servers."""

        @property
        def value(self) -> Any:
            if not in_stateless_scope():
                self.__dict__[_OWNER].pull()
            return base.value.fget(self)

        def assign(self, value: Any) -> Any:
            if in_stateless_scope():
                return base.assign(self, value)
            self.__dict__[_OWNER].before_write()
            result = base.assign(self, value)
            self.__dict__[_OWNER].write(self)
            return result

    setattr(ServerBackedVariable, LINKED, kind)
    ServerBackedVariable.__name__ = ServerBackedVariable.__qualname__ = kind.__name__
    return ServerBackedVariable
