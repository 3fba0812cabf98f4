"""Names that a strategy gives: unique, and the same ones whenever the same program runs."""

from __future__ import annotations

import threading

__all__ = ["Names"]


class Names:
    """Names of one sort of thing that were given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: set[str] = set()

    def give(self, kind: str, name: str | None = None) -> str:
        """Return `name`; or, if it is None, the kind, with a number from the second one on.

        Raises:
            ValueError: It was given before.
        """
        with self._lock:
            if name in self._given:
                raise ValueError(
                    "`name` must be unique in a strategy, and there is a variable or table "
                    f"{name!r}"
                )
            free = name or kind
            number = 0
            while free in self._given:
                number += 1
                free = f"{kind}_{number}"
            self._given.add(free)
            return free

    def unused(self, name: str) -> str:
        """Return a name, with a number behind it if it was given already."""
        with self._lock:
            free, number = name, 0
            while free in self._given:
                number += 1
                free = f"{name}_{number}"
            return free

    def take_back(self, name: str) -> None:
        """Forget a name: what was to have it could not be made."""
        with self._lock:
            self._given.discard(name)
