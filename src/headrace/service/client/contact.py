"""Contact with the dispatcher: when it is asked, and whether it still counts this client in.

Rule 1. It is asked once a second, or as seldom as it wishes where there are many clients, and one
        question at a time; at once where something is urgent, and more often while the client waits
        for what only the dispatcher can say.
Rule 2. A client that did not run for half the time after which it counts as gone uses nothing
        before the dispatcher has answered a heartbeat from after that pause.
"""

from __future__ import annotations

import math

from headrace.waiting import Backoff

__all__ = ["CALL_SECONDS", "HEARTBEAT_SECONDS", "Contact"]

HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 2.0
"""How long an answer is waited for."""


class Contact:
    """When the dispatcher is asked.

    Args:
        now: The time, in seconds of a steady clock; so is every other `now`.
    """

    def __init__(self, now: float) -> None:
        self.lease = math.inf
        """Seconds of silence after which this client counts as gone."""
        self._interval = HEARTBEAT_SECONDS
        self._heard = now
        self._beat_at = now + HEARTBEAT_SECONDS
        self._backoff = Backoff(0.02, longest=HEARTBEAT_SECONDS)
        #: When the heartbeat was sent that is not answered.
        self._asked_at: float | None = None
        self._urgent = False
        #: Heartbeats that must be answered before anything is used (rule 2).
        self._renewals = 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether this client may count as gone."""
        return self._renewals > 0

    def silence(self, now: float) -> float:
        """Return for how many seconds it has not answered; 0.0: no longer than is usual."""
        seconds = now - self._heard
        return seconds if seconds > self._interval + 2 * CALL_SECONDS else 0.0

    # --- what happens ---------------------------------------------------------------------------

    def hurry(self) -> None:
        """Ask soon, whatever the rhythm is."""
        self._urgent = True

    def answered(self, now: float, interval: float) -> None:
        """Take note of the answer to a heartbeat, and of how long it wishes not to be asked."""
        self._interval = interval
        self._renewals = max(0, self._renewals - 1)
        self._urgent = self._urgent or self._renewals > 0
        self._heard, self._asked_at = now, None

    def unheard(self, now: float) -> None:
        """Take note that no answer came."""
        self._asked_at = None
        self._beat_at = now + HEARTBEAT_SECONDS

    def rest(self, now: float, *, waits: bool) -> None:
        """Let time pass until the next heartbeat.

        Args:
            now: The time.
            waits: Something waits for a verdict: soon at first, then more and more patiently.
        """
        if waits:
            self._beat_at = now + next(self._backoff)
        else:
            self._beat_at = now + self._interval
            self._backoff.reset()

    def doubt(self, pause: float) -> bool:
        """Take note that this client did not run for so long; return whether it may be gone now."""
        if self._renewals or not pause > self.lease / 2:
            return False
        # The answer to a heartbeat from before the pause says nothing.
        self._renewals = 1 if self._asked_at is None else 2
        self._urgent = True
        return True

    def forgive(self, pause: float, now: float) -> None:
        """Leave out `pause` seconds in which this client did not run."""
        self._heard = min(now, self._heard + pause)

    # --- asking ---------------------------------------------------------------------------------

    def may_ask(self, now: float) -> bool:
        """Whether the dispatcher is to be asked now, with everything that it should know."""
        if self._asked_at is not None and now - self._asked_at > CALL_SECONDS:
            self.unheard(now)
        return self._asked_at is None and (self._urgent or now >= self._beat_at)

    def asked(self, now: float) -> None:
        """Take note that it was asked."""
        self._asked_at, self._urgent = now, False

    def next_in(self, now: float) -> float:
        """Return the seconds after which to look again."""
        if self._asked_at is not None:
            return self._asked_at + CALL_SECONDS - now + 0.001
        return max(0.0, self._beat_at - now)
