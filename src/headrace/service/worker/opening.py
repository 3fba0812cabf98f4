"""Opening a task's plan: the one place where a worker calls the engine."""

from __future__ import annotations

from collections.abc import Callable

from headrace.element.chunk import Chunk
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.execution.build import start
from headrace.execution.dealer import NextUnits
from headrace.execution.dealt import DealtPlan, units_done
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.opens_files import opens_files
from headrace.plan.node import Node
from headrace.plan.serialize import load_plan
from headrace.plan.traverse import merged_options
from headrace.rewrites.shard import shard_elements, shard_files, shard_hints
from headrace.service.config import ShardingPolicy
from headrace.service.messages import TaskDefinition

__all__ = ["open_plan", "state_after", "units_begun", "units_whole"]


def open_plan(
    plan: bytes,
    definition: TaskDefinition,
    seed: int,
    next_units: NextUnits | None,
    *,
    worker: str,
) -> ElementIterator:
    """Return an iterator over a task's elements.

    Args:
        plan: The pickled plan, as written.
        definition: Which pass over the data.
        seed: What random steps without a seed of their own draw from, unless the plan's options
            say.
        next_units: Deals the task's units; None: the plan is read whole.
        worker: Where the worker listens, for errors.

    Raises:
        FailedPreconditionError: The plan uses a module that is not here.
        NotFoundError: It is to be shared by files, and reads something else.
        InvalidArgumentError: There are fewer files than workers.
    """
    try:
        node = load_plan(plan)
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(
            f"the worker at {worker} cannot load the dataset: {error}. Functions of modules travel "
            "by name: make the module importable for the worker, or let it travel by value with "
            f"`cloudpickle.register_pickle_by_value({error.name})` where the dataset is made"
        ) from error
    part = _PARTS.get(definition.processing_mode)
    if part is not None and definition.of is not None and definition.shard is not None:
        node = part(node, definition.of, definition.shard)
    own = merged_options(node).seed
    return start(
        node,
        seed=seed if own is None else own,
        pass_number=definition.pass_number,
        units=next_units,
        contain_exits=True,
        only_reads=True,  # they are sent
    )


def _by_files(plan: Node, num_shards: int, index: int) -> Node:
    return shard_files(plan, num_shards, index, opens_files)


def _by_files_or_elements(plan: Node, num_shards: int, index: int) -> Node:
    try:
        return _by_files(plan, num_shards, index)
    except NotFoundError:
        return shard_elements(plan, num_shards, index)


_PARTS: dict[int, Callable[[Node, int, int], Node]] = {
    ShardingPolicy.FILE: _by_files,
    ShardingPolicy.DATA: shard_elements,
    ShardingPolicy.FILE_OR_DATA: _by_files_or_elements,
    ShardingPolicy.HINT: shard_hints,
}
"""How a plan as written is made that of one worker, where each has a share."""


def state_after(chunk: Chunk) -> State:
    """Return the state after the last element of a chunk that an iterator yielded."""
    return chunk.state_at(chunk.size)


def units_begun(iterator: ElementIterator) -> int:
    """Return a number of units, in dealt order, from which on nothing was yielded so far."""
    return iterator.begun if isinstance(iterator, DealtPlan) else 0


def units_whole(state: State, before: int) -> int:
    """Return how many units are whole at a state, where `before` of them were so before it.

    A step that holds elements keeps the state of a leaf at the oldest of them: it may go back.
    """
    done = units_done(state)
    return before if done is None else max(before, done)
