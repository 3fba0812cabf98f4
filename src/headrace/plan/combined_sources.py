"""Sources composed of other sources, read by index as one, and sources with random elements."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.element.spec import Spec, batch_spec
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.plan.node import Node
from headrace.plan.source import INDEX_SPEC, INFINITE, IndexedSource

__all__ = [
    "INTEGERS",
    "ConcatenatedSource",
    "RandomizedSource",
    "ZippedSource",
    "concatenate_sources",
    "count_members",
    "infer_gather_spec",
    "reads_unresolved_source",
    "resolve_randomness",
    "zip_sources",
]

# --- Zipped sources: the result of `zip` and `enumerate` on indexed sources -----------------------


@dataclass(frozen=True, eq=False)
class ZippedSource(IndexedSource):
    """Sources whose elements form one structure; an index has the same structure, with ints.

    Args:
        structure: Structure of an element.
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
        return self.gather_spec(unflatten(self.structure, [INDEX_SPEC] * len(self.members)))

    @property
    def runs_user_code(self) -> bool:
        return any(member.runs_user_code for member in self.members)

    @property
    def can_borrow_runs(self) -> bool:
        return any(member.can_borrow_runs for member in self.members)

    def gather(self, indices: Any) -> Any:
        leaves, _ = flatten(indices)
        parts = [_read(m.gather, leaf) for m, leaf in zip(self.members, leaves, strict=True)]
        return unflatten(self.structure, parts)

    def gather_borrowed(self, indices: Any) -> Any:
        leaves, _ = flatten(indices)
        parts = [
            _read(m.gather_borrowed, leaf) for m, leaf in zip(self.members, leaves, strict=True)
        ]
        return unflatten(self.structure, parts)

    def gather_spec(self, indices: Spec) -> Spec | None:
        """Return the spec of `gather`'s result for indices with this spec."""
        leaves, _ = flatten(indices)
        specs = [infer_gather_spec(m, leaf) for m, leaf in zip(self.members, leaves, strict=True)]
        return None if any(spec is None for spec in specs) else unflatten(self.structure, specs)


class _IntegerSource(IndexedSource):
    """The integers: each element equals its index."""

    size = INFINITE
    element_spec = INDEX_SPEC

    def gather(self, indices: Any) -> Any:
        return np.array(indices)


INTEGERS = _IntegerSource()


def zip_sources(structure: Structure, sources: Sequence[IndexedSource]) -> ZippedSource:
    """Return the sources as one; the members of sources that are already zipped are flattened."""
    members: list[IndexedSource] = []
    nested: list[Any] = []
    for source in sources:
        if isinstance(source, ZippedSource):
            members.extend(source.members)
            nested.append(unflatten(source.structure, [0] * len(source.members)))
        else:
            members.append(source)
            nested.append(0)
    return ZippedSource(flatten(unflatten(structure, nested))[1], tuple(members))


def infer_gather_spec(source: IndexedSource, indices: Spec) -> Spec | None:
    """Return the spec of what a source gathers at indices with this spec."""
    if isinstance(source, ZippedSource):
        return source.gather_spec(indices)
    spec = source.element_spec
    for size in reversed(indices.shape):
        spec = batch_spec(spec, size)
    return spec


def _read(read: Callable[[Any], Any], indices: Any) -> Any:
    """Return the elements at indices, or the element at a single index, which has no axis."""
    indices = np.asarray(indices)
    if indices.ndim:
        return read(indices)
    return map_leaves(lambda leaf: leaf[0], read(indices[None]))


# --- Concatenated sources: the result of `concatenate` on indexed sources -------------------------


@dataclass(frozen=True, eq=False)
class ConcatenatedSource(IndexedSource):
    """Sources of equal specs, one after the other.

    Args:
        members: The sources; all are finite.
        ends: For each member, the number of elements up to its end.
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
    def can_borrow_runs(self) -> bool:
        return any(member.can_borrow_runs for member in self.members)

    def gather(self, indices: NDArray[np.int64]) -> Any:
        return self._read(indices, lambda member, own_indices: member.gather(own_indices))

    def gather_borrowed(self, indices: NDArray[np.int64]) -> Any:
        return self._read(indices, lambda member, own_indices: member.gather_borrowed(own_indices))

    def _read(
        self, indices: NDArray[np.int64], read: Callable[[IndexedSource, NDArray[np.int64]], Any]
    ) -> Any:
        indices = np.asarray(indices)
        member_numbers = np.searchsorted(np.array(self.ends), indices.ravel(), side="right")
        used_members: list[int] = np.unique(member_numbers).tolist() or [0]
        if len(used_members) == 1:
            (number,) = used_members
            return read(self.members[number], indices - self._start(number))
        # Read member by member, then restore the order of the indices.
        parts = []
        for number in used_members:
            own_indices = indices.ravel()[member_numbers == number] - self._start(number)
            parts.append(flatten(read(self.members[number], own_indices)))
        order = np.empty(member_numbers.size, np.int64)
        order[np.argsort(member_numbers, kind="stable")] = np.arange(member_numbers.size)
        leaves = [np.concatenate(same)[order] for same in zip(*[p[0] for p in parts], strict=True)]
        shaped = [leaf.reshape(*indices.shape, *leaf.shape[1:]) for leaf in leaves]
        return unflatten(parts[0][1], shaped)

    def _start(self, number: int) -> int:
        return self.ends[number - 1] if number else 0


def concatenate_sources(first: IndexedSource, second: IndexedSource) -> ConcatenatedSource:
    """Return two sources as one; the members of sources already concatenated are flattened."""
    before = first.size
    ends = (*_ends(first), *[before + end for end in _ends(second)])
    return ConcatenatedSource((*_members(first), *_members(second)), ends)


def count_members(source: IndexedSource) -> int:
    """Return the number of sources that are concatenated in a source (1 if it is a plain one)."""
    return len(_members(source))


def _members(source: IndexedSource) -> tuple[IndexedSource, ...]:
    return source.members if isinstance(source, ConcatenatedSource) else (source,)


def _ends(source: IndexedSource) -> tuple[int, ...]:
    return source.ends if isinstance(source, ConcatenatedSource) else (source.size,)


# --- Sources with random elements, which differ between iterations over a dataset -----------------
#
# The canonical form numbers them like random steps (`rewrites.canonicalize`). The iterator then
# supplies their entropy, which turns each into an ordinary source. Within one iteration all epochs
# have the same elements: an index names one element there.


class RandomizedSource(IndexedSource):
    """A source of random elements, unless `has_fixed_seed`."""

    number: int | None
    """Number among the random steps and sources of the plan as written; set by `canonicalize`."""

    @property
    @abstractmethod
    def has_fixed_seed(self) -> bool:
        """Whether all iterations have the same elements, because the user gave a seed."""

    @abstractmethod
    def with_number(self, number: int) -> RandomizedSource:
        """Return the source with its number among the plan's random steps and sources."""

    @abstractmethod
    def with_entropy(self, entropy: Sequence[int]) -> IndexedSource:
        """Return the source whose elements are drawn from these integers."""


def resolve_randomness(
    source: IndexedSource, entropy: Callable[[int], Sequence[int]]
) -> IndexedSource:
    """Return a source as it is in one iteration; a source without random elements is unchanged.

    Args:
        source: The source, or a `ZippedSource`.
        entropy: Returns the integers that seed random source number n.
    """
    if isinstance(source, RandomizedSource) and not source.has_fixed_seed:
        return source.with_entropy(entropy(source.number or 0))
    if isinstance(source, ZippedSource) and _is_unresolved(source):
        members = tuple(resolve_randomness(member, entropy) for member in source.members)
        return dataclasses.replace(source, members=members)
    return source


def reads_unresolved_source(node: Node) -> bool:
    """Return whether a step reads a random source whose entropy is not set yet."""
    return _is_unresolved(getattr(node, "source", None))


def _is_unresolved(source: object) -> bool:
    if isinstance(source, ZippedSource):
        return any(map(_is_unresolved, source.members))
    return isinstance(source, RandomizedSource) and not source.has_fixed_seed
