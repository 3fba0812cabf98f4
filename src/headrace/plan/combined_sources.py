"""Sources that are made of others, and read by index as one; and those whose elements are drawn."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import Spec, batched
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.plan.node import Node
from headrace.plan.source import INDEX_SPEC, INFINITE, IndexedSource

__all__ = [
    "NUMBERS",
    "DrawnSource",
    "EndToEnd",
    "SideBySide",
    "decided",
    "draws",
    "end_to_end",
    "gathered_spec",
    "member_count",
    "side_by_side",
]

# --- Several sources that are read by index at once: what `zip` and `enumerate` make of them ------


@dataclass(frozen=True, eq=False)
class SideBySide(IndexedSource):
    """Sources whose elements make one: an index has the structure too, with an int a member.

    Args:
        structure: Where the members' elements stand.
        members: The sources, in the order of the structure's leaves.
    """

    structure: Structure
    members: tuple[IndexedSource, ...]

    @property
    def size(self) -> int:
        sizes = [member.size for member in self.members if member.size != INFINITE]
        return min(sizes) if sizes else INFINITE

    @property
    def element_spec(self) -> Spec | None:
        return self.spec_at(unflatten(self.structure, [INDEX_SPEC] * len(self.members)))

    @property
    def runs_user_code(self) -> bool:
        return any(member.runs_user_code for member in self.members)

    @property
    def lends_runs(self) -> bool:
        return any(member.lends_runs for member in self.members)

    def gather(self, indices: Any) -> Any:
        leaves, _ = flatten(indices)
        parts = [_read(m.gather, leaf) for m, leaf in zip(self.members, leaves, strict=True)]
        return unflatten(self.structure, parts)

    def lend(self, indices: Any) -> Any:
        leaves, _ = flatten(indices)
        parts = [_read(m.lend, leaf) for m, leaf in zip(self.members, leaves, strict=True)]
        return unflatten(self.structure, parts)

    def spec_at(self, indices: Spec) -> Spec | None:
        """Return the spec of what `gather` returns for indices of this spec."""
        leaves, _ = flatten(indices)
        specs = [gathered_spec(m, leaf) for m, leaf in zip(self.members, leaves, strict=True)]
        return None if any(spec is None for spec in specs) else unflatten(self.structure, specs)


class _Numbers(IndexedSource):
    """The integers: each is its own index."""

    size = INFINITE
    element_spec = INDEX_SPEC

    def gather(self, indices: Any) -> Any:
        return np.array(indices)


NUMBERS = _Numbers()


def side_by_side(structure: Structure, sources: Sequence[IndexedSource]) -> SideBySide:
    """Return the sources as one; those that are several already become members one by one."""
    members: list[IndexedSource] = []
    nested: list[Any] = []
    for source in sources:
        if isinstance(source, SideBySide):
            members.extend(source.members)
            nested.append(unflatten(source.structure, [0] * len(source.members)))
        else:
            members.append(source)
            nested.append(0)
    return SideBySide(flatten(unflatten(structure, nested))[1], tuple(members))


def gathered_spec(source: IndexedSource, indices: Spec) -> Spec | None:
    """Return the spec of what a source gathers at indices of this spec."""
    if isinstance(source, SideBySide):
        return source.spec_at(indices)
    spec = source.element_spec
    for size in reversed(indices.shape):
        spec = batched(spec, size)
    return spec


def _read(read: Callable[[Any], Any], indices: Any) -> Any:
    """Return what is at indices, or at a single one, which has no axis."""
    indices = np.asarray(indices)
    if indices.ndim:
        return read(indices)
    return map_leaves(lambda leaf: leaf[0], read(indices[None]))


# --- Several sources that are read by index as one: what `concatenate` makes of them --------------


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


# --- Sources whose elements are drawn: other ones in each iteration over a dataset ----------------
#
# The normal form numbers them as it does steps that draw (`rewrites.normal`). Whoever iterates then
# decides what they draw from, and what is decided is a source like any other. What is drawn is the
# same in all repetitions within one iteration: an index names one element there.


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
