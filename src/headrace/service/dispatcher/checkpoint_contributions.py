"""What clients said of where they stand: kept by one run of the process, until all have said it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.service.ranges import Ranges, united
from headrace.service.rows import EVERYTHING, Parts, outside

__all__ = [
    "CheckpointCompleted",
    "CheckpointContribution",
    "CheckpointContributions",
    "DeliveredSet",
    "merge_delivered",
]

_TIMEOUT_SECONDS = 5.0
"""Seconds after which a client that does not ask again waits no more."""
_MAX_RESULTS = 64
"""Answers that are kept for clients that have not asked again."""


class DeliveredSet(NamedTuple):
    """Elements that were delivered."""

    splits: Ranges
    partial_splits: Parts


class CheckpointContribution(NamedTuple):
    """A client said where it stands, and waits for the others."""

    iteration_id: int
    client_id: str
    token: str
    delivered: DeliveredSet


class CheckpointCompleted(NamedTuple):
    """All clients of an iteration said where they stand: the answer to each of these questions."""

    iteration_id: int
    tokens: tuple[str, ...]
    delivered: DeliveredSet


@dataclass
class CheckpointContributions:
    """Who waits, and what those are to hear that have not asked since."""

    _pending: dict[int, dict[str, tuple[CheckpointContribution, float]]] = field(
        default_factory=dict
    )
    _results: dict[str, DeliveredSet] = field(default_factory=dict)
    #: The questions of each answer: those of one answer are forgotten together.
    _completed_tokens: list[tuple[str, ...]] = field(default_factory=list)

    def pending(self, iteration_id: int, now: float) -> dict[str, CheckpointContribution]:
        """Return what clients of an iteration said that still wait."""
        said = self._pending.get(iteration_id, {})
        return {each: what for each, (what, at) in said.items() if now - at < _TIMEOUT_SECONDS}

    def result(self, token: str) -> DeliveredSet | None:
        """Return the answer to a question, if it is known."""
        return self._results.get(token)

    def add(self, contribution: CheckpointContribution, now: float) -> None:
        """Take note of what a client said."""
        self._pending.setdefault(contribution.iteration_id, {})[contribution.client_id] = (
            contribution,
            now,
        )

    def complete(self, completed: CheckpointCompleted) -> None:
        """Take note of an answer."""
        self._pending.pop(completed.iteration_id, None)
        self._results.update(dict.fromkeys(completed.tokens, completed.delivered))
        self._completed_tokens.append(completed.tokens)
        if len(self._completed_tokens) > _MAX_RESULTS:
            for token in self._completed_tokens.pop(0):
                self._results.pop(token, None)

    def forget(self, iteration_id: int) -> None:
        """Forget an iteration."""
        self._pending.pop(iteration_id, None)


def merge_delivered(places: list[DeliveredSet]) -> DeliveredSet:
    """Return what was delivered to one or another."""
    rows: dict[int, Ranges] = {}
    for place in places:
        for unit, some in place.partial_splits:
            rows[unit] = united((*rows.get(unit, ()), *some))
    whole = [each for place in places for each in place.splits]
    whole += [(unit, unit + 1) for unit, some in rows.items() if some == EVERYTHING]
    units = united(whole)
    return DeliveredSet(units, outside(tuple(sorted(rows.items())), units))
