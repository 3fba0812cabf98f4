"""When a wait is worth a word: after ten seconds, then once a minute."""

from __future__ import annotations

__all__ = ["FIRST_WORD", "Reminder"]

FIRST_WORD = 10.0
"""Seconds of waiting after which it is said for what."""
_NEXT_WORD = 60.0


class Reminder:
    """Says of one wait whether it is time for a word.

    Whoever waits says for how long: a time that does not count is left out there.
    """

    def __init__(self) -> None:
        self.due_after = FIRST_WORD
        """Seconds of waiting after which there is something to be said."""

    def begin(self) -> None:
        """Take note that another wait begins."""
        self.due_after = FIRST_WORD

    def is_due(self, waited: float) -> bool:
        """Whether a word is due after so many seconds; not again for a while after that."""
        if waited < self.due_after:
            return False
        self.due_after = waited + _NEXT_WORD
        return True
