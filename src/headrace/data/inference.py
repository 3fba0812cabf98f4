"""What elements look like where only a user's function can tell: some are computed to find out."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from headrace.element.chunk import Chunk
from headrace.element.spec import Spec, loosened, spec_of
from headrace.element.stack import stack
from headrace.element.wire import frame_bytes
from headrace.errors import FailedPreconditionError
from headrace.execution.build import start
from headrace.execution.iterator import ElementIterator, Singles, Watched
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.buffering import Cache, Prefetch
from headrace.plan.combining import Interleave
from headrace.plan.elements import FromSource, Gather, Read
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.ordering import Enumerate, Repeat, Shuffle
from headrace.plan.traverse import element_spec, leaves, transform, walk
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.rewrites.optimize import prepare
from headrace.rewrites.read_alike import sources

__all__ = ["infer_spec", "largest_of_first"]

_MOST_READ = 1000
"""Elements that sources may give for a few to be made: where filters leave nearly all out, nobody
is to read a whole dataset for them."""


def infer_spec(plan: Node) -> Spec:
    """Return the spec of a plan's elements, by a look at one of them where it cannot be proved.

    Raises:
        FailedPreconditionError: There are no elements.
    """
    spec = element_spec(plan, infer=_look_at_one)
    if spec is None:
        raise FailedPreconditionError(
            f"the elements of an empty dataset have no known spec: {plan.describe()}"
        )
    return spec


def _look_at_one(plan: Node) -> Spec | None:
    """Return the spec of a plan's elements after a look at one of them; None: there are none.

    Each function of the user's is called about once: steps that take many elements to give one are
    replaced by others that look alike. One element says nothing of the lengths of axes in others,
    so they are None.
    """
    proven = element_spec(prepare(plan).plan)
    if proven is not None:
        return proven
    found = _spec_of_first(transform(plan, _with_few_calls))
    # With fewer elements below, there may be too few for a step that leaves some out.
    return _spec_of_first(plan) if found is None else found


def _spec_of_first(plan: Node) -> Spec | None:
    iterator = start(plan, seed=0, is_look=True)
    try:
        chunk = iterator.next_chunk(1)
        return None if chunk is None else loosened(spec_of(chunk.rows()[0]))
    finally:
        iterator.close()


def _with_few_calls(node: Node) -> Node:
    match node:
        case Shuffle() | Repeat() | Prefetch() | Cache():
            return node.input
        case Batch():
            # With a number beside it, an element that is a tuple is passed as it is.
            return Map(input=Enumerate(input=node.input), fn=_Alike(node.size))
        case PaddedBatch():
            return Map(input=Enumerate(input=node.input), fn=_AlikeAndPadded(node))
        case GroupByWindow():
            return node.with_parameters(window_size=1, window_size_func=None)
        case BucketBySequenceLength():
            return node.with_parameters(
                bucket_batch_sizes=(1,) * len(node.bucket_batch_sizes), drop_remainder=False
            )
        case Map(num_parallel_calls=int()):
            return Map(input=node.input, fn=node.fn, location=node.location)
    return node


def largest_of_first(plan: Node, count: int) -> int | None:
    """Return the bytes of the largest of about the first elements, made here; None: there are none.

    Each function of the user's is called about `count` times, on this thread: no buffer is filled,
    and steps that choose among what was made choose nothing.

    Args:
        plan: The plan in its normal form.
        count: How many to make.

    Raises:
        FailedPreconditionError: There is a generator, which may be there for one reader alone; or
            elements are too rare.
        Exception: As an element raised it.
    """
    if any(source.runs_user_code for source in sources(plan)):
        raise FailedPreconditionError("a generator runs where it is read, and nowhere else")
    sizes: list[int] = []
    reads = _Reads()
    iterator = start(_without_choices(plan), seed=0, is_look=True, watch=reads.watch)
    try:
        while len(sizes) < count and (chunk := iterator.next_chunk(1)) is not None:
            sizes.append(frame_bytes(chunk))
    finally:
        iterator.close()
    return max(sizes, default=None)


def _without_choices(plan: Node) -> Node:
    index = {id(step) for leaf in leaves(plan) for step in walk(leaf)}

    def changed(node: Node) -> Node:
        if id(node) in index:
            return node  # arithmetic; and what it leaves out may not be there
        if node.chooses:
            return node.inputs[0]
        if isinstance(node, Interleave):
            return node.with_parameters(num_parallel_calls=None)
        return _with_few_calls(node)

    return transform(plan, changed)


class _Reads:
    """Counts what sources give, in nested datasets too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def watch(self, node: Node, iterator: ElementIterator) -> ElementIterator:
        """Return what stands in the place of a step that reads a source."""
        is_read = isinstance(node, FromSource | Read | Gather)
        return _Counted(iterator, self) if is_read else iterator

    def add(self, count: int) -> None:
        """Count some more.

        Raises:
            FailedPreconditionError: They are too many.
        """
        with self._lock:
            self._count += count
            if self._count > _MOST_READ:
                raise FailedPreconditionError(
                    f"too few of the first {_MOST_READ:,} elements were left over by filters"
                )


class _Counted(Watched):
    """What reads a source, and is counted."""

    def __init__(self, stage: ElementIterator, reads: _Reads) -> None:
        super().__init__(stage)
        self.gives_rows = False
        self._reads = reads

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = super().next_chunk(min(limit, _AT_ONCE))
        self._reads.add(0 if chunk is None else chunk.size)
        return chunk

    def singles(self) -> Singles | None:
        return ElementIterator.singles(self)


_AT_ONCE = 16


@dataclass(frozen=True)
class _Alike:
    """Makes a batch of one element."""

    size: int

    def __call__(self, number: Any, element: Any) -> Any:
        return stack([element] * self.size)


@dataclass(frozen=True)
class _AlikeAndPadded:
    """Makes a padded batch of one element."""

    node: PaddedBatch

    def __call__(self, number: Any, element: Any) -> Any:
        return self.node.padding.stack([element] * self.node.size)
