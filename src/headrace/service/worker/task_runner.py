"""A task runner: one thread that produces frames, and the requests that wait for them.

Rule 1. Frames leave in order, each to the request that has waited longest.
Rule 2. The first frame holds one element and each frame at most twice as many as the one before,
        so that the first element comes soon and a short dataset is shared fairly.
Rule 3. An element that fails is a frame of its own: an error, answered once; the task goes on. A
        plan that cannot be built, and one that fails `_MOST_FAILURES` times in a row with the same
        words, ends after its error.
Rule 4. The task is finished when nothing is left and its only client has used up what it was given
        (until then it is told to come again); a second client does not wait for the first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from headrace.element import wire
from headrace.element.chunk import Chunk, concatenate
from headrace.errors import (
    AbortedError,
    CancelledError,
    HeadraceError,
    UserFunctionError,
)
from headrace.execution.iterator import ElementIterator
from headrace.metrics import count_user_function_error
from headrace.service.messages import Elements, GetElements
from headrace.service.worker.delivery import Delivery
from headrace.transport.channel import Buffer, Request

__all__ = ["Frame", "TaskRunner"]

_log = logging.getLogger(__name__)

_FRAME_ELEMENTS = 1 << 16
_FRAME_BYTES = 1 << 20
_FRAME_SECONDS = 0.005
_BUFFERED_FRAMES = 3
_BUFFERED_BYTES = 64 << 20
_SILENCE_SECONDS = 1800.0
_MOST_FAILURES = 100
_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class Frame:
    """What answers one request: consecutive elements, encoded, or an error."""

    first: int
    count: int
    buffers: Sequence[Buffer] = ()
    size: int = 0
    """Bytes."""
    error: Exception | None = None

    def answer(self, request: Request) -> None:
        """Answer the request with this frame."""
        if self.error is not None:
            request.fail(self.error)
        else:
            message = Elements(first=self.first, count=self.count, end=False)
            request.reply(message, self.buffers)


class TaskRunner:
    """Produces one task's elements and hands them out.

    Args:
        task_id: The task.
        build: Makes the iterator, and pushes what is to be closed after it on the stack that it
            gets; called on the producing thread.
        finish: Tells the dispatcher that the task is finished; called on the producing thread.
        stopped: Set on close, for whoever makes the iterator wait.
    """

    def __init__(
        self,
        task_id: int,
        build: Callable[[ExitStack], ElementIterator],
        finish: Callable[[], None],
        stopped: threading.Event,
    ) -> None:
        self.task_id = task_id
        self._build = build
        self._finish = finish
        self._stopped = stopped
        self._changed = threading.Condition()
        self._ready: deque[Frame] = deque()
        self._ready_bytes = 0
        self._delivery: Delivery[Frame] = Delivery()
        #: Requests that wait for a frame, the longest waiting first.
        self._parked: dict[tuple[str, int], Request] = {}
        self._produced = 0
        #: Nothing will be added to `_ready`.
        self._exhausted = False
        #: The dispatcher was told; everyone gets the end.
        self._finished = False
        self._thread = threading.Thread(
            target=self._run, name=f"headrace-task-{task_id}", daemon=True
        )
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether all elements were handed out."""
        return self._finished

    def take(self, request: Request) -> None:
        """Answer a `GetElements` now or later. Does not wait."""
        message = request.message
        assert isinstance(message, GetElements)
        client, number = message.client_id, message.number
        with self._changed:
            self._delivery.hear(client, message.acknowledged, time.monotonic())
            given = self._delivery.find(client, number)
            over = self._delivery.is_over(client, number)
            repeated = None
            if given is None and not over and not self._stopped.is_set():
                # A repeated request takes the place of the one that lost its connection.
                repeated = self._parked.get((client, number))
                self._parked[client, number] = request
            answers = self._due_answers()
            self._changed.notify_all()
        if given is not None:
            given.answer(request)
        elif over:
            request.fail(AbortedError(f"request {number} was answered and acknowledged before"))
        elif self._stopped.is_set():
            request.fail(self._called_off())
        if repeated is not None:
            repeated.fail(AbortedError(f"request {number} was asked again"))
        _send(answers)

    def close(self, *, wait: bool = True) -> None:
        """Call the task off. May be called twice.

        Args:
            wait: Join the thread (for some seconds: a user's function cannot be interrupted).
        """
        self._stopped.set()
        with self._changed:
            parked, self._parked = list(self._parked.values()), {}
            self._ready.clear()
            self._changed.notify_all()
        for request in parked:
            request.fail(self._called_off())
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _called_off(self) -> Exception:
        return CancelledError(
            f"task {self.task_id} has been deleted: its iteration was released, because its "
            "clients closed it or were not heard of for too long; iterate over the dataset anew"
        )

    # --- under the lock -----------------------------------------------------------------------

    def _due_answers(self) -> list[tuple[Request, Frame | Elements]]:
        """Take the requests that can be answered out of the line, with their answers."""
        answers: list[tuple[Request, Frame | Elements]] = []
        while self._parked and self._ready:
            client, number = next(iter(self._parked))
            frame = self._ready.popleft()
            self._ready_bytes -= frame.size
            self._delivery.give(client, number, frame)
            answers.append((self._parked.pop((client, number)), frame))
        if self._exhausted and not self._ready and (self._finished or not self._may_finish()):
            # Nothing is left. Before the task is finished, `end` is False: come again when what
            # you were given is used up.
            nothing = Elements(first=self._produced, count=0, end=self._finished)
            answers.extend((request, nothing) for request in self._parked.values())
            self._parked.clear()
        return answers

    def _may_finish(self) -> bool:
        if not self._exhausted or self._ready:
            return False
        return self._delivery.clients_ever > 1 or not self._delivery.unacknowledged

    # --- the producing thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._produce()
            with self._changed:
                self._exhausted = True
                answers = self._due_answers()
            _send(answers)
            with self._changed:
                while not self._may_finish() and not self._stopped.is_set():
                    self._changed.wait()
            if self._stopped.is_set():
                return
            self._finish()
        except Exception:
            _log.exception("task %d ended by an error of its own", self.task_id)
        with self._changed:
            self._exhausted = self._finished = True
            answers = self._due_answers()
        _send(answers)

    def _produce(self) -> None:
        with ExitStack() as held:
            try:
                iterator = self._build(held)
            except Exception as error:
                self._put(Frame(first=0, count=0, error=_told(error)))
                return
            held.callback(iterator.close)
            self._produce_from(iterator)

    def _produce_from(self, iterator: ElementIterator) -> None:
        limit, failures, last_words = 1, 0, ""
        while self._wait_for_room():
            chunks: list[Chunk] = []
            error: Exception | None = None
            at_end = False
            count = size = 0
            since = time.perf_counter()
            while count < limit and size < _FRAME_BYTES:
                try:
                    chunk = iterator.next_chunk(limit - count)
                except Exception as raised:
                    error = raised
                    break
                if chunk is None:
                    at_end = True
                    break
                chunks.append(chunk)
                count += chunk.size
                size += wire.frame_bytes(chunk)
                if time.perf_counter() - since > _FRAME_SECONDS / 2:
                    break
            seconds = time.perf_counter() - since
            if chunks:
                self._put_chunks(chunks, count)
                failures = 0
            if self._stopped.is_set() or at_end:
                return
            if error is not None:
                told = _told(error)
                if isinstance(told, UserFunctionError):
                    count_user_function_error()
                failures = failures + 1 if str(told) == last_words else 1
                last_words = str(told)
                self._put(Frame(first=self._produced, count=0, error=told))
                if failures >= _MOST_FAILURES:
                    _log.warning(
                        "task %d ends: %d times in a row: %s", self.task_id, failures, last_words
                    )
                    return
            elif seconds > _FRAME_SECONDS:
                limit = max(1, limit // 2)
            elif count == limit and seconds < _FRAME_SECONDS / 2:
                affordable = max(1, _FRAME_BYTES * count // max(size, 1))
                limit = max(1, min(limit * 2, _FRAME_ELEMENTS, affordable))

    def _put_chunks(self, chunks: list[Chunk], count: int) -> None:
        first, self._produced = self._produced, self._produced + count
        try:
            buffers = wire.encode(concatenate(chunks))
        except HeadraceError as error:
            self._put(Frame(first=first, count=0, error=error))
            return
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._put(Frame(first=first, count=count, buffers=buffers, size=size))

    def _wait_for_room(self) -> bool:
        """Wait until another frame may be produced; False if the task was called off."""
        with self._changed:
            while not self._stopped.is_set() and (
                len(self._ready) >= _BUFFERED_FRAMES or self._ready_bytes >= _BUFFERED_BYTES
            ):
                self._changed.wait()
            self._delivery.forget_silent(time.monotonic(), _SILENCE_SECONDS)
        return not self._stopped.is_set()

    def _put(self, frame: Frame) -> None:
        with self._changed:
            self._ready.append(frame)
            self._ready_bytes += frame.size
            answers = self._due_answers()
        _send(answers)


def _send(answers: list[tuple[Request, Frame | Elements]]) -> None:
    for request, answer in answers:
        if isinstance(answer, Frame):
            answer.answer(request)
        else:
            request.reply(answer)


def _told(error: Exception) -> Exception:
    """Return the error as the client is to see it."""
    if isinstance(error, HeadraceError):
        return error
    return HeadraceError(f"{type(error).__name__}: {error}")
