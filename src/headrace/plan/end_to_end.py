"""Several sources that are read by index as one: what `concatenate` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import Spec
from headrace.element.structure import flatten, unflatten
from headrace.plan.source import IndexedSource

__all__ = ["EndToEnd", "end_to_end", "member_count"]


@dataclass(frozen=True, eq=False)
class EndToEnd(IndexedSource):
    """The elements of several sources, whose specs are equal, one source after the other.

    Args:
        members: The sources; none is without end.
        ends: For each, the number of elements of it and those before it.
    """

    members: tuple[IndexedSource, ...]
    ends: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.ends[-1]

    @property
    def element_spec(self) -> Spec | None:
        return self.members[0].element_spec

    @property
    def runs_user_code(self) -> bool:
        return any(member.runs_user_code for member in self.members)

    @property
    def lends_runs(self) -> bool:
        return any(member.lends_runs for member in self.members)

    def gather(self, indices: NDArray[np.int64]) -> Any:
        return self._read(indices, lambda member, own: member.gather(own))

    def lend(self, indices: NDArray[np.int64]) -> Any:
        return self._read(indices, lambda member, own: member.lend(own))

    def _read(
        self, indices: NDArray[np.int64], read: Callable[[IndexedSource, NDArray[np.int64]], Any]
    ) -> Any:
        indices = np.asarray(indices)
        owners = np.searchsorted(np.array(self.ends), indices.ravel(), side="right")
        used: list[int] = np.unique(owners).tolist() or [0]
        if len(used) == 1:
            (number,) = used
            return read(self.members[number], indices - self._start(number))
        # Each member's elements, in turn, and then all in the order of the indices.
        parts = []
        for number in used:
            own = indices.ravel()[owners == number] - self._start(number)
            parts.append(flatten(read(self.members[number], own)))
        order = np.empty(owners.size, np.int64)
        order[np.argsort(owners, kind="stable")] = np.arange(owners.size)
        leaves = [np.concatenate(same)[order] for same in zip(*[p[0] for p in parts], strict=True)]
        shaped = [leaf.reshape(*indices.shape, *leaf.shape[1:]) for leaf in leaves]
        return unflatten(parts[0][1], shaped)

    def _start(self, number: int) -> int:
        return self.ends[number - 1] if number else 0


def end_to_end(first: IndexedSource, second: IndexedSource) -> EndToEnd:
    """Return two sources as one; those that are several already become members one by one."""
    before = first.size
    ends = (*_ends(first), *[before + end for end in _ends(second)])
    return EndToEnd((*_members(first), *_members(second)), ends)


def member_count(source: IndexedSource) -> int:
    """Return how many sources there are end to end in one."""
    return len(_members(source))


def _members(source: IndexedSource) -> tuple[IndexedSource, ...]:
    return source.members if isinstance(source, EndToEnd) else (source,)


def _ends(source: IndexedSource) -> tuple[int, ...]:
    return source.ends if isinstance(source, EndToEnd) else (source.size,)
