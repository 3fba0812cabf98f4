"""Sources whose elements are drawn: other ones in each iteration over a dataset.

The normal form numbers them as it does steps that draw (`rewrites.normal`). Whoever iterates then
decides what they draw from, and what is decided is a source like any other. What is drawn is the
same in all repetitions within one iteration: an index names one element there.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence

from headrace.plan.node import Node
from headrace.plan.side_by_side import SideBySide
from headrace.plan.source import IndexedSource

__all__ = ["DrawnSource", "decided", "draws"]


class DrawnSource(IndexedSource):
    """A source of elements that are drawn, unless `is_decided`."""

    number: int | None
    """Which of the things that draw it is, on the plan as written; set by the normal form."""

    @property
    @abstractmethod
    def is_decided(self) -> bool:
        """Whether all iterations have the same elements: the user gave a seed."""

    @abstractmethod
    def numbered(self, number: int) -> DrawnSource:
        """Return it as number `number` of what draws."""

    @abstractmethod
    def drawn_from(self, entropy: Sequence[int]) -> IndexedSource:
        """Return it as it is where it draws from these integers."""


def decided(source: IndexedSource, entropy: Callable[[int], Sequence[int]]) -> IndexedSource:
    """Return a source as it is in one iteration: the same, if nothing is drawn.

    Args:
        source: The source, or several side by side.
        entropy: Returns what number n draws from.
    """
    if isinstance(source, DrawnSource) and not source.is_decided:
        return source.drawn_from(entropy(source.number or 0))
    if isinstance(source, SideBySide) and _is_drawn(source):
        members = tuple(decided(member, entropy) for member in source.members)
        return dataclasses.replace(source, members=members)
    return source


def draws(node: Node) -> bool:
    """Say whether what a step reads is drawn, and not decided yet."""
    return _is_drawn(getattr(node, "source", None))


def _is_drawn(source: object) -> bool:
    if isinstance(source, SideBySide):
        return any(map(_is_drawn, source.members))
    return isinstance(source, DrawnSource) and not source.is_decided
