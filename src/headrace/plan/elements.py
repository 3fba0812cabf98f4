"""Where a plan begins: the elements of a source, and elements gathered from one by index."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.element.spec import ArraySpec, Spec, batched
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN, IndexedSource, Source

__all__ = ["FromSource", "Gather"]


@dataclass(frozen=True, kw_only=True, eq=False)
class FromSource(Node):
    """The elements of `source`, split by split."""

    source: Source

    def spec(self, *inputs: Spec) -> Spec | None:
        return self.source.element_spec

    def cardinality(self, *inputs: int) -> int:
        if self.source.size == 0 or self.source.elements_per_index is None:
            return 0 if self.source.size == 0 else UNKNOWN
        if self.source.size == INFINITE:
            return INFINITE
        return self.source.size * self.source.elements_per_index


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather(Node):
    """The elements of `source` at the indices that `input` yields.

    An index element of shape `s` gives the elements at those indices, stacked on axes `s`.
    """

    input: Node
    source: IndexedSource

    def spec(self, *inputs: Spec) -> Spec | None:
        spec = self.source.element_spec
        indices: ArraySpec = inputs[0]
        for size in reversed(indices.shape):
            spec = batched(spec, size)
        return spec
