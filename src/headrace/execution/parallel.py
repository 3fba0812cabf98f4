"""The iterator of a `map` on several threads: results in order, or as they come.

Who may touch what. What is shared with the threads is in `Work` and has its rules there; what was
delivered, and so the state, is the consumer's alone.
"""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.structure import Element
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.origins import blame_element
from headrace.execution.places import Places
from headrace.execution.stage import mask_of, runs_of
from headrace.execution.threads import LongWait
from headrace.execution.workers import PENDING, TAKEN, Failure, Work
from headrace.plan.elementwise import Map
from headrace.plan.user_function import UserFunction, step_name

__all__ = ["ParallelMapIterator"]


class ParallelMapIterator(ElementIterator):
    """Applies a function to elements on several threads.

    In its input's order it has no state of its own. Where the order is free, its state is a place
    before all elements that were not delivered, and which of those after it were.
    """

    def __init__(self, node: Map, context: Context) -> None:
        assert node.num_parallel_calls is not None
        self._node = node
        self._context = context
        self._step = step_name(node)
        self._function = UserFunction(node.fn, self._step, context.contain_exits)
        self._threads = context.threads(node.num_parallel_calls)
        self._is_ordered = id(node) not in context.free
        self._input = make_iterator(node.input, context)
        self._work: Work | None = None
        self._begin(0)

    reads_ahead_freely = False

    @property
    def at_hand(self) -> int:
        # Most of what is read ahead stays for the threads: they are not to wait for the consumer.
        return 1 if self._work is None else self._work.handful

    def _begin(self, already: int) -> None:
        self._has_ended = False
        self._already = already
        #: In order: the place of the next element, once there are threads.
        self._place: tuple[States, int] | None = None
        #: Free: number of the oldest element that was not delivered, and of those from it on ...
        self._oldest = 0
        self._gone = already  # ... bit i: number `_oldest` + i was delivered

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._has_ended:
            return None
        work = self._work
        if work is None:
            work = self._work = Work(
                self._input,
                self._function,
                self._threads,
                self._already,
                is_ordered=self._is_ordered,
            )
            self._place = work.end
            work.start()
        take = self._take_in_order if self._is_ordered else self._take_as_ready
        with work.feeder.lock:
            wait: LongWait | None = None
            while True:
                taken = take(work, limit)
                if taken is not None:
                    break
                if work.is_stopped:  # closed by another thread
                    return None
                if not work.batches and (work.has_ended or not work.feeder.is_reading):
                    self._has_ended = True
                    self._place = work.end
                    return None
                # Said first, then looked once more: a thread that finishes in between sees it.
                if work.is_awaited:
                    wait = wait or LongWait(self._step)
                    wait.wait_and_look(work.ready)
                work.expect(limit)
            work.is_awaited = False
        if isinstance(taken, Failure):
            raise taken.error
        return taken

    def _take_in_order(self, work: Work, limit: int) -> Chunk | Failure | None:
        if not work.batches:
            return None
        batch = work.batches[0]
        results, start = batch.results, batch.taken
        first = results[start]
        if first is PENDING:
            return None
        stop, most = start + 1, min(start + limit, len(results))
        chunk: Chunk | None = None
        if type(first) is not Failure:
            while (
                stop < most and results[stop] is not PENDING and type(results[stop]) is not Failure
            ):
                stop += 1
            states, places = batch.states, batch.places
            chunk = Chunk.of_rows(
                results[start:stop],
                lambda index: states(start + index),
                None if places is None else places[start:stop],
            )
        results[start:stop] = [TAKEN] * (stop - start)
        batch.taken = stop
        if type(first) is Failure:
            blame_element(first.error, batch.places, start)
        self._place = batch.states, stop
        if stop == len(results):
            work.batches.popleft()
        work.took(chunk, stop - start)
        return first if chunk is None else chunk

    def _take_as_ready(self, work: Work, limit: int) -> Chunk | Failure | None:
        rows: list[Element] = []
        numbers: list[int] = []
        places: list[Places] = []
        failure: Failure | None = None
        while work.done and len(rows) < limit:
            batch, index = work.done[0]
            result = batch.results[index]
            if type(result) is Failure:
                if rows:
                    break
                failure = result
            work.done.popleft()
            batch.results[index] = TAKEN
            batch.taken += 1
            numbers.append(batch.first + index)
            if failure is not None:
                break
            rows.append(result)
            if batch.places is not None:
                places.append(batch.places[index : index + 1])
        if not numbers:
            self._advance(work)
            return None
        chunk: Chunk | None = None
        if rows:
            joined = np.concatenate(places) if places else None
            chunk = Chunk.of_rows(rows, self._free_states(work, numbers), joined)
        for number in numbers:
            self._gone |= 1 << number - self._oldest
        self._advance(work)
        work.took(chunk, len(numbers))
        return failure if chunk is None else chunk

    def _advance(self, work: Work) -> None:
        """Move on over what was delivered, as far as nothing is missing."""
        passed = (~self._gone & (self._gone + 1)).bit_length() - 1
        passed = min(passed, work.fed - self._oldest)  # no place is known after that
        self._gone >>= passed
        self._oldest += passed
        while work.batches and work.batches[0].taken == len(work.batches[0].results):
            work.batches.popleft()

    # --- state ----------------------------------------------------------------------------------

    def _free_states(self, work: Work, numbers: list[int]) -> States:
        """Return the states before each of these elements, which are delivered next."""
        states, index = self._oldest_place(work)
        gone, oldest = self._gone, self._oldest

        def state_at(count: int) -> State:
            mask = gone
            for number in numbers[:count]:
                mask |= 1 << number - oldest
            return {"done": runs_of(mask), "input": states(index)}

        return state_at

    def _oldest_place(self, work: Work) -> tuple[States, int]:
        for batch in work.batches:
            if self._oldest < batch.first + len(batch.results):
                return batch.states, max(0, self._oldest - batch.first)
        return work.end

    def get_state(self) -> State:
        work = self._work
        if self._is_ordered:
            if self._place is None:
                return self._input.get_state()
            states, index = self._place
            return states(index)
        if work is None:
            return {"done": runs_of(self._gone), "input": self._input.get_state()}
        with work.feeder.lock:
            states, index = self._oldest_place(work)
        return {"done": runs_of(self._gone), "input": states(index)}

    def set_state(self, state: State) -> None:
        self._stop()
        if self._is_ordered:
            self._begin(0)
            self._input.set_state(state)
        else:
            self._begin(mask_of(state["done"]))
            self._input.set_state(state["input"])

    def skip(self, count: int) -> int:
        if not self._is_ordered:
            return super().skip(count)
        if self._work is not None:
            self.set_state(self.get_state())
        return self._input.skip(count)

    def _stop(self) -> None:
        work = self._work
        if work is not None and not work.stop():
            work.feeder.leave(step_name(self._node.input))
            self._input = make_iterator(self._node.input, self._context)
        self._work = None  # at last: an interruption before this stops it once more

    def close(self) -> None:
        self._stop()
        self._begin(0)
        self._has_ended = True
        self._input.close()
