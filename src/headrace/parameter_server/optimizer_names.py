"""Names of optimizers in one cluster: whose slots, and whose count of steps.

coordinator      Adam, Adam_1 ...: one for each handle without a name, in order of creation
in a function    Adam_in_functions: each call makes the handle again, so the class is the name
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from headrace.errors import FailedPreconditionError

__all__ = ["OptimizerNames"]

_log = logging.getLogger(__name__)


class OptimizerNames:
    """The names of optimizers in one cluster, as one process sees them.

    Attributes:
        numbers: Whether handles without a name are numbered here, as in the program that has the
            strategy.
    """

    def __init__(self) -> None:
        self.numbers = False
        self._lock = threading.Lock()
        #: By name: the class of the optimizer.
        self._kinds: dict[str, str] = {}
        #: By name: how many steps the servers had counted before this program.
        self._earlier: dict[str, int] = {}
        #: By class: what optimizers that functions made without a name have trained.
        self._trained: dict[str, set[str]] = {}

    def give(self, kind: str) -> str:
        """Return a name that no other optimizer has: the class, with a number from the second."""
        with self._lock:
            name, number = kind, 0
            while name in self._kinds:
                number += 1
                name = f"{kind}_{number}"
            self._kinds[name] = kind
            return name

    def claim(self, name: str, kind: str) -> None:
        """Record a name that a user gave; several handles may have it, of one class.

        Raises:
            ValueError: An optimizer of another class has it.
        """
        found = self._kinds.get(name)
        if found is None:
            with self._lock:
                found = self._kinds.setdefault(name, kind)
        if found != kind:
            raise ValueError(
                f"`name` {name!r} belongs to an optimizer of class {found}, but this one is a "
                f"{kind}: optimizers of one name share slots and steps, so use another name"
            )

    def check_in_function(self, kind: str, trains: Iterable[str], is_first: bool) -> None:
        """Check that an optimizer a function made without a name is not mistaken for another.

        Args:
            kind: Its class, by which functions share the count of steps.
            trains: Names of the variables and tables of this step.
            is_first: Whether it is the first step of its handle.

        Raises:
            FailedPreconditionError: Its class has trained other variables only.
        """
        names = set(trains)
        with self._lock:
            seen = self._trained.setdefault(kind, set())
            if is_first and seen and seen.isdisjoint(names):
                raise FailedPreconditionError(
                    f"two optimizers of class {kind} were made in functions without a name: one "
                    f"trains {', '.join(sorted(seen)[:5])}, the other "
                    f"{', '.join(sorted(names)[:5])}. They would share one count of steps; give "
                    f'each a name: {kind}(..., name="...")'
                )
            seen |= names

    # --- counts that servers had before this program ------------------------------------------

    def found(self, counters: Mapping[str, int]) -> None:
        """Record what the servers had counted before this program."""
        self._earlier = {name: count for name, count in counters.items() if count}

    def restored(self, name: str) -> None:
        """Record that the count of an optimizer was restored: it is expected to go on."""
        self._earlier.pop(name, None)

    def warn_of_earlier_steps(self, name: str) -> None:
        """Warn once if an optimizer goes on with a count of an earlier program."""
        if not self._earlier:
            return
        count = self._earlier.pop(name, 0)
        if count:
            _log.warning(
                "optimizer %r continues at step %d: the parameter servers have counted its steps "
                "since before this program was started, and its slots continue as well. To "
                "start at step 0, give it another name, or restart the parameter servers",
                name,
                count,
            )
