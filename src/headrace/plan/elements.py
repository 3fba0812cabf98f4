"""Where a plan begins: numbers, the elements of a source, and elements read by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headrace.element.spec import Spec
from headrace.plan.combined_sources import gathered_spec
from headrace.plan.node import Node
from headrace.plan.source import INDEX_SPEC, INFINITE, UNKNOWN, IndexedSource, Source

__all__ = ["FromSource", "Gather", "Indices", "Read"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FromSource(Node):
    """The elements of `source`, index by index.

    This is how users write it. In the normal form (`rewrites.normal`) only a source that cannot
    be read in parts is left of it.
    """

    kind: ClassVar[str] = "source"
    own_spec: ClassVar[bool] = True

    source: Source

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.source.element_spec

    def cardinality(self, *inputs: int) -> int:
        known = self.source.element_count
        return _elements_of(self.source, self.source.size) if known is None else known


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Indices(Node):
    """`size` integers from `start` on, or without end where `size` is INFINITE."""

    kind: ClassVar[str] = "indices"
    index_step: ClassVar[bool] = True
    own_spec: ClassVar[bool] = True

    size: int
    start: int = 0

    def __post_init__(self) -> None:
        self.keep_int("size", minimum=0, also=(INFINITE,))

    def spec(self, *inputs: Spec) -> Spec | None:
        return INDEX_SPEC

    def cardinality(self, *inputs: int) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Gather(Node):
    """The elements of `source` at the indices that `input` yields.

    An index element of shape `s` gives the elements at those indices, stacked on axes `s`. For
    sources side by side it has their structure.
    """

    kind: ClassVar[str] = "gather"
    within_units: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True

    input: Node
    source: IndexedSource

    def spec(self, *inputs: Spec) -> Spec | None:
        return gathered_spec(self.source, inputs[0])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Read(Node):
    """The elements that `source` holds at the indices that `input` yields, index by index."""

    kind: ClassVar[str] = "read"
    within_units: ClassVar[bool] = True
    own_spec: ClassVar[bool] = True

    input: Node
    source: Source

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.source.element_spec

    def cardinality(self, *inputs: int) -> int:
        return _elements_of(self.source, inputs[0])


def _elements_of(source: Source, indices: int) -> int:
    """Return the number of elements that so many indices of a source hold."""
    each = source.elements_per_index
    if indices == 0 or each == 0:
        return 0
    if each is None or indices == UNKNOWN:
        return UNKNOWN
    return INFINITE if indices == INFINITE else indices * each
