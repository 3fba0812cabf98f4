"""An agenda: what is to be done now, what was asked of the dispatcher, and when to look again.

What a session consists of writes into it; the session hands it out.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from headrace.service.messages import DispatcherRequest
from headrace.service.worker.actions import Actions
from headrace.service.worker.calls import Calls

__all__ = ["Agenda"]

R = TypeVar("R")

_OWN_LATENESS = 2.0
"""Seconds after the time that it named at which the session notices that it is called late."""


class Agenda(Generic[R]):
    """What is to be done.

    Args:
        calls: Calls to the dispatcher that are not answered.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.actions: Actions[R] = Actions()
        self._due_at = math.inf
        #: When it asked to act again, at the latest.
        self._expected = math.inf

    def ask(self, message: DispatcherRequest, now: float) -> None:
        """Call the dispatcher, unless it is being asked the same."""
        if self.calls.ask(message, now):
            self.actions.calls.append(message)
            self.at(self.calls.next_at)

    def at(self, time: float) -> None:
        """Look again at a time, or before."""
        self._due_at = min(self._due_at, time)

    def is_due(self, now: float) -> bool:
        """Whether it is time to look; if so, those who want to look again say so again."""
        if now - self._expected > _OWN_LATENESS:
            self.calls.forgive(now - self._expected, now)
            self._expected = now
        if now < self._due_at:
            return False
        self._due_at = math.inf
        return True

    def take(self, now: float) -> Actions[R]:
        """Return what is to be done now."""
        actions, self.actions = self.actions, Actions()
        actions.wake_in = max(0.0, self._due_at - now)
        self._expected = now + actions.wake_in
        return actions
