"""Iterator of a `map` on several threads, with results in order or as they complete.

Thread safety: `ParallelCalls` contains everything shared with the threads, and describes its rules;
only the consumer uses the record of delivered elements, and thus the state.
"""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.structure import Element
from headrace.execution.context import Context
from headrace.execution.element_ids import attach_element_position
from headrace.execution.element_numbers import IdColumn
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.parallel_calls import DELIVERED, PENDING, FailedCall, ParallelCalls
from headrace.execution.step_iterator import mask_to_runs, runs_to_mask
from headrace.execution.thread_tuning import ThreadTuner
from headrace.execution.threads import WaitWarning
from headrace.plan.elementwise import Map
from headrace.plan.node import AUTOTUNE
from headrace.plan.user_function import UserFunction, step_name

__all__ = ["ParallelMapIterator"]


class ParallelMapIterator(ElementIterator):
    """Applies a function to elements on several threads.

    In ordered mode its state is its input's. In unordered mode its state is a position before all
    undelivered elements, and the set of delivered elements after it.
    """

    def __init__(self, node: Map, context: Context, call: UserFunction | None = None) -> None:
        assert node.num_parallel_calls is not None
        self._node = node
        self._context = context
        self._step = step_name(node)
        self._function = call or UserFunction(node.fn, self._step, context.contain_exits)
        self._threads = node.num_parallel_calls
        self._tuner = (
            ThreadTuner(self._step, context.parallelism)
            if node.num_parallel_calls == AUTOTUNE
            else None
        )
        self._is_ordered = id(node) not in context.unordered_steps
        self._input = make_iterator(node.input, context)
        self._calls: ParallelCalls | None = None
        self._reset(0)

    can_read_ahead = False

    @property
    def threads(self) -> int:
        """Number of threads."""
        return self._threads if self._tuner is None else self._tuner.threads

    @property
    def preferred_limit(self) -> int:
        # Most read-ahead elements are left to the threads, so that they never wait for the
        # consumer.
        return 1 if self._calls is None else self._calls.read_size

    def _reset(self, delivered_mask: int) -> None:
        self._has_ended = False
        self._delivered_at_restore = delivered_mask
        #: Ordered: state before the next element, once there are threads.
        self._position: tuple[States, int] | None = None
        #: Unordered: number of the oldest undelivered element.
        self._oldest_undelivered = 0
        #: Unordered: bit i: element `_oldest_undelivered` + i was delivered.
        self._delivered_mask = delivered_mask

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._has_ended:
            return None
        calls = self._calls
        if calls is None:
            calls = self._calls = ParallelCalls(
                self._input,
                self._function,
                self.threads,
                self._delivered_at_restore,
                is_ordered=self._is_ordered,
                owner=self,
                tuner=self._tuner,
            )
            self._position = calls.end_position
            calls.start()
        take = self._take_in_order if self._is_ordered else self._take_unordered
        with calls.reader_thread.lock:
            wait: WaitWarning | None = None
            while True:
                taken = take(calls, limit)
                if taken is not None:
                    break
                if calls.is_stopped:  # closed by another thread
                    return None
                if not calls.batches and (calls.has_ended or not calls.reader_thread.is_reading):
                    self._has_ended = True
                    self._position = calls.end_position
                    return None
                # Announce the wait, then check again: a thread that finishes in between sees it.
                if calls.is_awaited:
                    wait = wait or WaitWarning(self._step)
                    wait.wait_with_backoff(calls.ready)
                calls.await_results(limit)
            calls.is_awaited = False
        if isinstance(taken, FailedCall):
            raise taken.error
        return taken

    def _take_in_order(self, calls: ParallelCalls, limit: int) -> Chunk | FailedCall | None:
        if not calls.batches:
            return None
        batch = calls.batches[0]
        results, start = batch.results, batch.num_taken
        first = results[start]
        if first is PENDING:
            return None
        stop, max_stop = start + 1, min(start + limit, len(results))
        chunk: Chunk | None = None
        if type(first) is not FailedCall:
            while (
                stop < max_stop
                and results[stop] is not PENDING
                and type(results[stop]) is not FailedCall
            ):
                stop += 1
            states, metadata = batch.states, batch.metadata
            chunk = Chunk.of_rows(
                results[start:stop],
                lambda index: states(start + index),
                None if metadata is None else metadata[start:stop],
            )
        results[start:stop] = [DELIVERED] * (stop - start)
        batch.num_taken = stop
        if type(first) is FailedCall:
            attach_element_position(first.error, batch.metadata, start)
        self._position = batch.states, stop
        if stop == len(results):
            calls.batches.popleft()
        calls.record_delivered(chunk, stop - start)
        return first if chunk is None else chunk

    def _take_unordered(self, calls: ParallelCalls, limit: int) -> Chunk | FailedCall | None:
        rows: list[Element] = []
        numbers: list[int] = []
        columns: list[IdColumn] = []
        failure: FailedCall | None = None
        while calls.completed and len(rows) < limit:
            batch, index = calls.completed[0]
            result = batch.results[index]
            if type(result) is FailedCall:
                if rows:
                    break
                failure = result
            calls.completed.popleft()
            batch.results[index] = DELIVERED
            batch.num_taken += 1
            numbers.append(batch.first + index)
            if failure is not None:
                break
            rows.append(result)
            if batch.metadata is not None:
                columns.append(batch.metadata[index : index + 1])
        if not numbers:
            self._advance(calls)
            return None
        chunk: Chunk | None = None
        if rows:
            metadata = np.concatenate(columns) if columns else None
            chunk = Chunk.of_rows(rows, self._unordered_states(calls, numbers), metadata)
        for number in numbers:
            self._delivered_mask |= 1 << number - self._oldest_undelivered
        self._advance(calls)
        calls.record_delivered(chunk, len(numbers))
        return failure if chunk is None else chunk

    def _advance(self, calls: ParallelCalls) -> None:
        """Advance over delivered elements, up to the first undelivered one."""
        num_delivered = (~self._delivered_mask & (self._delivered_mask + 1)).bit_length() - 1
        # Positions of elements that were not read yet are unknown.
        num_delivered = min(num_delivered, calls.num_read - self._oldest_undelivered)
        self._delivered_mask >>= num_delivered
        self._oldest_undelivered += num_delivered
        while calls.batches and calls.batches[0].num_taken == len(calls.batches[0].results):
            calls.batches.popleft()

    # --- state ----------------------------------------------------------------------------------

    def _unordered_states(self, calls: ParallelCalls, numbers: list[int]) -> States:
        """Return the states before each of these elements, which are delivered next."""
        states, index = self._oldest_position(calls)
        delivered, oldest = self._delivered_mask, self._oldest_undelivered

        def state_at(count: int) -> State:
            mask = delivered
            for number in numbers[:count]:
                mask |= 1 << number - oldest
            return {"delivered": mask_to_runs(mask), "input": states(index)}

        return state_at

    def _oldest_position(self, calls: ParallelCalls) -> tuple[States, int]:
        for batch in calls.batches:
            if self._oldest_undelivered < batch.first + len(batch.results):
                return batch.states, max(0, self._oldest_undelivered - batch.first)
        return calls.end_position

    def get_state(self) -> State:
        calls = self._calls
        if self._is_ordered:
            if self._position is None:
                return self._input.get_state()
            states, index = self._position
            return states(index)
        if calls is None:
            return {
                "delivered": mask_to_runs(self._delivered_mask),
                "input": self._input.get_state(),
            }
        with calls.reader_thread.lock:
            states, index = self._oldest_position(calls)
        return {"delivered": mask_to_runs(self._delivered_mask), "input": states(index)}

    def set_state(self, state: State) -> None:
        self._stop()
        if self._is_ordered:
            self._reset(0)
            self._input.set_state(state)
        else:
            self._reset(runs_to_mask(state["delivered"]))
            self._input.set_state(state["input"])

    def skip(self, count: int) -> int:
        if not self._is_ordered:
            return super().skip(count)
        if self._calls is not None:
            self.set_state(self.get_state())
        return self._input.skip(count)

    def _stop(self) -> None:
        calls = self._calls
        if calls is not None and not calls.stop():
            calls.reader_thread.abandon(step_name(self._node.input))
            self._input = make_iterator(self._node.input, self._context)
        self._calls = None  # last: after an interruption before this line, it is stopped again

    def close(self) -> None:
        self._stop()
        self._reset(0)
        self._has_ended = True
        self._input.close()
