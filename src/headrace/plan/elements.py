"""Steps that read sources: as the user writes them, and in canonical form by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.element.spec import Spec
from headrace.plan.combined_sources import infer_gather_spec
from headrace.plan.node import Node
from headrace.plan.source import INDEX_SPEC, INFINITE, UNKNOWN, IndexedSource, Source

__all__ = ["FromSource", "GatherIndices", "Indices", "ReadIndices"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FromSource(Node):
    """The elements of `source`, index by index, in a plan as written.

    The canonical form (`rewrites.canonicalize`) keeps it only for
    sources that cannot be read in parts.
    """

    kind: ClassVar[str] = "source"
    has_own_spec: ClassVar[bool] = True

    source: Source

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.source.element_spec

    def cardinality(self, *inputs: int) -> int:
        known = self.source.element_count
        return _count_elements(self.source, self.source.size) if known is None else known


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Indices(Node):
    """`size` integers from `start` on; unbounded if `size` is INFINITE."""

    kind: ClassVar[str] = "indices"
    is_index_step: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True

    size: int
    start: int = 0

    def __post_init__(self) -> None:
        self.validate_int("size", minimum=0, also_allowed=(INFINITE,))

    def spec(self, *inputs: Spec) -> Spec | None:
        return INDEX_SPEC

    def cardinality(self, *inputs: int) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GatherIndices(Node):
    """The elements of `source` at the indices that `input` yields.

    An index element of shape `s` yields the elements at those indices, stacked on axes `s`. For a
    `ZippedSource` an index element has the source's structure.
    """

    kind: ClassVar[str] = "gather"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True

    input: Node
    source: IndexedSource

    def spec(self, *inputs: Spec) -> Spec | None:
        return infer_gather_spec(self.source, inputs[0])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReadIndices(Node):
    """All elements that `source` has at the indices that `input` yields, index by index."""

    kind: ClassVar[str] = "read"
    is_split_local: ClassVar[bool] = True
    has_own_spec: ClassVar[bool] = True

    input: Node
    source: Source

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.source.element_spec

    def cardinality(self, *inputs: int) -> int:
        return _count_elements(self.source, inputs[0])


def _count_elements(source: Source, num_indices: int) -> int:
    """Return the number of elements at `num_indices` indices of a source."""
    per_index = source.elements_per_index
    if num_indices == 0 or per_index == 0:
        return 0
    if per_index is None or num_indices == UNKNOWN:
        return UNKNOWN
    return INFINITE if num_indices == INFINITE else num_indices * per_index
