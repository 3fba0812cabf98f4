"""The public iterator of a dataset: yields single elements and has a state that can be saved.

Its position is known at any time from the chunk of the last element, and everything in memory can
be recomputed from the position. So an interruption (Ctrl-C) at any instruction loses no element and
needs no special handling.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, cast

from headrace.data.element_type import T_co
from headrace.data.iterator_cleanup import close_at_exit, close_or_detach, detach_in_forked_children
from headrace.data.iterator_stats import IteratorStats, summarize
from headrace.data.optional import Optional
from headrace.data.saved_state import (
    POSITION_KINDS,
    VERSION,
    HeldPositions,
    IteratorPosition,
    check_state,
    check_state_format,
    service_steps,
)
from headrace.element.chunk import States
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, OutOfRangeError
from headrace.execution.build import Instrument, build_both_stages, build_iterator, draw_seed
from headrace.execution.context import PlanIteration
from headrace.execution.delivered_elements import UNORDERED_STATE_MESSAGE
from headrace.execution.error_counter import ErrorCounter
from headrace.execution.input_buffer import ChunkSizer
from headrace.execution.iterator import ElementIterator, LazyRows, State
from headrace.execution.remaining_elements import build_remaining
from headrace.execution.statistics import StatisticsCollector
from headrace.plan.determinism import collect_fixed_seeds, explain_unsavable_state
from headrace.plan.elements import FromSource, ReadIndices
from headrace.plan.identity import Entry, identity
from headrace.plan.node import Node
from headrace.plan.source import Source
from headrace.plan.traverse import merged_options, walk
from headrace.rewrites.partition import PartitionMode
from headrace.threads import run_in_thread

__all__ = ["DatasetIterator"]


class DatasetIterator(Generic[T_co]):
    """Iterator over the elements of a dataset; `iter(dataset)` makes it.

    It is a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. It is not thread-safe.

    After an interruption (KeyboardInterrupt, or `sys.exit()` in a function of the pipeline) it
    continues with the element that was being computed.

    >>> with iter(hr.Dataset.range(5)) as iterator:
    ...     _ = next(iterator)
    ...     state = iterator.get_state()
    >>> iterator = iter(hr.Dataset.range(5))
    >>> iterator.set_state(state)
    >>> [int(x) for x in iterator]
    [1, 2, 3, 4]

    Args:
        plan: The plan as written.
        epoch: Number of the iteration over the dataset; if a shared job has already used it,
            the next free number is taken.
        element_spec: Function that returns the spec of the elements.
        for_training: Whether to raise FailedPreconditionError, instead of ending without an
            element, if the job that it reads from a data service is exhausted.
        statistics: Measures this iterator, for `stats`.
    """

    def __init__(
        self,
        plan: Node,
        epoch: int = 0,
        element_spec: Callable[[], Spec] | None = None,
        *,
        for_training: bool = False,
        statistics: StatisticsCollector | None = None,
    ) -> None:
        self._plan = plan
        self._statistics = statistics
        #: Whether an exhausted job of a data service is an error.
        self._for_training = for_training
        self._iteration = PlanIteration(plan, epoch)
        seed = merged_options(plan).seed
        self._seed = draw_seed() if seed is None else seed
        #: Seeds of shuffles that have the same order in each epoch.
        self._fixed_seeds = collect_fixed_seeds(plan)
        self._element_spec = element_spec
        self._identity: list[Entry] | None = None
        #: The plan's running iterator in a list, for the finalizer; [] before the first read.
        self._running: list[ElementIterator] = []
        #: Errors about missing elements, raised after the last element.
        self._missing_errors: list[Exception] = []
        sources = [node.source for node in walk(plan) if isinstance(node, FromSource | ReadIndices)]
        self._replay_buffers = tuple(
            source.replay_buffers for source in sources if source.replay_buffers is not None
        )
        #: Elements that `ignore_errors` has dropped.
        self._ignored_errors = ErrorCounter()
        #: Why states cannot be saved; "" if they can.
        self._restore_obstacle = next((why for s in sources if (why := s.restore_obstacle)), "")
        self._restore_obstacle = self._restore_obstacle or explain_unsavable_state(plan)
        #: How the plan is partitioned if it resumes from a position in splits, else None.
        self._partition_mode: PartitionMode | None = None
        #: Whether it reads the elements that an unordered reading did not deliver.
        self._resumes_unordered = False
        #: The source that runs the plan remotely, if the plan consists only of it.
        self._remote_source = _find_remote_source(plan)
        #: Number of steps up to each `distribute`, if steps in this process follow it.
        self._service_steps = [] if self._remote_source else service_steps(plan)
        self._finalizer = weakref.finalize(self, close_or_detach(_close_abandoned), self._running)
        close_at_exit(self, self._finalizer)
        self._seek(None)
        detach_in_forked_children(self, DatasetIterator._detach_after_fork)

    def _seek(self, state: State) -> None:
        """Set the position to `state`. The next read continues there."""
        for replay_buffer in self._replay_buffers:
            replay_buffer.register_iterator(self)
        self._states: States = lambda index: state
        self._offset = 0
        self._is_at_beginning = state is None
        self._held_positions = HeldPositions()
        self._chunk_sizer = ChunkSizer()
        #: Next elements, after which the running iterator continues. None if the running iterator
        #: is not at the position, such as during a read.
        self._buffered: Iterator[T_co] | None = None
        self._has_ended = False

    def _detach_after_fork(self) -> list[ElementIterator]:
        """Detach from the running iterator in a forked child, which rebuilds it at the position."""
        running = list(self._running)
        self._running.clear()
        states, offset, has_ended = self._states, self._offset, self._has_ended
        is_at_beginning = self._is_at_beginning
        self._seek(None)
        self._states, self._offset, self._has_ended = states, offset, has_ended
        self._is_at_beginning = is_at_beginning
        return running

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        rows = self._buffered
        if rows is not None:
            # The position stays unchanged during the read, so an interruption returns to it.
            self._buffered = None
            try:
                for row in rows:
                    # No call or loop until the return: Python handles signals only there.
                    self._offset += 1
                    if self._running:  # else this is a forked child, which builds its own iterator
                        self._buffered = rows
                    return row
            except Exception as error:
                self._set_position_after_error(error)
                raise
            if self._replay_buffers:
                self._release_replayed()
            if not self._running:
                self._restart()
        elif self._has_ended:
            self._raise_missing()
            raise StopIteration
        else:
            self._restart()
        try:
            found = self._read_next()
        except Exception as error:
            self._set_position_after_error(error)
            raise
        if found is None:
            self._raise_missing()
            if self._for_training:
                self.check_job_not_exhausted()
            raise StopIteration
        row, rows, self._states = found
        self._offset = 1
        if self._running:
            self._buffered = rows
        return row

    def _read_next(self) -> tuple[T_co, Iterator[T_co], States] | None:
        """Return the next element, those after it, and their states; None at the end."""
        iterator = self._running[-1]
        while True:
            found_rows = (
                iterator.lazy_rows() if iterator.has_lazy_rows else self._next_chunk(iterator)
            )
            if found_rows is None:
                break
            rows, states = found_rows
            for row in rows:
                self._is_at_beginning = False
                return row, rows, states
        iterator.close()
        self._has_ended = True
        losses = [replay_buffer.take_loss_error() for replay_buffer in self._replay_buffers]
        self._missing_errors = [loss for loss in losses if loss is not None]
        for replay_buffer in self._replay_buffers:
            replay_buffer.unregister_iterator(self)
        return None

    def check_job_not_exhausted(self) -> None:
        """Raise an error if the dataset ended without an element because its job is exhausted.

        >>> iterator = iter(hr.Dataset.range(0))
        >>> iterator.check_job_not_exhausted()  # it reads no job of a data service

        Raises:
            FailedPreconditionError: If the job is exhausted; the message names it.
        """
        if not self._is_at_beginning:
            return
        for node in walk(self._plan):
            message = (
                node.source.explain_exhausted(self.epoch) if isinstance(node, FromSource) else ""
            )
            if message:
                raise FailedPreconditionError(message)

    def _raise_missing(self) -> None:
        """Raise errors about missing elements, each once."""
        if self._missing_errors:
            raise self._missing_errors.pop(0)

    def _next_chunk(self, iterator: ElementIterator) -> LazyRows | None:
        if iterator.can_read_ahead:
            chunk = self._chunk_sizer.next_chunk(iterator)
        else:
            chunk = iterator.next_chunk(iterator.preferred_limit)
        return None if chunk is None else (iter(chunk.rows()), chunk.states)

    def _set_position_after_error(self, error: Exception) -> None:
        """Set the position to the one after an error that is being raised."""
        _raise_interruption(error)
        if not self._running:  # a forked child computes that element again
            return
        state = self._running[-1].get_state()
        self._states, self._offset, self._buffered = lambda index: state, 0, iter(())

    def _restart(self) -> None:
        """Build the running iterator at the position."""
        state = self._states(self._offset)
        if self._running:
            for replay_buffer in self._replay_buffers:
                replay_buffer.hold_readers(self)
        _close_quietly(self._running)  # its position is unknown
        iterator = self._build_measured()
        self._running.append(iterator)
        if state is not None:
            iterator.set_state(state)
        self._states, self._offset = lambda index: state, 0

    def _build_measured(self) -> ElementIterator:
        statistics = self._statistics
        if statistics is None:
            return self._build(None)
        statistics.start_build()
        return statistics.finish_build(self._build(statistics.instrument))

    def _build(self, instrument: Instrument | None) -> ElementIterator:
        epochs = (self.epoch,)
        if self._resumes_unordered:
            return build_remaining(
                self._plan,
                seed=self._seed,
                step_seeds=self._fixed_seeds,
                epochs=epochs,
                instrument=instrument,
            )
        if self._partition_mode:
            return build_both_stages(
                self._plan,
                self._partition_mode,
                seed=self._seed,
                step_seeds=self._fixed_seeds,
                epochs=epochs,
                instrument=instrument,
            )
        self._ignored_errors = ErrorCounter()  # a state of the new iterator sets it
        return build_iterator(
            self._plan,
            seed=self._seed,
            step_seeds=self._fixed_seeds,
            epochs=epochs,
            iteration=self._iteration,
            ignored_errors=self._ignored_errors,
            instrument=instrument,
        )

    def _release_replayed(self) -> None:
        """Release elements that were buffered to return to this position or an earlier one."""
        for replay_buffer in self._replay_buffers:
            replay_buffer.release_readers(self)
            if replay_buffer.is_full:
                replay_buffer.discard_before(
                    (
                        self._held_positions.oldest()
                        or IteratorPosition(self._states, self._offset)
                    ).state
                )

    def get_next(self) -> T_co:
        """Return the next element.

        >>> iterator = iter(hr.Dataset.range(1))
        >>> iterator.get_next()
        np.int64(0)
        >>> iterator.get_next()
        Traceback (most recent call last):
        headrace.errors.OutOfRangeError: the dataset has no more elements

        Raises:
            OutOfRangeError: If there is none; the error is a StopIteration, too.
        """
        try:
            return next(self)
        except OutOfRangeError:
            raise
        except StopIteration:
            raise OutOfRangeError("the dataset has no more elements") from None

    def get_next_as_optional(self) -> Optional[T_co]:
        """Return the next element, or an `Optional` without a value at the end.

        >>> iterator = iter(hr.Dataset.range(1))
        >>> iterator.get_next_as_optional().has_value()
        True
        >>> iterator.get_next_as_optional().has_value()
        False
        """
        for element in self:
            return Optional(element)
        return Optional()

    @property
    def epoch(self) -> int:
        """Number of the iteration over the dataset, or over the shared job that it reads.

        >>> dataset = hr.Dataset.range(1)
        >>> iter(dataset).epoch, iter(dataset).epoch
        (0, 1)
        """
        return self._iteration.number

    @property
    def num_ignored_errors(self) -> int:
        """Number of elements that `ignore_errors` has dropped so far, including those read ahead.

        Elements dropped on workers of a data service are not included. After `set_state` the
        number is, with the first read, that of the restored epoch.

        >>> iterator = iter(hr.Dataset.range(4).map(lambda x: 1 // int(x)).ignore_errors())
        >>> int(next(iterator)), iterator.num_ignored_errors
        (1, 1)
        """
        return self._ignored_errors.count

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements.

        >>> iter(hr.Dataset.range(3)).element_spec
        ArraySpec(shape=(), dtype=int64)
        """
        if self._element_spec is None:
            raise FailedPreconditionError("this iterator was created without an element spec")
        return self._element_spec()

    def get_state(self) -> dict[str, Any]:
        """Return the iterator state: a JSON value of a few hundred bytes.

        `set_state` on an iterator of the same dataset, in this or another process, continues with
        the same elements.

        >>> dataset = hr.Dataset.range(5).shuffle(5)
        >>> iterator = iter(dataset)
        >>> _ = next(iterator)
        >>> state, rest = iterator.get_state(), list(iterator)
        >>> other = iter(dataset)
        >>> other.set_state(state)
        >>> list(other) == rest
        True

        Raises:
            FailedPreconditionError: If no iterator could resume from it, such as for some datasets
                that read a data service.
        """
        return self.state_at(self.get_position())

    def get_position(self) -> IteratorPosition:
        """Return the position of the next element, which `state_at` converts to a state.

        >>> iterator = iter(hr.Dataset.range(5))
        >>> positions = [iterator.get_position() for _ in iterator]
        >>> iterator.set_state(iterator.state_at(positions[2]))
        >>> [int(x) for x in iterator]
        [3, 4]
        """
        if not self._offset and not self._restore_obstacle and self._states(0) is None:
            # The start has a state, too: it records what a cache contains now.
            self._restart()
            state = self._running[-1].get_state()
            self._states, self._buffered = lambda index: state, iter(())
        position = IteratorPosition(self._states, self._offset)
        if self._replay_buffers:
            self._held_positions.add(position)
        return position

    def state_at(self, position: IteratorPosition) -> dict[str, Any]:
        """Return what `get_state` would have returned at `position`.

        >>> iterator = iter(hr.Dataset.range(5))
        >>> position = iterator.get_position()
        >>> state = iterator.get_state()
        >>> _ = next(iterator)
        >>> iterator.state_at(position) == state
        True

        Raises:
            FailedPreconditionError: As for `get_state`.
        """
        self._check_has_states()
        if self._identity is None:
            self._identity = identity(self._plan)
        stream_state = position.state
        for replay_buffer in self._replay_buffers:
            stream_state = replay_buffer.export_state(stream_state)
        seed, saved_position = self._position_to_json(stream_state)
        state = {
            "version": VERSION,
            "plan": self._identity,
            "seed": seed,
            "epoch": self.epoch,
            "position": saved_position,
        }
        if self._fixed_seeds:
            state["fixed_seeds"] = list(self._fixed_seeds)
        return state

    def _position_to_json(self, state: State) -> tuple[int, dict[str, Any]]:
        """Return the seed and the position in a form that every reader of this dataset accepts."""
        if self._partition_mode:
            return self._seed, {"splits": state, "partition_mode": self._partition_mode}
        if self._resumes_unordered:
            return self._seed, {"positions": state}
        if self._service_steps:
            return self._seed, {"stream": state, "service_steps": self._service_steps}
        if self._remote_source is None:
            return self._seed, {"stream": state}
        # If nothing was read yet, the position is the start, whichever process reads.
        position, _ = state.get("hint", (None, 0))
        if position is None:
            return self._seed, {"stream": None}
        position_json = dict(position)
        position_json.pop("iteration", None)  # recorded in the state itself
        return position_json.pop("seed"), position_json

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the position of `state`.

        The next read starts there. Errors of elements that must be read again on the way are not
        raised again.

        >>> iterator = iter(hr.Dataset.range(3))
        >>> state = iterator.get_state()
        >>> _ = list(iterator)
        >>> iterator.set_state(state)
        >>> [int(x) for x in iterator]
        [0, 1, 2]

        Raises:
            FailedPreconditionError: If the state is of another dataset or version (the message
                names the first step that differs), or if this iterator does not support states.
        """
        check_state_format(state)
        self._check_has_states()
        check_state(state, self._plan, self._service_steps)
        fixed = state.get("fixed_seeds", ())
        if not fixed and merged_options(self._plan).seed is not None:
            fixed = collect_fixed_seeds(self._plan)  # derived from the options
        if len(fixed) != len(self._fixed_seeds):
            raise FailedPreconditionError(
                "the state lacks 'fixed_seeds', the seeds of steps that use the same order in each "
                "epoch: restore an unmodified state of `get_state`, or start the epoch again"
            )
        self.close()
        self._seed = state["seed"]
        self._iteration.resume_at(state["epoch"])
        self._fixed_seeds = list(fixed)
        position = state["position"]
        if self._remote_source is not None:
            self._seek(self._remote_state(position))
            return
        self._partition_mode = (
            cast(PartitionMode, position["partition_mode"]) if "splits" in position else None
        )
        self._resumes_unordered = "positions" in position
        self._seek(next(position[name] for name in POSITION_KINDS if name in position))

    def _remote_state(self, saved_position: dict[str, Any]) -> State:
        """Return the state of the remote source for a position from any kind of reader."""
        source = self._remote_source
        assert source is not None
        inner_state = next(
            saved_position[name] for name in POSITION_KINDS if name in saved_position
        )
        if inner_state is None:
            return None
        if "positions" in saved_position:
            if source.has_order:
                raise FailedPreconditionError(UNORDERED_STATE_MESSAGE)
            position: dict[str, Any] = {"positions": inner_state, "seed": self._seed}
        else:
            mode = saved_position.get("partition_mode") or source.ordered_partition_mode
            reason = source.explain_unusable_position(
                mode, is_single_process="stream" in saved_position
            )
            if reason:
                raise FailedPreconditionError(reason)
            position = {"splits": inner_state, "partition_mode": mode, "seed": self._seed}
            if "raised" in saved_position:  # by an ordered consumer, for the next round
                position["raised"] = saved_position["raised"]
        new_iterator = build_iterator(self._plan, seed=self._seed)
        initial_state: dict[str, Any] = new_iterator.get_state()
        new_iterator.close()
        return {**initial_state, "ordinal": 1, "hint": [position, 0]}

    def _check_has_states(self) -> None:
        # Checked before a trainer saves a state, not only when it is restored.
        if self._restore_obstacle:
            raise FailedPreconditionError(
                f"this iterator cannot save or restore states: {self._restore_obstacle}"
            )

    def stats(self) -> IteratorStats:
        """Return where the time went so far, by step, and what limits the speed.

        Requires `Dataset.iterate(stats=True)`. Printed, the statistics are a table; `to_dict()`
        returns them as a JSON value.

        >>> iterator = hr.Dataset.range(100).map(lambda x: x + 1).iterate(stats=True)
        >>> _ = list(iterator)
        >>> iterator.stats().steps[0].elements
        100

        Raises:
            FailedPreconditionError: If the iterator collects no statistics.
        """
        if self._statistics is None:
            raise FailedPreconditionError(
                "this iterator collects no statistics; create it with "
                "dataset.iterate(stats=True) instead of iter(dataset)"
            )
        return summarize(self._statistics.measurements())

    def __repr__(self) -> str:
        status = "ended" if self._has_ended else "running" if self._running else "not started"
        step = self._plan.kind or type(self._plan).__name__
        return f"<{type(self).__name__} of {step}, {status}>"

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files, and end the iterator. Idempotent.

        >>> iterator = iter(hr.Dataset.range(1000).prefetch(10))
        >>> _ = next(iterator)
        >>> iterator.close()
        """
        if self._running and not self._has_ended:
            for replay_buffer in self._replay_buffers:
                replay_buffer.mark_end(self._states(self._offset))
        self._has_ended = True
        self._buffered = None
        self._missing_errors.clear()
        for replay_buffer in self._replay_buffers:
            replay_buffer.unregister_iterator(self)
        while self._running:
            self._running[-1].close()
            self._running.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _find_remote_source(plan: Node) -> Source | None:
    """Return the source that runs a plan remotely, if the plan consists only of it."""
    while plan.is_transparent and len(plan.inputs) == 1:
        (plan,) = plan.inputs
    return (
        plan.source if isinstance(plan, FromSource) and plan.source.has_ordered_partition else None
    )


def _close_quietly(running: list[ElementIterator]) -> None:
    """Close the running iterator, and ignore errors."""
    for iterator in running:
        with contextlib.suppress(Exception):
            iterator.close()
    running.clear()


def _close_abandoned(running: list[ElementIterator]) -> None:
    """Close the running iterator of an abandoned `DatasetIterator`, or at interpreter exit."""
    if running:
        run_in_thread(functools.partial(_close_quietly, list(running)))
        running.clear()


def _raise_interruption(error: Exception) -> None:
    """Raise the interruption of a wait for a thread, if only its consequence was raised.

    A `Condition` that is interrupted before it has reacquired its lock raises a RuntimeError when
    the lock is released. Errors of user functions are never bare RuntimeErrors.
    """
    cause = error.__context__
    if type(error) is RuntimeError and cause is not None and not isinstance(cause, Exception):
        raise cause
