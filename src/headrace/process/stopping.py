"""Stop child processes: asked, waited for together, killed at the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headrace.process.child import Child

__all__ = ["stop"]

_LOOK_SECONDS = 1.0


def stop(
    children: Sequence[Child],
    seconds: float,
    *,
    hurried: float = 0.0,
    is_hurried: Callable[[float], bool] | None = None,
) -> list[Child]:
    """Ask children to leave, wait for all of them, kill those that do not.

    Args:
        children: Some may have ended already.
        seconds: How long they have, together.
        hurried: How long they have from the moment when somebody hurries them.
        is_hurried: Waits for up to so many seconds, less when a child ends, and says whether
            somebody wants them to leave at once; that is asked by SIGTERM.

    Returns:
        Those that had to be killed.
    """
    for child in children:
        child.release()
    until = time.monotonic() + seconds
    left = list(children)
    asked_again = False
    while (left := [child for child in left if child.is_running]) and (
        remaining := until - time.monotonic()
    ) > 0:
        if is_hurried is None:
            left[0].wait(until)
        elif is_hurried(min(remaining, _LOOK_SECONDS)) and not asked_again:
            asked_again = True
            until = min(until, time.monotonic() + hurried)
            for child in left:
                child.terminate()
    for child in left:
        child.kill()
    for child in children:
        child.bury()
    return left
