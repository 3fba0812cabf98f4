"""Opening a task's plan: the one place where a worker calls the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace.element.brief import InRow, InTurns
from headrace.element.chunk import Chunk
from headrace.element.places import row_counts, rows_of
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.execution.build import Watch, opens_files, start
from headrace.execution.dealer import Pause, UnitPart
from headrace.execution.dealt import DealtPlan, units_done
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.origins import Run, one_run_of, runs_in_turns, runs_of, sorted_runs
from headrace.plan.elementwise import Map
from headrace.plan.node import Node
from headrace.plan.serialize import load_plan
from headrace.plan.traverse import merged_options
from headrace.plan.user_function import UserFunction
from headrace.rewrites.cut import Half
from headrace.rewrites.shard import shard_elements, shard_files, shard_hints
from headrace.service.messages import TaskDefinition
from headrace.service.modes.coordinated_reads.round_shape import ShapedRounds
from headrace.service.rows import END, OriginRun
from headrace.service.worker.agenda import Grant
from headrace.service.worker.ways import found_by_name

__all__ = [
    "Origins",
    "open_plan",
    "origins_of",
    "state_after",
    "units_begun",
    "units_ended",
    "units_given",
    "units_whole",
]


def open_plan(
    plan: bytes,
    definition: TaskDefinition,
    next_units: Callable[[], Grant | None] | None,
    *,
    worker: str,
    watch: Watch | None = None,
    cost_plan: bytes = b"",
) -> ElementIterator:
    """Return an iterator over a task's elements.

    Args:
        plan: The pickled plan, as written.
        definition: Which pass over the data, which part of it, and what random steps without a
            seed of their own draw from, unless the plan's options say.
        next_units: Deals the task's units; None: the plan is read whole.
        worker: Where the worker listens, for errors.
        watch: See `execution.build.start`.
        cost_plan: The pickled plan of the cost function; empty: there is none.

    Raises:
        FailedPreconditionError: The plan uses a module that is not here, or another Python version
            pickled it, or the part of it is not known here.
        NotFoundError: It is to be shared by files, and reads something else.
        InvalidArgumentError: There are fewer files than workers.
    """
    try:
        node = load_plan(plan)
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(
            f"the worker at {worker} cannot load the dataset: {error}. Functions of modules travel "
            "by name: make the module importable for the worker, or let it travel by value with "
            f'`modules=["{(error.name or "").partition(".")[0]}"]` of `distribute` or '
            "`register_dataset`"
        ) from error
    if (
        definition.shard_kind
        and definition.num_shards is not None
        and definition.shard_index is not None
    ):
        part = found_by_name(_PARTS, definition.shard_kind, definition, "part of the plan")
        node = part(node, definition.num_shards, definition.shard_index)
    own = merged_options(node).seed
    iterator = start(
        node,
        seed=definition.seed if own is None else own,
        fixed=definition.fixed_seeds,
        pass_number=definition.epoch,
        units=None if next_units is None else partial(_granted, next_units),
        origins=definition.has_element_ids,
        half=cast(Half, definition.partition_mode) if definition.partition_mode else None,
        contain_exits=True,
        only_reads=True,  # they are sent
        watch=watch,
    )
    return _in_rounds(iterator, definition, cost_plan)


def _in_rounds(
    iterator: ElementIterator, definition: TaskDefinition, cost_plan: bytes
) -> ElementIterator:
    """Return an iterator over the same elements, or over rounds whose rows are shared anew."""
    consumers, remainder = definition.num_consumers, definition.remainder
    if consumers is None or (remainder == "drop" and not cost_plan):
        return iterator
    cost_fn = None
    if cost_plan:
        step = load_plan(cost_plan)
        assert isinstance(step, Map), step
        cost_fn = UserFunction(step.fn, "cost_fn", contain_exits=True)
    return ShapedRounds(
        iterator,
        consumers,
        remainder=remainder,
        cost_fn=cost_fn,
        begun=lambda: units_begun(iterator),
    )


def _granted(
    next_units: Callable[[], Grant | None],
) -> tuple[int, int] | UnitPart | Pause | None:
    """Return the next units as the engine wants them."""
    grant = next_units()
    if grant is not None and grant.is_pause:
        return Pause.PAUSE
    if grant is None or not grant.rows:
        return None if grant is None else grant.units
    assert grant.units is not None
    wanted = tuple((start, None if stop == END else stop) for start, stop in grant.rows)
    return UnitPart(unit=grant.units[0], wanted=wanted)


def _by_files(plan: Node, num_shards: int, index: int) -> Node:
    return shard_files(plan, num_shards, index, opens_files)


def _by_files_or_elements(plan: Node, num_shards: int, index: int) -> Node:
    try:
        return _by_files(plan, num_shards, index)
    except NotFoundError:
        return shard_elements(plan, num_shards, index)


_PARTS: dict[str, Callable[[Node, int, int], Node]] = {
    "files": _by_files,
    "elements": shard_elements,
    "files_or_elements": _by_files_or_elements,
    "hints": shard_hints,
}
"""How a plan as written is made that of one worker, where each has a share."""


def state_after(chunk: Chunk) -> State:
    """Return the state after the last element of a chunk that an iterator yielded."""
    return chunk.state_at(chunk.size)


def units_begun(iterator: ElementIterator) -> int:
    """Return a number of units, in dealt order, from which on nothing was yielded so far."""
    return iterator.begun if isinstance(iterator, DealtPlan | ShapedRounds) else 0


class Origins(NamedTuple):
    """Whence a chunk's elements are (`messages.Elements`), by units of the stream."""

    runs: tuple[OriginRun, ...] = ()
    is_mixed: bool = False
    order: bytes = b""
    turns: tuple[tuple[int, ...], int, int, int] | None = None
    sizes: tuple[int, ...] = ()


def origins_of(chunk: Chunk) -> Origins:
    """Return whence a chunk's elements are.

    Where units are mixed, they are said unit by unit: in few runs.
    """
    column = chunk.column
    assert column is not None, "the plan was started without origins"
    if isinstance(column, InRow):
        assert column.ordinal is not None, "the elements are below the root"
        return Origins((Run(column.unit, column.size, column.ordinal, 1),))
    if isinstance(column, InTurns):
        is_mixed, runs = runs_in_turns(column)
        if not is_mixed:
            return Origins(runs)
        return Origins(runs, True, turns=(column.units, column.each, column.start, column.size))
    assert isinstance(column, np.ndarray)
    units, ordinals = rows_of(column)
    run = one_run_of(units, ordinals)
    if run is not None:
        return Origins((run,), sizes=row_counts(column))
    steps = units[1:] - units[:-1]
    is_mixed = bool((steps < 0).any() or ((steps == 0) & (ordinals[1:] < ordinals[:-1])).any())
    sizes = row_counts(column)
    if not is_mixed:
        return Origins(runs_of(units, ordinals), sizes=sizes)
    order, runs = sorted_runs(units, ordinals)
    return Origins(runs, True, _packed(order), sizes=sizes)


def _packed(order: NDArray[np.integer[Any]]) -> bytes:
    return order.astype("<u4").tobytes()


def units_given(iterator: ElementIterator) -> int:
    """Return of how many units everything was yielded before the last pause, or the end."""
    return iterator.given if isinstance(iterator, DealtPlan) else 0


def units_ended(iterator: ElementIterator) -> tuple[tuple[int, int, int], ...]:
    """Return (unit, units, elements) of units that ended since this was asked last."""
    return iterator.take_ended() if isinstance(iterator, DealtPlan) else ()


def units_whole(state: State, before: int) -> int:
    """Return how many units are whole at a state, where `before` of them were so before it.

    A step that holds elements keeps the state of a leaf at the oldest of them: it may go back.
    """
    done = units_done(state)
    return before if done is None else max(before, done)
