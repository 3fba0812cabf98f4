"""Records of a benchmark: workloads, their contenders and their targets.

Rule 1. A contender's pipeline is code that users of its library would write.
Rule 2. The elements of each contender are checked before it is timed; wrong data is a failure.
Rule 3. A contender imports its own framework, so that a missing framework is reported as "not
        installed" and no contender runs the threads of another framework.
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
"""Uses an element as a training step would; returns its number of items."""

Check = Callable[[Elements], None]
"""Reads a fresh iterator; raises an error if its elements are wrong."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation of a workload.

    Attributes:
        name: Name of its row in the table.
        build: Returns the pipeline. Called once, in the contender's process, with the directory of
            input files and a stack for resources to close.
        needs: Required modules; without one of them the contender is "not installed".
        role: "headrace", "peer" (a product to compare with) or "limit" (an upper bound set by the
            machine or by Python).
        consume: Replaces the workload's `consume`, for elements of another shape.
        check: Replaces the workload's `check`, for elements of another shape.
    """

    name: str
    build: Callable[[Path, ExitStack], Pipeline]
    needs: tuple[str, ...] = ()
    role: Literal["headrace", "peer", "limit"] = "peer"
    consume: Consume | None = None
    check: Check | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A minimum rate of a contender, relative to other contenders or absolute.

    Attributes:
        of: Names of the contenders to compare with; of several, the fastest in each round counts.
            Empty for an absolute target.
        at_least: Minimum ratio of the rates, or, without `of`, items per second.
        by: Name of the contender that should reach the target.
        or_rate: Items per second that meet the target as well.
        of_best_median: Whether to compare with the contender with the highest median rate, for many
            contenders with similar rates: the fastest of many in a round is a lucky one.
    """

    of: tuple[str, ...]
    at_least: float
    by: str = "headrace"
    or_rate: float | None = None
    of_best_median: bool = False


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound of the seconds per item (`at_most`) of the contender `by`."""

    at_most: float
    by: str = "headrace"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task that each contender performs in turn.

    Attributes:
        name: Name in the table.
        unit: Plural noun of the counted items, such as "rows".
        contenders: Headrace first, then peers, then limits.
        check: Raises an error if the elements of a fresh iterator are wrong.
        consume: Uses an element and returns its number of items; None counts elements.
        targets: Targets of its contenders.
        reopen: Whether each round opens a fresh iterator. A service is read through one iterator,
            as in training; otherwise the cleanup of closed iterators in servers would be timed.
        item_bytes: Bytes per item; if given, the rate is shown in GB/s.
        long_rounds: Whether rounds last longer, since work in progress at the start or the end of a
            round would be a large part of it.
        repeated: Whether all rounds are repeated with new processes, to detect small differences:
            two processes of the same program differ by a few percent for their whole lifetime.
        self_timed: Whether each element is a measurement by the contender: a number of items and
            their seconds of waiting or of processor time. Time between elements is not counted, and
            there is no warm-up.
        in_turns: Whether the contenders take turns. Otherwise each ends before the next is started,
            because filling its buffers after a round would slow down the others.
        element_seconds: Seconds that a self-timed element takes, if it is longer than a round; the
            plan of a run needs it.
    """

    name: str
    unit: str
    contenders: tuple[Contender, ...]
    check: Check
    consume: Consume | None = None
    targets: tuple[Target | Bound, ...] = ()
    reopen: bool = True
    item_bytes: int | None = None
    long_rounds: bool = False
    repeated: bool = False
    self_timed: bool = False
    in_turns: bool = True
    element_seconds: float = 0.0


def expect(condition: bool, message: str) -> None:
    """Raise a ValueError for wrong data, with `message`, unless `condition` is true."""
    if not condition:
        raise ValueError(f"wrong data: {message}")
