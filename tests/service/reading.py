"""Reading for the service's tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


def numbers(dataset: Iterable[Any]) -> list[int]:
    """Return all elements as ints."""
    return [int(value) for value in dataset]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll until `condition` holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds:g} s"
        time.sleep(0.01)


def slowly(element: Any) -> Any:
    """Take a millisecond; return the element."""
    time.sleep(0.001)
    return element
