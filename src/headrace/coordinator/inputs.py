"""Closures that wait for values of others, and what becomes of them when those are known."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.coordinator.closure import Closure, Phase, Result

__all__ = ["await_inputs", "awaited"]


def await_inputs(closure: Closure) -> Exception | None:
    """Take note of the values that a closure waits for; return the error of one that has one."""
    unready = [result for result in closure.inputs if not result.is_ready]
    closure.missing = len(unready)
    for result in unready:
        result.waiting.append(closure)
    return next((each.error for each in closure.inputs if each.error), None)


def awaited(told: Result) -> Iterator[tuple[Closure, Exception | None]]:
    """Yield the closures that have all values now, or that end with the error of one.

    With a closure that ends, those that wait for its value do, too.
    """
    results = [told]
    while results:
        result = results.pop()
        waiting, result.waiting = result.waiting, []
        for closure in waiting:
            if closure.phase is not Phase.HELD:
                continue
            closure.missing -= 1
            if result.error is not None:
                yield closure, result.error
                results.append(closure.result)
            elif not closure.missing:
                yield closure, None
