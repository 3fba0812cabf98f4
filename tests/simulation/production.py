"""Stand-ins for the engine: compute the elements of splits arithmetically.

An *atom* is (split, number within the split). An element is a tuple of atoms: one, or several if
elements are batched. Result batches report splits as `service/worker/producer.py` does, with the
same functions; the states that these functions read have the form of real plans' states.
"""

from __future__ import annotations

import enum
import json
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from headrace.errors import UserFunctionError
from headrace.execution.assigned_iterators import count_started_splits
from headrace.service.element_sets import ALL_ORDINALS, END_ORDINAL, ElementIdRun
from headrace.service.messages import ElementIds, SavedFile
from headrace.service.ranges import Ranges
from headrace.service.worker.assignment_order import AssignmentOrder
from headrace.service.worker.producer import MAX_BATCH_ELEMENTS, next_batch_limit
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_iterator import count_complete_splits

__all__ = [
    "Atom",
    "Element",
    "FileSteps",
    "Grant",
    "Need",
    "Plan",
    "Production",
    "frame_of",
    "produce",
]

Atom: TypeAlias = tuple[int, int]
Element: TypeAlias = tuple[Atom, ...]

_HELD_BACK_SECONDS = 0.02
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Dataset to read."""

    size: int
    """Number of splits."""
    max_split_elements: int = 1
    """Maximum elements per split; 1 means exactly one."""
    cycle_length: int = 1
    """Number of splits open at once, as in an interleave; 1 reads them in succession."""
    shuffle_buffer: int = 1
    """Buffer size of a shuffle of elements; 1 disables shuffling."""
    filters: bool = False
    """Whether a filter after the shuffle drops some elements."""
    batch_size: int = 1
    """Number of elements per batch, the last step."""
    cost: float = 0.0
    """Seconds per element."""
    bytes: int = 100
    """Bytes per element."""
    slow: frozenset[int] = frozenset()
    """Splits that take `slowness` additional seconds."""
    slowness: float = 30.0
    poison: frozenset[int] = frozenset()
    """Splits that kill the process that starts them."""
    failing: frozenset[int] = frozenset()
    """Splits whose first element raises."""
    broken: bool = False
    """The plan cannot be opened."""

    def count(self, split: int) -> int:
        """Return the number of elements of a split, including those that raise."""
        return (
            1
            if self.max_split_elements == 1
            else (split * 2654435761 >> 7) % (self.max_split_elements + 1)
        )

    def atoms(self, split: int) -> list[Atom]:
        """Return the atoms of a split that are delivered if none are lost."""
        return [
            (split, k)
            for k in range(self.count(split))
            if not (self.raises(split, k) or self.filtered(split, k))
        ]

    def everything(self) -> set[Atom]:
        """Return all atoms that are delivered or raise."""
        return {
            (split, k)
            for split in range(self.size)
            for k in range(self.count(split))
            if not self.filtered(split, k)
        }

    def filtered(self, split: int, k: int) -> bool:
        """Return whether the filter drops an element."""
        return self.filters and not self.raises(split, k) and (split * 31 + k) % 3 == 1

    def rows(self, split: int) -> int:
        """Return the number of elements of a split that do not raise, which have ordinals."""
        return self.count(split) - sum(
            self.raises(split, k) for k in range(min(1, self.count(split)))
        )

    def ordinal(self, atom: Atom) -> int:
        """Return the ordinal of an element, or of the next one if it raises."""
        return atom[1] - (atom[1] > 0 and self.raises(atom[0], 0))

    def raises(self, split: int, k: int) -> bool:
        """Return whether an element raises."""
        return k == 0 and split in self.failing


@dataclass(frozen=True)
class Grant:
    """Splits for a producer."""

    start: int
    stop: int
    deliver_at_once: bool = False
    rows: Ranges = ()
    """If not empty, the grant is one split, and only these ordinals are needed."""
    is_pause: bool = False
    """No splits now: held elements must be delivered."""


class Need(enum.Enum):
    """Event that a producer waits for."""

    ROOM = "room for another batch"
    SPLITS = "splits: a `SplitGrant`, or None after the last"
    DEATH = "crash of its process"


Production: TypeAlias = Generator[Need | float | ResultBatch, Grant | None, str | None]
"""Yields needs, seconds of work and result batches; returns the reason of a failure, or None."""


class _Stream:
    """Elements of a plan in order, and the state of its steps."""

    NOTHING: Atom = (-1, -1)
    """Instead of an atom: check again whether to open splits."""

    def __init__(
        self, plan: Plan, rng: random.Random, *, assigns_splits: bool, shard: int, num_shards: int
    ) -> None:
        self.plan, self._rng, self.assigns_splits = plan, rng, assigns_splits
        self.order = AssignmentOrder()
        self._granted: deque[tuple[int, Ranges]] = deque()
        if not assigns_splits:
            self._granted.extend(
                (split, ALL_ORDINALS) for split in range(shard, plan.size, num_shards)
            )
        self._is_exhausted = not assigns_splits
        self.has_paused = False
        #: (number in assignment order, split, its remaining elements)
        self._open: list[tuple[int, int, deque[Atom]]] = []
        #: Elements in the shuffle buffer, with the numbers of their splits.
        self._shuffled: list[tuple[int, Atom]] = []
        self.num_opened = 0
        self._has_reached_end = True
        self.delivers_at_once = False
        #: (split, elements) of ended splits that were not reported yet.
        self.ends: list[tuple[int, int]] = []
        #: The unfinished batch, and the lowest open split number when it was started.
        self.unfinished_batch: list[Atom] = []
        self._batch_number = 0

    def take(self, grant: Grant | None) -> None:
        if grant is None:
            self._is_exhausted = True
            return
        if grant.is_pause:
            self.has_paused = True
            return
        rows = grant.rows or ALL_ORDINALS
        self._granted.extend((split, rows) for split in range(grant.start, grant.stop))
        self.order.assign(grant.start, grant.stop, grant.rows)
        self.delivers_at_once = grant.deliver_at_once

    def open_next(self) -> int | Need | None:
        """Open a split if the cycle is not full; return the split, or what is needed."""
        if len(self._open) >= self.plan.cycle_length:
            return None
        self._has_reached_end = self._is_exhausted or bool(self._granted)
        if not self._granted:
            return None if self._is_exhausted or self.has_paused else Need.SPLITS
        split, rows = self._granted.popleft()
        # An element that raises belongs to the ordinal of the next one.
        wanted = deque(
            (split, k)
            for k in range(self.plan.count(split))
            if any(start <= self.plan.ordinal((split, k)) < stop for start, stop in rows)
        )
        if wanted:
            self._open.append((self.num_opened, split, wanted))
        if rows[-1][1] < END_ORDINAL:
            wanted.append((split, -1))  # it is not read to the end
        elif not wanted:
            self.ends.append((split, self.plan.rows(split)))
        self.num_opened += 1
        return split

    def next_atom(self) -> Atom | None:
        """Return the next atom once no split must be opened; None at the end."""
        while self._open and len(self._shuffled) < self.plan.shuffle_buffer:
            index = self._rng.randrange(len(self._open)) if self.plan.cycle_length > 1 else 0
            number, split, remaining = self._open[index]
            atom = remaining.popleft()
            if not remaining:
                self.ends.append((split, self.plan.rows(split)))
            if not remaining or remaining[0][1] < 0:
                del self._open[index]
            if self.plan.raises(*atom):
                return atom  # no step holds an error
            self._shuffled.append((number, atom))
            if self.plan.shuffle_buffer > 1 and len(self._open) < self.plan.cycle_length:
                return self.NOTHING if self._may_open else self._draw()
        return self._draw()

    @property
    def _may_open(self) -> bool:
        """Whether another split is opened before an element is drawn."""
        return bool(self._granted) or not (self._is_exhausted or self.has_paused)

    def _draw(self) -> Atom | None:
        if not self._shuffled:
            return None
        numbers = [number for number, _, _ in self._open] + [number for number, _ in self._shuffled]
        if not self.unfinished_batch:
            self._batch_number = min(numbers)
        index = self._rng.randrange(len(self._shuffled)) if self.plan.shuffle_buffer > 1 else 0
        return self._shuffled.pop(index)[1]

    def state(self) -> Any:
        """Return the state that the plan's steps would have."""
        held = [{"assigned": number} for number, _, _ in self._open]
        held += [{"assigned": number} for number, _ in self._shuffled]
        held += [{"assigned": self._batch_number}] * bool(self.unfinished_batch)
        if self.plan.cycle_length > 1 or self.plan.batch_size > 1 or self.plan.shuffle_buffer > 1:
            return {"held": held, "input": {"assigned": self.num_opened}}
        if (
            not held
            and self.plan.max_split_elements > 1
            and self.num_opened
            and not self._has_reached_end
        ):
            # The end of a split is detected when its next element is requested.
            return {"index": {"assigned": self.num_opened - 1}, "ordinal": 1}
        if not held:
            return {"index": {"assigned": self.num_opened}, "ordinal": 0}
        return {"index": held[0], "ordinal": self._open[0][2][0][1] if self._open else 1}


def frame_of(batch: ResultBatch) -> Any:
    """Return the frames of a batch, like `service/worker/batch_frames.py`."""
    return batch.buffers if batch.row_range is None else batch.buffers[slice(*batch.row_range)]


def produce(
    plan: Plan,
    rng: random.Random,
    *,
    assigns_splits: bool,
    has_ids: bool = False,
    max_elements: int = MAX_BATCH_ELEMENTS,
    max_batch_bytes: int | None = None,
    requested_elements: Callable[[], int | None] = lambda: None,
    shard: int = 0,
    num_shards: int = 1,
    in_order: bool = False,
    to_files: bool = False,
) -> Production:
    """Produce a task's result batches, like `service/worker/producer.py`.

    Without assigned splits, shard `shard` is every `num_shards`-th split. For files, all splits are
    reported as complete at the end.
    """
    batch_bytes = min(_BATCH_BYTES, max_batch_bytes or _BATCH_BYTES)
    if plan.broken:
        yield ResultBatch(first_element=0, error=UserFunctionError("the plan cannot be opened"))
        return "its plan cannot be opened"
    stream = _Stream(plan, rng, assigns_splits=assigns_splits, shard=shard, num_shards=num_shards)
    account = _Account(stream, has_ids)
    limit = 1
    while True:
        yield Need.ROOM
        limit = min(limit, requested_elements() or limit)
        elements: list[Element] = []
        count = 0
        was_flushed = False
        error: UserFunctionError | None = None
        state: Any = None
        at_end = False
        seconds = 0.0
        while count < limit and count * plan.bytes < batch_bytes:
            opened = stream.open_next()
            if opened is Need.SPLITS:
                if elements:
                    # Ready elements do not wait with the producer.
                    yield account.batch(elements)
                    elements = []
                    was_flushed = True
                stream.take((yield Need.SPLITS))
                continue
            if isinstance(opened, int):
                if opened in plan.poison:
                    yield Need.DEATH
                if opened in plan.slow:
                    yield plan.slowness
                    seconds += plan.slowness
                continue
            # Elements before one that raises do not report the latter's split.
            state = stream.state() if plan.failing else None
            atom = stream.next_atom()
            if atom is not None and plan.raises(*atom):
                error = UserFunctionError(f"split {atom[0]} raises")
                break
            if atom is _Stream.NOTHING:
                continue
            if atom is not None:
                if plan.cost:
                    yield plan.cost
                    seconds += plan.cost
                if plan.filtered(*atom):
                    continue
                stream.unfinished_batch.append(atom)
            if stream.unfinished_batch and (
                atom is None or len(stream.unfinished_batch) == plan.batch_size
            ):
                elements.append(tuple(stream.unfinished_batch))
                count += 1
                stream.unfinished_batch = []
            if atom is None and stream.has_paused:
                if elements:
                    yield account.batch(elements)
                    elements = []
                yield account.complete()
                stream.has_paused, was_flushed = False, True
                continue
            if atom is None:
                at_end = True
                break
            at_once = seconds > _HELD_BACK_SECONDS or stream.delivers_at_once or was_flushed
            if not stream.unfinished_batch and elements and at_once:
                break
        if elements:
            yield account.batch(elements, None if error is None else state)
        if at_end:
            if in_order and stream.ends:
                yield account.ends()
            if to_files:
                yield account.complete()
            return None
        if error is not None:
            yield account.error(error, atom)
        elif not was_flushed:
            wanted = next_batch_limit(limit, count, count * plan.bytes, seconds, batch_bytes)
            limit = min(max_elements, wanted)


class _Account:
    """Counts elements and splits for the result batches."""

    def __init__(self, stream: _Stream, has_ids: bool) -> None:
        self._stream, self._has_ids = stream, has_ids
        self._first = self._num_complete = self._delivered_end = 0

    def batch(self, elements: list[Element], state: Any = None) -> ResultBatch:
        before, first = self._num_complete, self._first
        self._count_splits(state)
        self._first += len(elements)
        return ResultBatch(
            first_element=first,
            num_elements=len(elements),
            buffers=elements,  # type: ignore[arg-type]
            size=len(elements) * self._stream.plan.bytes,
            done_from=before,
            done_to=self._num_complete,
            delivered_end=self._delivered_end,
            mode_data=self._element_ids(elements, reports_ends=state is None),
        )

    def ends(self) -> ResultBatch:
        """Return a batch that reports the ends of the last splits."""
        return ResultBatch(
            first_element=self._first,
            done_from=self._num_complete,
            done_to=self._num_complete,
            delivered_end=self._delivered_end,
            mode_data=self._element_ids([]),
        )

    def complete(self) -> ResultBatch:
        """Return a batch that reports all opened splits as complete."""
        before = self._num_complete
        self._num_complete = self._delivered_end = self._stream.num_opened
        return ResultBatch(
            first_element=self._first,
            done_from=before,
            done_to=self._num_complete,
            delivered_end=self._delivered_end,
            mode_data=self._element_ids([]),
        )

    def error(self, error: UserFunctionError, atom: Atom) -> ResultBatch:
        before = self._num_complete
        failed, failed_at = -1, (0, 0)
        if self._has_ids:
            failed_at = 0, 1  # the first of its split
            number = (atom[0], 1, self._stream.plan.ordinal(atom), 1)
            failed = self._stream.order.element_ids([number], [])[0][0]
        self._count_splits()
        return ResultBatch(
            first_element=self._first,
            error=error,
            done_from=before,
            done_to=self._num_complete,
            delivered_end=self._delivered_end,
            mode_data=self._element_ids([], failed_split=failed, failed_position=failed_at),
        )

    def _element_ids(
        self, elements: list[Element], *, reports_ends: bool = True, **failure: Any
    ) -> ElementIds | None:
        """Return the element ids, and the splits that ended since the last call.

        If a split ended with an error, its end is reported with the error.
        """
        if not self._has_ids:
            return None
        stream, runs = self._stream, list[ElementIdRun]()
        for split, k in (atom for element in elements for atom in element):
            ordinal = stream.plan.ordinal((split, k))
            if runs and runs[-1][0] == split and runs[-1][2] + runs[-1][3] == ordinal:
                runs[-1] = (split, 1, runs[-1][2], runs[-1][3] + 1)
            else:
                runs.append((split, 1, ordinal, 1))
        ended = [(split, 1, count) for split, count in stream.ends if reports_ends]
        stream.ends = stream.ends[len(ended) :]
        return ElementIds(runs=stream.order.element_ids(runs, ended), **failure)

    def _count_splits(self, state: Any = None) -> None:
        if self._stream.assigns_splits:
            state = self._stream.state() if state is None else state
            begun = count_started_splits(state)
            self._num_complete = count_complete_splits(state, self._num_complete)
            self._delivered_end = max(
                self._delivered_end,
                self._num_complete,
                self._stream.num_opened if begun is None else begun,
            )


class FileSteps:
    """Producer of a task that writes files, like `modes/distributed_save/producer.py`.

    A file contains the list of its atoms.

    Args:
        steps: Steps of a producer for clients.
        rng: Decides when files are large enough.
    """

    def __init__(self, steps: Production, rng: random.Random) -> None:
        self._steps, self._rng = steps, rng
        self._elements: list[Element] = []
        self._files = self._done = self._delivered_end = self._num_reported = 0

    def send(self, grant: Grant | None) -> Need | float | ResultBatch:
        """Continue; return a need, seconds of work, or complete files."""
        while True:
            step = self._steps.send(grant)
            grant = None
            if not isinstance(step, ResultBatch):
                return step
            if step.error is not None:
                raise StopIteration(str(step.error))
            self._elements += step.buffers  # type: ignore[arg-type]
            self._done, self._delivered_end = step.done_to, max(step.delivered_end, step.done_to)
            if step.num_elements:
                is_due = self._is_complete and self._rng.random() < 0.2
            else:
                is_due = self._has_complete_files  # after a pause or at the end
            if is_due:
                return self._report()

    def defer(self) -> ResultBatch | None:
        """Return the complete files, if splits are deferred."""
        return self._report() if self._has_complete_files else None

    @property
    def _is_complete(self) -> bool:
        return self._done >= self._delivered_end

    @property
    def _has_complete_files(self) -> bool:
        return self._is_complete and (bool(self._elements) or self._done > self._num_reported)

    def _report(self) -> ResultBatch:
        files: tuple[SavedFile, ...] = ()
        if self._elements:
            atoms = json.dumps([atom for element in self._elements for atom in element])
            files = (SavedFile(self._files, len(self._elements), 1, atoms),)
            self._files += 1
        before, self._num_reported = self._num_reported, self._done
        self._elements = []
        return ResultBatch(
            first_element=0,
            files=files,
            done_from=before,
            done_to=self._done,
            delivered_end=self._delivered_end,
        )
