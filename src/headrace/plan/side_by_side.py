"""Several sources that are read by index at once: what `zip` and `enumerate` make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.element.spec import Spec, batched
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.plan.source import INDEX_SPEC, INFINITE, IndexedSource

__all__ = ["NUMBERS", "SideBySide", "gathered_spec", "side_by_side"]


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
