"""What a worker's session wants done: calls, answers, and what its producers are to do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.service.messages import DispatcherRequest, TaskDefinition
from headrace.service.ranges import Ranges
from headrace.service.worker.portion import Answer

__all__ = ["Actions", "Grant", "Start"]

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A producer to start: it opens the plan and makes portions, with room for the first one."""

    producer: int
    """Its number: another one for each producer of a session, whatever its task's number is."""
    definition: TaskDefinition
    plan: bytes
    """The pickled plan, as written."""
    cost_plan: bytes = b""
    """That of the cost function; empty: it has none."""
    portion_bytes: int | None = None
    """How large its portions of several elements may be; None: as is usual."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a producer gets that asked for units."""

    producer: int
    units: tuple[int, int] | None = None
    """(start, stop); None: no more units come."""
    rows: Ranges = ()
    """Not empty: it is one unit, and only these of its elements are wanted."""
    is_alone: bool = False
    """What comes of them is to be delivered at once: workers died with these units before."""
    is_pause: bool = False
    """No units now, but later; what steps of the plan hold is to be delivered."""
    done: int = field(default=0, compare=False)
    """Of what was dealt before, the dispatcher knows that the first so many are done."""


@dataclass
class Actions(Generic[R]):
    """What is to be done now. For one producer, in the order in which the fields stand here."""

    calls: list[DispatcherRequest] = field(default_factory=list)
    """Requests to the dispatcher, to be sent in this order; the session repeats them itself."""
    answers: list[tuple[R, Answer]] = field(default_factory=list)
    """Requests of clients, each with what answers it: once each, in any order."""
    starts: list[Start] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    """Producers that may make one more portion."""
    most: dict[int, int] = field(default_factory=dict)
    """Of those, how many elements that may have at most, where that is bounded."""
    grants: list[Grant] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """Producers that are to wait for units, which others are to have first."""
    cuts: list[int] = field(default_factory=list)
    """Producers that make no more portions, and end."""
    closes: list[int] = field(default_factory=list)
    """Producers whose portions nobody wants any more; nothing that they say is heard."""
    warnings: list[str] = field(default_factory=list)
    wake_in: float = math.inf
    """Seconds after which to act again, if nothing happens before."""
    over: bool = False
    """The worker has left: nothing is to be done any more, except for what stands here."""
