"""Parallel map: runs of elements handed to threads, results in order or as they come.

A thread is given a run of elements, not one: the hand-over costs some 50 microseconds, so a run is
as long as about `_TASK_SECONDS` of work. The state is the place of the oldest element that was
not delivered, and which elements behind it were.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.elementwise import Map

__all__ = ["ParallelMapIterator"]

_TASK_SECONDS = 0.01
_LONGEST_RUN = 1024
_RUNS_PER_THREAD = 2

RunRows = Callable[[Map, list[Any], int], tuple[list[Any], Exception | None]]


class _Task:
    """A run of elements that a thread works on, and what was delivered of it."""

    __slots__ = (
        "delivered",
        "error",
        "future",
        "has_failed",
        "ordinals",
        "place",
        "position",
        "results",
        "rows",
    )

    def __init__(
        self, place: State, position: int, ordinals: Sequence[int], rows: list[Any]
    ) -> None:
        self.place = place  # of the input, before the run
        self.position = position  # ordinal of the input's next element at that place
        self.ordinals = ordinals  # of each row
        self.rows = rows
        self.future: Future[float] | None = None
        self.results: list[Any] = []
        self.error: Exception | None = None
        self.has_failed = False  # and the error was raised
        self.delivered = 0

    @property
    def is_done(self) -> bool:
        """Whether the thread has finished with it."""
        return self.future is not None and self.future.done()

    @property
    def is_spent(self) -> bool:
        """Whether all that the run gave was delivered, its error included."""
        return self.is_done and self.delivered == len(self.results) and self.error is None

    @property
    def next_ordinal(self) -> int:
        """Ordinal of the first element that is still to be delivered; behind the last if none."""
        passed = self.delivered + self.has_failed
        return self.ordinals[passed] if passed < len(self.ordinals) else self.ordinals[-1] + 1


class ParallelMapIterator(ElementIterator):
    """Applies a function to elements on several threads."""

    def __init__(self, node: Map, context: Context, run_rows: RunRows) -> None:
        assert node.num_parallel_calls is not None
        self._node = node
        self._run_rows = run_rows
        self._threads = context.threads(node.num_parallel_calls)
        self._is_ordered = context.is_ordered(node.deterministic)
        self._intake = Intake(make_iterator(node.input, context.below(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._begin(0)

    def _begin(self, position: int) -> None:
        self._tasks: deque[_Task] = deque()
        self._position = position  # ordinal of the next element of the input
        self._run = 1
        self._input_error: Exception | None = None
        self._has_ended = False
        self._already: list[list[int]] = []  # ranges of ordinals delivered before a restore

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            self._submit(limit)
            task = self._next_done()
            if task is None:
                if self._input_error is not None:
                    error, self._input_error = self._input_error, None
                    raise error
                if self._has_ended:
                    return None
                continue
            if task.delivered < len(task.results):
                stop = min(task.delivered + limit, len(task.results))
                chunk = Chunk.of_rows(task.results[task.delivered : stop])
                task.delivered = stop
                self._retire()
                return chunk
            failure, task.error = task.error, None
            if failure is not None:
                task.has_failed = True
            self._retire()
            if failure is not None:
                raise failure

    # --- running ------------------------------------------------------------------------------

    def _submit(self, limit: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="headrace-map")
        while (
            len(self._tasks) < self._threads * _RUNS_PER_THREAD
            and not self._has_ended
            and self._input_error is None
        ):
            place, position = self._intake.get_state(), self._position
            try:
                chunk = self._intake.take(self._run, pull=min(limit, _LONGEST_RUN))
            except Exception as error:
                self._input_error = error
                return
            if chunk is None:
                self._has_ended = True
                return
            self._position += chunk.size
            ordinals: Sequence[int] = range(position, self._position)
            rows = chunk.rows()
            if self._already:
                ranges = (range(max(a, position), b) for a, b in self._already)
                done = {n for passed in ranges for n in passed}
                rows = [row for n, row in zip(ordinals, rows, strict=True) if n not in done]
                ordinals = [n for n in ordinals if n not in done]
                if not rows:
                    continue
            task = _Task(place, position, ordinals, rows)
            task.future = self._pool.submit(self._work, task)
            self._tasks.append(task)

    def _work(self, task: _Task) -> float:
        start = time.perf_counter()
        task.results, task.error = self._run_rows(self._node, task.rows, task.ordinals[0])
        return (time.perf_counter() - start) / max(1, len(task.results))

    def _next_done(self) -> _Task | None:
        if not self._tasks:
            return None
        if self._is_ordered:
            task = self._tasks[0]
        else:
            open_tasks = [t for t in self._tasks if not t.is_spent]
            done = [t for t in open_tasks if t.is_done]
            if not done:
                futures = [t.future for t in open_tasks if t.future is not None]
                wait(futures, return_when=FIRST_COMPLETED)
                done = [t for t in open_tasks if t.is_done]
            task = done[0]
        assert task.future is not None
        seconds = task.future.result()
        if task.delivered == 0 and task.results:
            self._adapt(seconds)
        if task.error is not None and task.delivered == len(task.results):
            self._resubmit_behind_error(task)
        return task

    def _adapt(self, seconds: float) -> None:
        wished = _TASK_SECONDS / max(seconds, 1e-9)
        # Up by a factor of two at most: one lucky element must not make a run of a thousand.
        self._run = int(max(1, min(wished, self._run * 2, _LONGEST_RUN)))

    def _resubmit_behind_error(self, task: _Task) -> None:
        """Send the elements behind a failed one on as a run of their own, in its place."""
        failed = len(task.results)
        if failed + 1 >= len(task.rows):
            return
        rest = _Task(
            task.place, task.position, task.ordinals[failed + 1 :], task.rows[failed + 1 :]
        )
        task.rows, task.ordinals = task.rows[: failed + 1], task.ordinals[: failed + 1]
        assert self._pool is not None
        rest.future = self._pool.submit(self._work, rest)
        self._tasks.insert(self._tasks.index(task) + 1, rest)

    def _retire(self) -> None:
        while self._tasks and self._tasks[0].is_spent:
            self._tasks.popleft()
        if self._already:
            position = self._tasks[0].position if self._tasks else self._position
            self._already = [r for r in self._already if r[1] > position]

    # --- state --------------------------------------------------------------------------------

    def get_state(self) -> State:
        if not self._tasks:
            position, place, done = self._position, self._intake.get_state(), []
        else:
            head = self._tasks[0]
            position, place = head.position, head.place
            done = [[position, head.next_ordinal]]
            done += [[task.ordinals[0], task.next_ordinal] for task in list(self._tasks)[1:]]
        done += [r for r in self._already if r[1] > position]
        return {"position": position, "input": place, "done": [r for r in done if r[0] < r[1]]}

    def set_state(self, state: State) -> None:
        self._drain()
        self._begin(state["position"])
        self._already = [list(r) for r in state["done"]]
        self._intake.set_state(state["input"])

    def _drain(self) -> None:
        for task in self._tasks:
            if task.future is not None:
                task.future.cancel()
        wait([t.future for t in self._tasks if t.future is not None and not t.future.cancelled()])

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._tasks.clear()
        self._has_ended = True
        self._intake.close()
