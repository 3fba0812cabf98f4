"""Inference of specs and sizes that depend on user functions, from a few computed elements."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.spec import Spec, relax_lengths, spec_of
from headrace.element.stack import stack
from headrace.element.wire import frame_bytes
from headrace.errors import FailedPreconditionError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.iterator import ElementIterator, InstrumentedIterator, LazyRows
from headrace.plan.batching import Batch, PaddedBatch, RaggedBatch
from headrace.plan.buffering import Cache, Prefetch
from headrace.plan.combining import Interleave
from headrace.plan.elements import FromSource, GatherIndices, ReadIndices
from headrace.plan.elementwise import Map
from headrace.plan.ignoring_errors import IgnoreErrors
from headrace.plan.node import Node, distinct_nodes
from headrace.plan.ordering import Enumerate, Repeat, Shuffle
from headrace.plan.sliding_windows import Window
from headrace.plan.traverse import element_spec, find_leaves, transform, walk
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.rewrites.optimize import proved_spec
from headrace.rewrites.reader_agreement import find_sources

__all__ = ["infer_spec", "largest_sample_bytes"]

_MAX_READ = 1000
"""Number of elements that sources may yield for a sample. It prevents reading a whole dataset if
filters drop nearly all elements."""


def infer_spec(plan: Node) -> Spec:
    """Return the spec of a plan's elements; compute one element if it cannot be proved.

    Raises:
        FailedPreconditionError: If there are no elements.
    """
    ignores_errors = any(isinstance(node, IgnoreErrors) for node in distinct_nodes([plan]))
    spec = element_spec(plan, infer=partial(_infer_from_first, ignores_errors))
    if spec is None:
        raise FailedPreconditionError(
            f"the elements of an empty dataset have no known spec: {plan.describe()}"
        )
    return spec


def _infer_from_first(ignores_errors: bool, plan: Node) -> Spec | None:
    """Return the spec of a plan's elements from the first one, or None if there are no elements.

    Each user function is called about once: steps that need many elements to yield one are replaced
    by equivalents. One element does not show the axis lengths of others, so these are None.

    Args:
        ignores_errors: Whether a later step may drop elements that fail; they have no spec.
        plan: The plan.
    """
    if (spec := proved_spec(plan)) is not None:
        return spec
    found = _spec_of_first(transform(plan, _reduce_calls), ignores_errors)
    # With fewer input elements, a step that drops some may have none left.
    return _spec_of_first(plan, ignores_errors) if found is None else found


def _spec_of_first(plan: Node, ignores_errors: bool) -> Spec | None:
    iterator = build_iterator(plan, seed=0, is_preview=True)
    num_failed = 0
    try:
        while True:
            try:
                chunk = iterator.next_chunk(1)
            except UserFunctionError:
                num_failed += 1
                if not ignores_errors or num_failed > _MAX_READ:
                    raise
                continue
            return None if chunk is None else relax_lengths(spec_of(chunk.rows()[0]))
    finally:
        iterator.close()


def _reduce_calls(node: Node) -> Node:
    match node:
        case Shuffle() | Repeat() | Prefetch() | Cache():
            return node.input
        case Batch():
            # Enumerated, so that an element that is a tuple is passed as one argument.
            return Map(input=Enumerate(input=node.input), fn=_RepeatAsBatch(node.size))
        case PaddedBatch():
            return Map(input=Enumerate(input=node.input), fn=_RepeatAsPaddedBatch(node))
        case RaggedBatch():
            return node.with_parameters(size=1, drop_remainder=False)
        case Window():
            return node.with_parameters(size=1, shift=1, stride=1, drop_remainder=False)
        case GroupByWindow():
            return node.with_parameters(window_size=1, window_size_func=None)
        case BucketBySequenceLength():
            return node.with_parameters(
                bucket_batch_sizes=(1,) * len(node.bucket_batch_sizes), drop_remainder=False
            )
        case IgnoreErrors():
            return node.with_parameters(log_warning=False, dead_letter=None)
        case Map(num_parallel_calls=int()):
            return node.with_parameters(num_parallel_calls=None)
    return node


def largest_sample_bytes(plan: Node, count: int) -> int | None:
    """Return the size in bytes of the largest of about the first `count` elements, or None.

    The elements are computed on this thread, and each user function is called about `count` times:
    no buffer is filled, and selecting steps are removed.

    Args:
        plan: The plan in its canonical form.
        count: Number of elements to compute.

    Returns:
        The size, or None if there are no elements.

    Raises:
        FailedPreconditionError: If there is a generator, which may support a single reader only,
            or if filters drop too many elements.
        Exception: If an element raises an error.
    """
    if any(source.runs_user_code for source in find_sources(plan)):
        raise FailedPreconditionError("a generator runs only in the process that reads it")
    sizes: list[int] = []
    read_counter = _ReadCounter()
    iterator = build_iterator(
        _remove_selection(plan), seed=0, is_preview=True, instrument=read_counter.count_reads
    )
    try:
        while len(sizes) < count and (chunk := iterator.next_chunk(1)) is not None:
            sizes.append(frame_bytes(chunk))
    finally:
        iterator.close()
    return max(sizes, default=None)


def _remove_selection(plan: Node) -> Node:
    index_step_ids = {id(step) for leaf in find_leaves(plan) for step in walk(leaf)}

    def remove_step(node: Node) -> Node:
        if id(node) in index_step_ids:
            return node  # arithmetic only; the indices it drops may not exist
        if node.selects_by_position:
            return node.inputs[0]
        if isinstance(node, Interleave):
            return node.with_parameters(num_parallel_calls=None)
        return _reduce_calls(node)

    return transform(plan, remove_step)


class _ReadCounter:
    """Counts the elements that sources yield, including those in nested datasets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def count_reads(self, node: Node, iterator: ElementIterator) -> ElementIterator:
        """Return the iterator of a step, wrapped if the step reads a source. An `Instrument`."""
        reads_source = isinstance(node, FromSource | ReadIndices | GatherIndices)
        return _CountingIterator(iterator, self) if reads_source else iterator

    def add(self, count: int) -> None:
        """Add to the count.

        Raises:
            FailedPreconditionError: If it exceeds the limit.
        """
        with self._lock:
            self._count += count
            if self._count > _MAX_READ:
                raise FailedPreconditionError(
                    f"filters dropped too many of the first {_MAX_READ:,} elements"
                )


class _CountingIterator(InstrumentedIterator):
    """Iterator of a step that reads a source, with its elements counted."""

    def __init__(self, iterator: ElementIterator, counter: _ReadCounter) -> None:
        super().__init__(iterator)
        self.has_lazy_rows = False
        self._counter = counter

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = super().next_chunk(min(limit, _CHUNK_LIMIT))
        self._counter.add(0 if chunk is None else chunk.size)
        return chunk

    def lazy_rows(self) -> LazyRows | None:
        return ElementIterator.lazy_rows(self)


_CHUNK_LIMIT = 16


@dataclass(frozen=True)
class _RepeatAsBatch:
    """Makes a batch of copies of one element."""

    size: int

    def __call__(self, number: Any, element: Any) -> Any:
        return stack([element] * self.size)


@dataclass(frozen=True)
class _RepeatAsPaddedBatch:
    """Makes a padded batch of copies of one element."""

    node: PaddedBatch

    def __call__(self, number: Any, element: Any) -> Any:
        return self.node.padding.stack([element] * self.node.size)
