"""Iterator positions of clients, kept in memory until all clients have contributed theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.service.element_sets import ALL_ORDINALS, PartialSplits, exclude_splits
from headrace.service.ranges import Ranges, union

__all__ = [
    "CheckpointCompleted",
    "CheckpointContribution",
    "CheckpointContributions",
    "DeliveredSet",
    "merge_delivered",
]

_TIMEOUT_SECONDS = 5.0
"""Seconds after which a client that does not request again is assumed to have given up."""
_MAX_RESULTS = 64
"""Number of results kept for clients that have not requested again."""


class DeliveredSet(NamedTuple):
    """Delivered elements."""

    splits: Ranges
    partial_splits: PartialSplits


class CheckpointContribution(NamedTuple):
    """A client contributed its position and waits for the others."""

    iteration_id: int
    client_id: str
    token: str
    delivered: DeliveredSet


class CheckpointCompleted(NamedTuple):
    """All clients of an iteration contributed: the result of each of their requests."""

    iteration_id: int
    tokens: tuple[str, ...]
    delivered: DeliveredSet


@dataclass
class CheckpointContributions:
    """Pending contributions, and results that clients have not requested yet."""

    _pending: dict[int, dict[str, tuple[CheckpointContribution, float]]] = field(
        default_factory=dict
    )
    _results: dict[str, DeliveredSet] = field(default_factory=dict)
    #: Request tokens of each result, which are forgotten together.
    _completed_tokens: list[tuple[str, ...]] = field(default_factory=list)

    def pending(self, iteration_id: int, now: float) -> dict[str, CheckpointContribution]:
        """Return the pending contributions of an iteration's clients."""
        contributions = self._pending.get(iteration_id, {})
        return {
            client_id: contribution
            for client_id, (contribution, added_at) in contributions.items()
            if now - added_at < _TIMEOUT_SECONDS
        }

    def result(self, token: str) -> DeliveredSet | None:
        """Return the result of a request, if it is known."""
        return self._results.get(token)

    def add(self, contribution: CheckpointContribution, now: float) -> None:
        """Add a client's contribution."""
        self._pending.setdefault(contribution.iteration_id, {})[contribution.client_id] = (
            contribution,
            now,
        )

    def complete(self, completed: CheckpointCompleted) -> None:
        """Store a result."""
        self._pending.pop(completed.iteration_id, None)
        self._results.update(dict.fromkeys(completed.tokens, completed.delivered))
        self._completed_tokens.append(completed.tokens)
        if len(self._completed_tokens) > _MAX_RESULTS:
            for token in self._completed_tokens.pop(0):
                self._results.pop(token, None)

    def forget(self, iteration_id: int) -> None:
        """Forget an iteration."""
        self._pending.pop(iteration_id, None)


def merge_delivered(delivered_sets: list[DeliveredSet]) -> DeliveredSet:
    """Return the union of what was delivered to the clients."""
    ordinals_by_split: dict[int, Ranges] = {}
    for delivered in delivered_sets:
        for split, ordinals in delivered.partial_splits:
            ordinals_by_split[split] = union((*ordinals_by_split.get(split, ()), *ordinals))
    complete = [each for delivered in delivered_sets for each in delivered.splits]
    complete += [
        (split, split + 1)
        for split, ordinals in ordinals_by_split.items()
        if ordinals == ALL_ORDINALS
    ]
    splits = union(complete)
    return DeliveredSet(splits, exclude_splits(tuple(sorted(ordinals_by_split.items())), splits))
