"""Functions that are counted, in a separate module.

A dataset whose function looked into a variable that changes would be another dataset each time.
"""

from __future__ import annotations

import threading
from collections import Counter

CALLS: Counter[str] = Counter()
_LOCK = threading.Lock()


def note(name: str) -> None:
    """Count a call."""
    with _LOCK:
        CALLS[name] += 1
