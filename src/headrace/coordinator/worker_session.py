"""One session of a worker: its closures and the threads that run them.

The server's thread passes requests in and never blocks; each closure runs on one of `threads`
threads. The thread of an abandoned closure is replaced at once, and ends when the function returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.coordinator.closure import CANCELLED, Payload
from headrace.coordinator.closure_context import RunningClosure, SessionResources, current_closure
from headrace.coordinator.messages import (
    CancelClosure,
    CancelReply,
    FeedElements,
    FetchedResult,
    LoadFunction,
    RunClosure,
    RunReply,
    StartSession,
)
from headrace.coordinator.metrics import WorkerCounters
from headrace.coordinator.packing import (
    PACKED_NONE,
    LoadedFunction,
    LoadedFunctions,
    pack,
    translate_error,
    unpack,
)
from headrace.coordinator.worker_iterator import LeasedElementIterator
from headrace.coordinator.worker_queue import WorkerQueue, WorkerTask
from headrace.distribute.execution_context import variable_refusal
from headrace.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    NotFoundError,
    OutOfRangeError,
)
from headrace.parameter_server.pickling import ReplyPickler
from headrace.parameter_server.replica_state import AcknowledgedState
from headrace.parameter_server.write_context import (
    ClosureRun,
    WriteContext,
    wait_for_steps,
    write_as,
)
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import encode_error

__all__ = ["WorkerSession"]

_log = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 20
"""Minimum size of values that are kept until they are fetched."""
_MANY_ABANDONED = 32
_POLL_SECONDS = 1.0
_NO_WRITES_ALLOWED = (
    "functions that create per-worker datasets and values may read variables but not write them, "
    "since they run once on each worker, and again after a worker was lost; write in a scheduled "
    "function"
)


class WorkerSession:
    """Runs closures for one coordinator.

    Args:
        start_message: Request that started the session.
        counters: Counters of run closures.
        acknowledged: Returns the acknowledged states of replicated stores known here.
    """

    def __init__(
        self,
        start_message: StartSession,
        counters: WorkerCounters,
        acknowledged: Callable[[], tuple[AcknowledgedState, ...]] = tuple,
    ) -> None:
        self.start_message = start_message
        self._acknowledged = acknowledged
        self._counters = counters
        #: Acquired directly, which is faster than through the condition, if no thread is notified.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: WorkerQueue[Request] = WorkerQueue()
        self._functions = LoadedFunctions()
        self._resources = SessionResources()
        self._end_requests: list[Request] = []
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._num_abandoned = 0
        for _ in range(start_message.threads):
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(
            target=self._run_tasks,
            name=f"headrace-closures-{self.start_message.worker}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    # --- on the server's thread -----------------------------------------------------------------

    def await_end(self, request: Request) -> None:
        """Keep a request that is answered when the session ends."""
        self._end_requests.append(request)

    def load_function(self, message: LoadFunction, buffers: Sequence[Buffer]) -> None:
        """Store a function."""
        with self._changed:
            self._functions.put(message.digest, message.name, list(buffers))

    def run_closure(self, message: RunClosure, request: Request) -> None:
        """Queue a closure."""
        with self._changed:
            # Look up the function now: loading functions for later closures may evict it.
            loaded = self._functions.find(message.digest)
            if loaded is not None:
                if message.resource:
                    self._resources.reserve(message.resource)
                self._queue.add(message, list(request.buffers), request, loaded)
                self._changed.notify()
        if loaded is None:
            request.reply(RunReply(is_function_missing=True))

    def cancel_closure(self, message: CancelClosure) -> CancelReply:
        """Cancel a closure, and replace its thread if it is abandoned."""
        with self._changed:
            reply, pending_replies = self._queue.cancel(message)
            is_abandoned = reply.is_dropped and message.mode == "abandon"
            self._num_abandoned += is_abandoned
            self._counters.num_abandoned += is_abandoned
        for request, run_reply in pending_replies:
            request.reply(run_reply)
        if is_abandoned:
            self._replace_thread()
        return reply

    def feed_elements(self, message: FeedElements, request: Request) -> None:
        """Supply elements to a closure that waits for them."""
        with self._changed:
            task = self._queue.find_running(message.number)
            if task is not None and task.leased_elements is not None:
                task.request = request
                task.leased_elements.feed(
                    _split_payloads(message.elements, message.buffer_counts, request.buffers)
                )
                task.leased_elements.end_of_data = message.end_of_data
                self._changed.notify_all()
                return
        request.reply(RunReply(is_dropped=True))

    def _wait_for_elements(self, task: WorkerTask[Request], lease: LeasedElementIterator) -> None:
        """Request another element and wait for it; called on the thread of a function."""
        with self._changed:
            request, task.request = task.request, None
            num_before = lease.num_given
            if request is not None:
                request.reply(RunReply(num_wanted=1))
            while lease.num_given == num_before and not lease.end_of_data:
                if task.is_finished or self._is_closed:
                    raise CancelledError(CANCELLED)
                self._changed.wait(_POLL_SECONDS)

    def fetch_result(self, number: int) -> tuple[FetchedResult, Sequence[Buffer]]:
        """Return the value of an ended closure.

        Raises:
            NotFoundError: If there is none.
        """
        payload = self._queue.results.get(number)
        if payload is None:
            raise NotFoundError(f"no value of closure {number} is waiting to be fetched")
        return FetchedResult(value=payload.data), payload.buffers

    def drop_result(self, number: int) -> None:
        """Drop a value that the coordinator has received."""
        self._queue.results.pop(number, None)

    def release_resources(self, resources: tuple[int, ...]) -> None:
        """Release resources that are no longer used."""
        self._resources.release(resources)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of running closures and of closures waiting for a thread."""
        with self._changed:
            return len(self._queue.running), self._queue.num_waiting

    def close(self) -> None:
        """Stop starting closures; reject writes of running ones and ignore their outcome."""
        with self._changed:
            self._is_closed = True
            answers = self._queue.close()
            end_requests, self._end_requests = self._end_requests, []
            self._changed.notify_all()
        error = AbortedError(
            "this worker session has ended: the worker stopped, or started another session"
        )
        for request in end_requests:
            request.fail(error)
        for request, _ in answers:
            request.fail(error)
        self._resources.close()

    def join(self, seconds: float) -> None:
        """Wait for idle threads to end; threads of running functions are left alone."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _replace_thread(self) -> None:
        if self._num_abandoned == _MANY_ABANDONED:
            _log.warning(
                "%d abandoned functions on worker %d may still run; each occupies a thread "
                "until it returns",
                self._num_abandoned,
                self.start_message.worker,
            )
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._add_thread()

    # --- on the session's threads ---------------------------------------------------------------

    def _run_tasks(self) -> None:
        while True:
            with self._lock:
                while (task := None if self._is_closed else self._queue.start_next()) is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
            # Drop the task's objects now, instead of when the next task arrives.
            if not self._execute(task):
                return
            del task

    def _execute(self, task: WorkerTask[Request]) -> bool:
        """Run a closure and reply; return False if this thread was replaced."""
        started = time.perf_counter()
        try:
            reply, value, steps = self._run_task(task, started)
        except BaseException as raised:
            # Errors after the function, such as in an iterator's state, need a reply, too.
            error = translate_error("the code after a function", self.start_message.worker, raised)
            reply, value, steps = (
                RunReply(error=encode_error(error), has_written=True),
                PACKED_NONE,
                PACKED_NONE,
            )
        if task.message.number > 0:  # count before the reply, which makes the count visible
            self._counters.record_returned(time.perf_counter() - started, failed=bool(reply.error))
        with self._lock:
            is_needed = self._queue.finish(task)
            if is_needed and reply.nbytes:
                self._queue.results[task.message.number] = value
        if is_needed and task.request is not None:
            if reply.nbytes:
                reply = msgspec.structs.replace(reply, value=b"")
                value = PACKED_NONE
            if acknowledged := self._acknowledged():
                reply = msgspec.structs.replace(reply, acknowledged=acknowledged)
            task.request.reply(reply, [*value.buffers, *steps.buffers])
        return is_needed

    def _run_task(
        self, task: WorkerTask[Request], started: float
    ) -> tuple[RunReply, Payload, Payload]:
        """Run a closure; return the reply, the value, and the optimizer steps."""
        message, loaded = task.message, task.function
        session = self.start_message
        lease = _unpack_lease(message, task.buffers)
        if lease is not None:
            task.leased_elements, lease.request_more = (
                lease,
                lambda: self._wait_for_elements(task, lease),
            )
        closure = RunningClosure(
            session.worker,
            self._resources,
            is_only_thread=session.threads == 1,
            leased_elements=lease,
        )
        closure_token = current_closure.set(closure)
        # Resources live as long as the session, so variables may be created in them.
        refusal_token = variable_refusal.set(None if message.resource else _refuse_variable)
        try:
            closure_run = ClosureRun(session.term, message.number, session.session)
            with write_as(closure_run, collects_steps=session.collects_steps) as attempt:
                if message.resource:
                    attempt.reject_writes(FailedPreconditionError(_NO_WRITES_ALLOWED))
                with self._lock:
                    task.write_context = attempt
                    if task.writes_rejected:
                        task.reject_writes()
                payload, error = self._call_function(task, loaded, attempt)
        finally:
            variable_refusal.reset(refusal_token)
            current_closure.reset(closure_token)
        ended_at_data_end = (
            lease is not None and lease.reached_end and isinstance(error, OutOfRangeError)
        )
        if ended_at_data_end:
            error = None  # the regular end of reading
        # Steps pushed before the function failed are not the gradient of its batch.
        steps = (
            pack(attempt.collected_steps)
            if attempt.collected_steps and error is None
            else PACKED_NONE
        )
        nbytes = payload.nbytes
        reply = RunReply(
            value=payload.data,
            error=b"" if error is None else encode_error(error),
            nbytes=nbytes if nbytes >= _LARGE_BYTES else 0,
            seconds=time.perf_counter() - started,
            has_written=attempt.has_written,
            optimizer_steps=b"" if steps is PACKED_NONE else steps.data,
            num_step_buffers=len(steps.buffers),
            num_unused=0 if lease is None else lease.num_unread,
            reached_end=ended_at_data_end,
            iterator_states={
                number: each.state_after(closure) for number, each in closure.used_iterators.items()
            },
        )
        return reply, payload, steps

    def _call_function(
        self, task: WorkerTask[Request], loaded: LoadedFunction, attempt: WriteContext
    ) -> tuple[Payload, Exception | None]:
        """Call the function; return its packed value, or its error."""
        resource = task.message.resource
        try:
            args, kwargs = _unpack_arguments(task.message, task.buffers)
            try:
                value = loaded.get()(*args, **kwargs)
                del args, kwargs
                if resource:
                    self._resources.set(resource, value)
                    return PACKED_NONE, None
                packed = _pack_result(value, loaded.name)
            except OutOfRangeError:
                attempt.finish()  # the regular end of reading; a failed step raises here
                raise
            finally:
                # Also after an error: every write must be applied or rejected.
                wait_for_steps(attempt.pending_steps)
            attempt.finish()
            return packed, None
        except BaseException as raised:
            error = translate_error(loaded.name, self.start_message.worker, raised)
            if resource:
                self._resources.set(resource, None, error)
            return PACKED_NONE, error


def _refuse_variable(name: str) -> Exception:
    return FailedPreconditionError(
        f"Variable {name!r} is created inside a scheduled function: each call would create it "
        "again, and it would be lost with the worker. Create it outside, in strategy.scope(); "
        "for a separate value on each worker use create_per_worker_values"
    )


def _unpack_arguments(message: RunClosure, buffers: Sequence[Buffer]) -> tuple[Any, Any]:
    """Return the args and kwargs of a closure."""
    if not message.arguments:
        return (), {}
    counts = message.buffer_counts[: 1 + len(message.inputs)]
    own, *inputs = _split_payloads((message.arguments, *message.inputs), counts, buffers)
    args, kwargs = unpack(own, [unpack(each) for each in inputs])
    return args, kwargs


def _unpack_lease(message: RunClosure, buffers: Sequence[Buffer]) -> LeasedElementIterator | None:
    """Return the shared dataset's elements sent with a closure, or None."""
    if not message.elements and not message.end_of_data:
        return None
    num_before = 1 + len(message.inputs)
    first_buffer = sum(message.buffer_counts[:num_before])
    elements = _split_payloads(
        message.elements, message.buffer_counts[num_before:], buffers[first_buffer:]
    )
    return LeasedElementIterator(elements, end_of_data=message.end_of_data)


def _split_payloads(
    data: Sequence[bytes], counts: Sequence[int], buffers: Sequence[Buffer]
) -> list[Payload]:
    """Return the payloads of one message, each with its buffers."""
    if not counts:
        return [Payload(each) for each in data]
    rest = iter(buffers)
    return [
        Payload(each, [next(rest) for _ in range(count)])
        for each, count in zip(data, counts, strict=True)
    ]


def _pack_result(value: Any, function: str) -> Payload:
    try:
        return pack(value, pickler=ReplyPickler)
    except Exception as error:
        raise TypeError(
            f"the result of {function}, of type {type(value).__name__}, cannot be sent to the "
            f"coordinator ({error}); return arrays, numbers, or structures of them"
        ) from error
