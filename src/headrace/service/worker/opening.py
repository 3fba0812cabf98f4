"""Opening a task's plan: the one place where a worker calls the engine."""

from __future__ import annotations

from headrace.element.chunk import Chunk
from headrace.execution.build import start
from headrace.execution.dealt import DealtPlan
from headrace.execution.iterator import ElementIterator, State
from headrace.plan.serialize import load_plan
from headrace.plan.traverse import merged_options
from headrace.service.messages import TaskDefinition
from headrace.service.worker.unit_feed import UnitFeed

__all__ = ["open_plan", "state_after", "units_begun"]


def open_plan(
    plan: bytes, definition: TaskDefinition, seed: int, feed: UnitFeed | None
) -> ElementIterator:
    """Return an iterator over a task's elements.

    Args:
        plan: The pickled plan, as written.
        definition: Which pass over the data.
        seed: What random steps without a seed of their own draw from, unless the plan's options
            say.
        feed: Deals the task's units; None: the plan is read whole.
    """
    node = load_plan(plan)
    own = merged_options(node).seed
    return start(
        node,
        seed=seed if own is None else own,
        pass_number=definition.pass_number,
        units=None if feed is None else feed.next_units,
        contain_exits=True,
    )


def state_after(chunk: Chunk) -> State:
    """Return the state after the last element of a chunk that an iterator yielded."""
    return chunk.state_at(chunk.size)


def units_begun(iterator: ElementIterator) -> int:
    """Return a number of units, in dealt order, from which on nothing was yielded so far."""
    return iterator.begun if isinstance(iterator, DealtPlan) else 0
