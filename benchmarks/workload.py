"""What is compared with what: a workload, its contenders, the targets that were set for it.

Rule 1  A contender's pipeline is what its users would write.
Rule 2  Every contender's elements are checked before they are timed: wrong data is a failure.
Rule 3  Frameworks are imported inside the contender that needs them, so that a missing one is
        shown as "not installed" and so that no contender carries another's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Bound",
    "Check",
    "Consume",
    "Contender",
    "Elements",
    "Pipeline",
    "Target",
    "Workload",
    "expect",
]

Elements = Iterator[Any]
Pipeline = Callable[[], Elements]
"""Opens a fresh iterator over a pipeline that is already built."""

Consume = Callable[[Any], int]
"""Uses one element as a training step would; returns how many items were in it."""

Check = Callable[[Elements], None]
"""Reads a fresh iterator and raises unless its elements are right."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work.

    Attributes:
        name: Its row in the table.
        build: Called once in the contender's own process with the folder of input files and a
            stack for what must be closed; returns the pipeline.
        needs: Modules without which it is "not installed".
        role: Headrace itself, a peer, or a bound set by the machine.
        consume: Overrides the workload's, for limits whose elements have another shape.
        check: Overrides the workload's, likewise.
    """

    name: str
    build: Callable[[Path, ExitStack], Pipeline]
    needs: tuple[str, ...] = ()
    role: Literal["headrace", "peer", "limit"] = "peer"
    consume: Consume | None = None
    check: Check | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """The contender `by` is to reach `drop_below` times the rate of the contender(s) called `of`.

    Several names mean the fastest of them in each round; none means that `drop_below` is itself a
    rate, in items per second. Where `or_rate` is given, that rate will do as well.
    """

    of: tuple[str, ...]
    at_least: float
    by: str = "headrace"
    or_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The contender `by` is to take at most so many seconds for an item."""

    at_most: float
    by: str = "headrace"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The same work, done by each contender in turn.

    Attributes:
        name: Its name in the table.
        unit: What is counted, such as "rows".
        contenders: Headrace first, then peers, then limits.
        check: Raises unless a fresh iterator gives the right elements.
        consume: Uses an element, returns its number of items; None counts elements.
        targets: What was aimed at.
        reopen: Open a fresh iterator each round. A service is read through one iterator instead,
            as training does: what an abandoned one leaves behind in a server would be timed too.
        item_bytes: Bytes in one item, where GB/s says more than items/s.
        stretch: How many times as long its rounds are, and the ramps before them. Work that was
            begun before the clock and is not done after it is to be a small part of a round.
        times_rounds: How many times as many rounds it has, where a small difference is looked for.
        renew_after: Rounds after which contenders go on in new processes; 0: never. Two processes
            of the same program differ by some percent as long as they live.
        own_clock: Each element is what its contender measured itself: a number of items and the
            seconds that they took, of waiting or of processor time. What else happens between two
            elements is not counted, and there is no ramp.
    """

    name: str
    unit: str
    contenders: tuple[Contender, ...]
    check: Check
    consume: Consume | None = None
    targets: tuple[Target | Bound, ...] = ()
    reopen: bool = True
    item_bytes: int | None = None
    stretch: float = 1.0
    times_rounds: int = 1
    renew_after: int = 0
    own_clock: bool = False


def expect(true: bool, otherwise: str) -> None:
    """Raise ValueError(`otherwise`) unless `true`: the data of a contender is wrong."""
    if not true:
        raise ValueError(f"wrong data: {otherwise}")
