"""What keeps a wait waiting, in words."""

from __future__ import annotations

from headrace.coordinator.coordination import Coordination

__all__ = ["what_is_stuck"]

_MOST_NAMED = 5


def what_is_stuck(core: Coordination, now: float) -> str:
    """Return which functions run where for how long, who is not there, and how many wait."""
    words: list[str] = []
    running = [
        (now - closure.begun_at, closure.name, load.worker)
        for load in core.queue.loads
        for closure in load.first()
        if closure.begun_at is not None
    ]
    running.sort(key=lambda each: -each[0])
    for seconds, name, worker in running[:_MOST_NAMED]:
        address = core.contacts[worker].address
        words.append(f"{name} has been running on worker {worker} ({address}) for {seconds:.0f} s")
    if len(running) > _MOST_NAMED:
        words.append(f"{len(running) - _MOST_NAMED} more run")
    words += [each.words(now) for each in core.contacts.values() if not each.is_there]
    if not core.contacts:
        words.append("there is no worker: add one")
    if core.queue.num_waiting:
        words.append(f"{core.queue.num_waiting} functions wait for a worker")
    return "; ".join(words) or "all has just ended"
