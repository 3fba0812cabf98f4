"""What clients said of where they stand: kept by one run of the process, until all have said it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.service.ranges import Ranges, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = ["Answered", "Gathered", "Place", "Said", "joined"]

_PATIENCE = 5.0
"""Seconds after which a client that does not ask again waits no more."""
_ANSWERS = 64
"""Answers that are kept for clients that have not asked again."""


class Place(NamedTuple):
    """Elements that were delivered."""

    units: Ranges
    parts: Parts


class Said(NamedTuple):
    """A client said where it stands, and waits for the others."""

    iteration_id: int
    client_id: str
    token: str
    place: Place


class Answered(NamedTuple):
    """All clients of an iteration said where they stand: the answer to each of these questions."""

    iteration_id: int
    tokens: tuple[str, ...]
    place: Place


@dataclass
class Gathered:
    """Who waits, and what those are to hear that have not asked since."""

    _waiting: dict[int, dict[str, tuple[Said, float]]] = field(default_factory=dict)
    _answers: dict[str, Place] = field(default_factory=dict)
    #: The questions of each answer: those of one answer are forgotten together.
    _asked: list[tuple[str, ...]] = field(default_factory=list)

    def waiting(self, iteration_id: int, now: float) -> dict[str, Said]:
        """Return what clients of an iteration said that still wait."""
        said = self._waiting.get(iteration_id, {})
        return {each: what for each, (what, at) in said.items() if now - at < _PATIENCE}

    def answer(self, token: str) -> Place | None:
        """Return the answer to a question, if it is known."""
        return self._answers.get(token)

    def say(self, said: Said, now: float) -> None:
        """Take note of what a client said."""
        self._waiting.setdefault(said.iteration_id, {})[said.client_id] = (said, now)

    def conclude(self, answered: Answered) -> None:
        """Take note of an answer."""
        self._waiting.pop(answered.iteration_id, None)
        self._answers.update(dict.fromkeys(answered.tokens, answered.place))
        self._asked.append(answered.tokens)
        if len(self._asked) > _ANSWERS:
            for token in self._asked.pop(0):
                self._answers.pop(token, None)

    def forget(self, iteration_id: int) -> None:
        """Forget an iteration."""
        self._waiting.pop(iteration_id, None)


def joined(places: list[Place]) -> Place:
    """Return what was delivered to one or another."""
    rows: dict[int, Ranges] = {}
    for place in places:
        for unit, some in place.parts:
            rows[unit] = united((*rows.get(unit, ()), *some))
    whole = [each for place in places for each in place.units]
    whole += [(unit, unit + 1) for unit, some in rows.items() if some == EVERYTHING]
    units = united(whole)
    return Place(units, outside(tuple(sorted(rows.items())), units))
