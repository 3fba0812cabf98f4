"""Reader of a plan's undelivered elements, in one process and in arbitrary order.

Partially delivered splits are read first, followed by undelivered splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from headrace.element.chunk import Chunk
from headrace.element.metadata import constituent_ids
from headrace.errors import FailedPreconditionError
from headrace.execution.assigned_iterators import AssignedPlanIterator
from headrace.execution.build import Instrument, build_iterator
from headrace.execution.delivered_elements import (
    END_ORDINAL,
    DeliveredElements,
    DeliveryLog,
    RawIdRun,
    find_missing_ordinals,
    with_split_ends,
)
from headrace.execution.element_ids import to_runs
from headrace.execution.iterator import ElementIterator, State
from headrace.execution.split_provider import NextSplits, PartialSplit
from headrace.plan.determinism import collect_fixed_seeds, with_fixed_seeds
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.rewrites.optimize import prepare
from headrace.rewrites.split_space import compute_split_space

__all__ = ["RemainingElementsIterator", "build_remaining", "remaining_splits"]

_SPLITS_AT_ONCE = 1 << 16
_CHUNKS_REMEMBERED = 8
"""Number of recent chunks whose states can still be requested."""


class RemainingElementsIterator(ElementIterator):
    """Reads the elements that were not delivered; its state is the set of delivered elements.

    Args:
        build_assigned: Starts the plan with element ids; its argument returns the splits to read.
        num_splits: Number of splits of the plan, or INFINITE.
    """

    def __init__(
        self, build_assigned: Callable[[NextSplits], AssignedPlanIterator], num_splits: int
    ) -> None:
        self._build_assigned = build_assigned
        self._num_splits = num_splits
        self._start_after(DeliveredElements())

    def _start_after(self, delivered: DeliveredElements) -> None:
        self._log = DeliveryLog(delivered.copy())
        self._remaining_splits = remaining_splits(delivered, self._num_splits)
        self._input: AssignedPlanIterator | None = None
        self._num_read = 0
        self._stops: list[int] = []

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._input is None:
            remaining = self._remaining_splits
            self._input = self._build_assigned(lambda: next(remaining, None))
        try:
            chunk = self._input.next_chunk(limit)
        except Exception:
            self._num_read += 1  # an error has a position, but no element id
            raise
        finished = [
            (first_split, num_splits, size, END_ORDINAL - size)
            for first_split, num_splits, size in self._input.take_finished()
        ]
        if chunk is None:
            self._log.add(self._num_read, 0, lambda count: finished)
            return None
        start, self._num_read = self._num_read, self._num_read + chunk.size
        self._log.add(start, chunk.size, _make_id_runs(chunk, finished))
        self._stops.append(self._num_read)
        if len(self._stops) > _CHUNKS_REMEMBERED:
            self._log.discard_before(self._stops.pop(0))
        log = self._log
        return chunk.with_metadata(None).with_states(
            lambda index: log.delivered_before(start + index).to_json()
        )

    def get_state(self) -> State:
        return self._log.delivered_before(self._num_read).to_json()

    def set_state(self, state: State) -> None:
        self.close()
        delivered = DeliveredElements.from_json(state)
        highest = max([0, *(stop for _, stop in delivered.complete_splits)])
        highest = max([highest, *(split + 1 for split, _ in delivered.partial_splits)])
        if self._num_splits != INFINITE and highest > self._num_splits:
            raise FailedPreconditionError(
                f"the state contains splits up to {highest}, but the dataset has "
                f"{self._num_splits} splits; restore the state with the same data"
            )
        self._start_after(delivered)

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


def build_remaining(
    plan: Node,
    *,
    seed: int,
    step_seeds: Sequence[int] = (),
    epochs: tuple[int, ...] = (0,),
    instrument: Instrument | None = None,
) -> RemainingElementsIterator:
    """Return an iterator over the remaining elements of a plan, in arbitrary order.

    Arguments as for `execution.build.build_iterator`; the state is the set of delivered elements.

    Raises:
        FailedPreconditionError: If the plan reads a source that cannot be read in parts.
    """
    split_space = compute_split_space(
        prepare(with_fixed_seeds(plan, step_seeds or collect_fixed_seeds(plan))).plan
    )
    if split_space is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be divided, so its remaining elements cannot "
            "be read separately"
        )

    def build_assigned(next_splits: NextSplits) -> AssignedPlanIterator:
        iterator = build_iterator(
            plan,
            seed=seed,
            step_seeds=step_seeds,
            epochs=epochs,
            next_splits=next_splits,
            with_element_ids=True,
            instrument=instrument,
        )
        assert isinstance(iterator, AssignedPlanIterator)
        return iterator

    return RemainingElementsIterator(build_assigned, split_space.size)


def remaining_splits(
    delivered: DeliveredElements, num_splits: int
) -> Iterator[tuple[int, int] | PartialSplit]:
    """Return the remaining splits of a plan, partial ones first.

    Args:
        delivered: The delivered elements.
        num_splits: Number of splits of the plan, or INFINITE.
    """
    partial_splits = delivered.partial_splits
    for split, ordinals in partial_splits:
        wanted = tuple(
            (start, None if stop == END_ORDINAL else stop)
            for start, stop in find_missing_ordinals(ordinals)
        )
        yield PartialSplit(split, wanted)
    next_split = 0
    for first, stop in sorted(
        (*delivered.complete_splits, *((split, split + 1) for split, _ in partial_splits))
    ):
        if next_split < first:
            yield next_split, first
        next_split = max(next_split, stop)
    while num_splits == INFINITE:
        yield next_split, next_split + _SPLITS_AT_ONCE
        next_split += _SPLITS_AT_ONCE
    if next_split < num_splits:
        yield next_split, num_splits


def _make_id_runs(chunk: Chunk, finished: list[RawIdRun]) -> Callable[[int], Iterable[RawIdRun]]:
    metadata = chunk.metadata
    assert metadata is not None

    def id_runs(count: int) -> Iterable[RawIdRun]:
        splits, ordinals = constituent_ids(metadata[:count])
        runs: list[RawIdRun] = [*to_runs(splits, ordinals)]
        return [*runs, *finished] if count == chunk.size else with_split_ends(runs, finished)

    return id_runs
