"""What elements look like where only a user's function can tell: one is computed to find out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.element.spec import Spec, loosened, spec_of
from headrace.element.stack import stack
from headrace.errors import FailedPreconditionError
from headrace.execution.build import start
from headrace.plan.batching import Batch
from headrace.plan.buffering import Cache, Prefetch
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.ordering import Enumerate, Repeat, Shuffle
from headrace.plan.padding import PaddedBatch
from headrace.plan.traverse import element_spec, transform
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.rewrites.optimize import prepare

__all__ = ["infer_spec"]


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
