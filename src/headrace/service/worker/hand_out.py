"""Handing out: which client gets which of a task's portions. The contract of all ways to do it.

Each method takes what happened and returns the answers that are due because of it. There is no
thread, lock or clock in a way: times are arguments. Which way a task has, its definition says by
name (`ways`); a new one changes nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from headrace.service.messages import GetElements, SavedFile, TrainerActivity
from headrace.service.ranges import Ranges
from headrace.service.rows import Parts
from headrace.service.worker.portion import Answer, Portion

__all__ = ["Bounds", "Departure", "HandOut", "Left", "Ready", "ReadyByTask"]

R = TypeVar("R")


class Ready(NamedTuple):
    """What of a task is made and waits for clients."""

    portions: int = 0
    bytes: int = 0
    trainers: tuple[TrainerActivity, ...] = ()
    """How far each is, where several read all of it."""


ReadyByTask: TypeAlias = Mapping[int, Ready]
"""Task -> what waits for clients; one of which nothing does may be absent."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much of one task a worker keeps in memory, and for how long."""

    ready_portions: int = 3
    ready_bytes: int = 64 << 20
    """Portions that nobody has asked for; one is kept however large it is."""
    client_bytes: int = 64 << 20
    """Unacknowledged by one client."""
    total_bytes: int = 256 << 20
    """Unacknowledged by all clients."""
    silence: float = 300.0
    """Seconds after which what a silent client did not acknowledge is dropped."""
    window_bytes: int = 1 << 30
    """Of what trainers share: the newest elements, which each of them reads at its own pace."""


@dataclass(frozen=True)
class Left:
    """What a task had not delivered when it was called off."""

    elements: int
    """In portions that nobody has asked for."""
    unacknowledged: int
    """Elements that were given to clients, which may have arrived."""
    touched: Ranges
    """Units, in dealt order, of which something was given to somebody; nothing of others was."""


@dataclass(frozen=True)
class Departure:
    """What a client that is gone was given and had not acknowledged: units in dealt order."""

    units: Ranges
    """All of them was in what it was given, and in nothing else."""
    lost: Ranges
    """Others of which something may have been in it. Where elements have origins: none."""
    parts: Parts = ()
    """The elements of those others, where they have origins."""
    used: Parts = ()
    """Elements that it had acknowledged, of units that are not done."""


class HandOut(ABC, Generic[R]):
    """Hands out one task's portions. `R` is whatever stands for a client's request."""

    # --- what is the case -----------------------------------------------------------------------

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another portion may be made."""

    @property
    @abstractmethod
    def done(self) -> Ranges:
        """Units, in dealt order, that were delivered and acknowledged."""

    @property
    def acknowledged(self) -> tuple[Ranges, Ranges]:
        """Units of which all, and of which something was acknowledged; where nobody asks, none.

        It is asked for where a client that is gone may have elements which come at most once.
        """
        return (), ()

    @property
    @abstractmethod
    def may_finish(self) -> bool:
        """Whether the dispatcher may hear that nothing is left to hand out."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether everything was handed out and acknowledged."""

    @property
    def is_deserted(self) -> bool:
        """Whether all clients that asked are gone, and what is left can be handed back."""
        return False

    @property
    def portion_bytes(self) -> int | None:
        """How large a portion may be that has more than one element; None: as is usual."""
        return None

    @property
    def portion_elements(self) -> int | None:
        """How many elements the next portion may have; None: as is usual."""
        return None

    @property
    def unheard(self) -> tuple[int, tuple[SavedFile, ...], int] | None:
        """Which files the dispatcher is to hear of next: number, files, and units done with them.

        None: of none, as where clients are handed elements.
        """
        return None

    @property
    def dropped(self) -> int:
        """Elements that were left over at the end, and go to nobody."""
        return 0

    @property
    def ready(self) -> Ready:
        """What is made and waits for clients, as far as this way counts it."""
        return Ready()

    # --- what happens ---------------------------------------------------------------------------

    def heard(self, number: int) -> None:
        """Take note that the dispatcher has heard of files."""
        return None

    @abstractmethod
    def ask(self, request: R, message: GetElements, now: float) -> list[tuple[R, Answer]]:
        """Take a client's request."""

    @abstractmethod
    def add(self, portion: Portion) -> list[tuple[R, Answer]]:
        """Take the next portion."""

    def conclude(self, *, failed: bool, cut: bool) -> None:
        """Take note of how the end that follows (`exhaust`) came about.

        Args:
            failed: The task failed; what the clients are to hear was the last portion.
            cut: It was asked to end, and there was more to make.
        """
        return None

    def deal(self, start: int, stop: int, rows: Ranges) -> None:
        """Take note that the task is dealt units `start` to `stop` - 1 of the stream next.

        Args:
            start: The first.
            stop: The one after the last.
            rows: Not empty: it is one unit, and only these ordinals of it.
        """
        return None

    @abstractmethod
    def exhaust(self, units: int = 0) -> list[tuple[R, Answer]]:
        """Take note that no portion will follow; with the end, `units` units are whole."""

    @abstractmethod
    def finish(self) -> list[tuple[R, Answer]]:
        """Take note that the task is finished: clients get the end."""

    @abstractmethod
    def call_off(self, refusal: Exception) -> tuple[list[tuple[R, Answer]], Left]:
        """Refuse everybody from now on, except for what was given before."""

    @abstractmethod
    def depart(self, client_id: str) -> tuple[list[tuple[R, Answer]], Departure]:
        """Take note that a client is gone; return what is to be said of it. May be called twice."""

    @abstractmethod
    def forget(self, client_id: str) -> list[tuple[R, Answer]]:
        """Take note that the dispatcher has heard of what a client that is gone was given."""

    def forget_done(self, units: int) -> None:
        """Take note that the dispatcher knows that all units before this one are done."""

    @abstractmethod
    def forget_silent(self, now: float) -> tuple[list[tuple[R, Answer]], int]:
        """Drop what silent clients hold; return the answers, and how many elements that is."""
