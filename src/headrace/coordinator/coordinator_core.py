"""State machine of the coordinator's sessions with its workers.

Pure: no threads, sockets or clock; it consumes inputs and returns actions. The queue decides which
worker runs which closure. The core starts sessions, loads each function once, fetches values, and
recreates resources on workers that return.

Rule 1. A worker session has a number that no earlier session had; a lost worker gets a new session.
        Replies of another session are ignored.
Rule 2. Each connected worker has one open request (`AwaitSessionEnd`), so that its loss is noticed.
Rule 3. Resources of a worker are recreated in their original order before it gets other closures.
        Iterators resume at their state after the last ended closure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.coordinator.closure import NEVER, Closure, Payload, RemoteValueStatus
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.messages import (
    AcknowledgeResult,
    AwaitSessionEnd,
    CancelClosure,
    CancelReply,
    CoordinatorActions,
    EndSession,
    FeedElements,
    FetchedResult,
    FetchResult,
    ReleaseResources,
    RunClosure,
    RunReply,
    SessionStarted,
    StartSession,
    WorkerCall,
    WorkerResource,
    build_feed_request,
    build_load_request,
    build_run_request,
)
from headrace.coordinator.worker_connection import EndedClosure, ExecutionStats, WorkerConnection
from headrace.errors import AbortedError, FailedPreconditionError
from headrace.transport.channel import Buffer
from headrace.versions import Versions, release_mismatch

__all__ = ["CoordinatorCore"]

_MAX_KNOWN_FUNCTIONS = 10_000


class CoordinatorCore:
    """Workers, their resources, and the closure queue.

    Args:
        queue: Queue that assigns closures to workers.
        session_request: Template of `StartSession`, without worker and session number.
        read_error: Decodes an error from a worker.
    """

    def __init__(
        self,
        queue: ClosureQueue,
        *,
        session_request: StartSession,
        read_error: Callable[[bytes], Exception],
    ) -> None:
        self.queue = queue
        self.connections: dict[int, WorkerConnection] = {}
        self.resources: dict[int, WorkerResource] = {}
        self.superseded_by: Exception | None = None
        """Error that says why this coordinator was superseded; None while it is active."""
        self.stats: ExecutionStats = ExecutionStats()
        self.session_request = session_request
        self._read_error = read_error
        self._session_numbers = itertools.count(1)
        self._next_worker = 0
        self._actions = CoordinatorActions()

    # --- inputs from callers --------------------------------------------------------------------

    def add_worker(
        self,
        address: str,
        now: float,
        worker: int | None = None,
        registered_at: float | None = None,
    ) -> int:
        """Add a worker, or find it by address; return its number, by default the next one."""
        for connection in self.connections.values():
            if connection.address == address and not connection.is_draining:
                if connection.registered_at is not None:
                    connection.registered_at = registered_at
                return connection.worker
        if worker is None:
            worker = self._next_worker
        self._next_worker = max(self._next_worker, worker + 1)
        self.connections[worker] = WorkerConnection(
            worker, address, now, registered_at=registered_at
        )
        return worker

    def remove_worker(self, worker: int) -> None:
        """Drain a worker, and remove it once it holds no closures."""
        self.connections[worker].is_draining = True

    def define_resource(self, resource: WorkerResource) -> None:
        """Create a resource on each worker, now and whenever a worker returns."""
        self.resources[resource.number] = resource
        for connection in self.connections.values():
            if connection.is_connected and not connection.is_draining:
                self.queue.schedule_on(connection.worker, resource.build_closure(connection.worker))

    def release_resource(self, number: int) -> None:
        """Release a resource on all workers."""
        if self.resources.pop(number, None) is not None:
            for connection in self.connections.values():
                if connection.is_connected:
                    self._request(
                        connection,
                        ReleaseResources(session=connection.session, resources=(number,)),
                    )

    def feed_elements(
        self, closure: Closure, elements: Sequence[Payload], *, end_of_data: bool
    ) -> None:
        """Send elements to a closure that requested them; a retry gets them, too."""
        if closure.call_spec is None:
            return  # it has ended in the meantime
        lease = closure.call_spec.lease
        lease.elements += elements
        lease.end_of_data = lease.end_of_data or end_of_data
        lease.num_wanted = 0
        connection = self.connections.get(closure.worker)
        if connection is None or connection.in_flight.get(closure.number) is not closure:
            return  # its worker was lost; it is sent again with all elements
        message, buffers = build_feed_request(
            connection.session, closure.number, elements, end_of_data=lease.end_of_data
        )
        self._request(connection, message, buffers)

    # --- inputs from workers --------------------------------------------------------------------

    def handle_reply(
        self, worker: int, request: Any, reply: Any, buffers: Sequence[Buffer], now: float
    ) -> None:
        """Handle a worker's reply to a request, or the error in its place."""
        connection = self.connections.get(worker)
        if connection is None or request.session != connection.session:
            return
        if not connection.is_connected and not isinstance(request, StartSession):
            return
        if isinstance(reply, AbortedError) and not isinstance(request, StartSession):
            self.worker_lost(worker, reply, now)
            return
        handler = _REPLY_HANDLERS.get(type(request))
        if handler is not None:
            handler(self, connection, request, reply, buffers, now)

    def worker_lost(self, worker: int, error: Exception, now: float) -> None:
        """Handle the loss of a worker, and forget all requests to it."""
        connection = self.connections.get(worker)
        if connection is None:
            return
        if connection.is_connected:
            num_retried = self.stats.record_worker_lost(connection.in_flight.values())
            self._actions.warnings.append(
                f"worker {worker} ({connection.address}) lost: {error}"
                + (f"; {num_retried} of its functions will run again" if num_retried else "")
            )
            self.queue.worker_lost(worker)
            for resource in self.resources.values():
                if (result := resource.results.get(worker)) is not None:
                    result.status = RemoteValueStatus.ABORTED
        connection.mark_lost(str(error), now)

    def _on_session_started(
        self,
        connection: WorkerConnection,
        request: StartSession,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        if not isinstance(reply, SessionStarted):
            if isinstance(reply, AbortedError) and self.superseded_by is None:
                self.superseded_by = reply
                self._actions.warnings.append(
                    f"this coordinator was superseded, as reported by worker {connection.worker} "
                    f"({connection.address}): {reply}"
                )
            is_new_reason = str(reply) != connection.reason
            self.worker_lost(connection.worker, reply, now)
            if isinstance(reply, FailedPreconditionError):
                connection.refusal = reply
                if is_new_reason:
                    self._actions.warnings.append(
                        f"worker {connection.worker} ({connection.address}) refused this "
                        f"coordinator: {reply}"
                    )
            return
        self._compare_releases(connection, reply.versions)
        connection.mark_connected(reply.process, reply.versions, now)
        self.queue.worker_connected(connection.worker, connection.session)
        self._request(connection, AwaitSessionEnd(session=connection.session))
        for resource in self.resources.values():
            self.queue.schedule_on(connection.worker, resource.build_closure(connection.worker))

    def _compare_releases(self, connection: WorkerConnection, worker_versions: Versions) -> None:
        own_versions = self.session_request.versions
        if connection.versions != worker_versions and release_mismatch(
            own_versions, worker_versions
        ):
            self._actions.warnings.append(
                f"worker {connection.worker} ({connection.address}) runs {worker_versions}, but "
                f"this coordinator runs {own_versions}: use one release after an upgrade"
            )

    @property
    def failure(self) -> Exception | None:
        """Error that stops all work: this coordinator was superseded, or all workers refuse it."""
        if self.superseded_by is not None:
            return self.superseded_by
        refusals = [connection.refusal for connection in self.connections.values()]
        return refusals[0] if refusals and None not in refusals else None

    def _on_session_ended(
        self,
        connection: WorkerConnection,
        request: AwaitSessionEnd,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        error = reply if isinstance(reply, Exception) else AbortedError("the worker stopped")
        self.worker_lost(connection.worker, error, now)

    def _on_run_reply(
        self,
        connection: WorkerConnection,
        request: RunClosure | FeedElements,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        number = request.number
        closure = connection.in_flight.get(number)
        if not isinstance(reply, RunReply):
            self._fail(connection, number, reply, now)
            return
        if closure is None:
            return
        if reply.num_wanted:
            closure.call_spec.lease.num_wanted = reply.num_wanted
            return
        if reply.is_function_missing and closure.call_spec is not None:
            connection.known_functions.discard(closure.call_spec.function.digest)
            self._send(connection, closure)
            return
        if reply.is_dropped:
            return  # the reply to the cancellation handles it
        # Large values are fetched one at a time, which bounds memory on both sides. Closures that
        # end in the meantime wait in order: iterator states must cover all earlier closures.
        # Optimizer steps come with the reply, since their round needs all of them.
        count = len(buffers) - reply.num_step_buffers
        steps = Payload(reply.optimizer_steps, buffers[count:]) if reply.optimizer_steps else None
        payload = None if reply.nbytes else Payload(reply.value, buffers[:count])
        ended = EndedClosure(reply, steps, payload)
        if payload is None or connection.unfetched:
            connection.unfetched[number] = ended
            self._fetch_next(connection, now)
        else:
            self._finish(connection, number, ended, now)

    def _fetch_next(self, connection: WorkerConnection, now: float) -> None:
        while connection.unfetched:
            number, ended = next(iter(connection.unfetched.items()))
            if ended.payload is None:
                if not connection.is_fetching:
                    connection.is_fetching = True
                    self._request(
                        connection, FetchResult(session=connection.session, number=number)
                    )
                return
            del connection.unfetched[number]
            self._finish(connection, number, ended, now)

    def _finish(
        self, connection: WorkerConnection, number: int, ended: EndedClosure, now: float
    ) -> None:
        reply = ended.reply
        closure = connection.in_flight.pop(number, None)
        for resource, state in reply.iterator_states.items():
            if state and resource in self.resources:
                self.resources[resource].states[connection.worker] = state
        if (
            closure is not None
            and closure.call_spec is not None
            and closure.call_spec.lease is not None
        ):
            closure.call_spec.lease.num_unused = reply.num_unused
            closure.call_spec.lease.reached_end = reply.reached_end
        error = self._read_error(reply.error) if reply.error else None
        if number > 0:
            connection.num_finished += 1
            if closure is not None:
                self.stats.record_returned(closure.name, reply.seconds, failed=error is not None)
        self.queue.closure_returned(
            connection.session,
            number,
            None if error else ended.payload,
            error,
            has_written=reply.has_written,
            seconds=reply.seconds,
            now=now,
            optimizer_steps=ended.optimizer_steps,
        )

    def _on_result_fetched(
        self,
        connection: WorkerConnection,
        request: FetchResult,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        connection.is_fetching = False
        ended = connection.unfetched.pop(request.number)
        if isinstance(reply, FetchedResult):
            self._request(
                connection, AcknowledgeResult(session=connection.session, number=request.number)
            )
            ended = ended._replace(payload=Payload(reply.value, buffers))
            self._finish(connection, request.number, ended, now)
        else:
            self._fail(connection, request.number, reply, now)
        self._fetch_next(connection, now)

    def _fail(
        self, connection: WorkerConnection, number: int, error: Exception, now: float
    ) -> None:
        """Record the error of a closure that did not run, or whose value could not be fetched."""
        connection.in_flight.pop(number, None)
        self.queue.closure_returned(
            connection.session, number, None, error, has_written=True, seconds=0.0, now=now
        )

    def _on_cancel_reply(
        self,
        connection: WorkerConnection,
        request: CancelClosure,
        reply: Any,
        buffers: Sequence[Buffer],
        now: float,
    ) -> None:
        if isinstance(reply, CancelReply):
            if reply.is_dropped:
                connection.in_flight.pop(request.number, None)
            self.queue.cancel_answered(
                connection.session, request.number, is_dropped=reply.is_dropped, now=now
            )

    # --- actions --------------------------------------------------------------------------------

    def take_actions(self, now: float) -> CoordinatorActions:
        """Return the actions to run now and the time until the next call."""
        wake_at = NEVER
        for connection in list(self.connections.values()):
            if connection.is_expired(now):
                self._actions.warnings.append(
                    f"{connection.describe(now)}; removed, since it did not register again"
                )
                connection.is_draining = True
            if connection.is_draining:
                self._remove_if_drained(connection)
            elif (
                not connection.is_connected
                and not connection.is_connecting
                and self.superseded_by is None
            ):
                if connection.retry_at <= now:
                    self._start_session(connection)
                else:
                    wake_at = min(wake_at, connection.retry_at)
        queue_actions = self.queue.take_actions(now)
        for send in queue_actions.sends:
            connection = self.connections[send.worker]
            connection.in_flight[send.closure.number] = send.closure
            self.stats.record_sent(send.closure.number, self.queue.first_unended)
            self._send(connection, send.closure)
        for cancel in queue_actions.cancels:
            # The worker may have been removed after this was decided.
            if (target := self.connections.get(cancel.worker)) is not None:
                message = CancelClosure(
                    session=cancel.session, number=cancel.number, mode=cancel.mode.value
                )
                self._request(target, message)
        if now >= self.stats.next_check_at:
            self._actions.warnings += self.stats.check_slow(self.queue, self.connections, now)
        actions, self._actions = self._actions, CoordinatorActions()
        actions.key_cleanups, actions.fences = queue_actions.key_cleanups, queue_actions.fences
        actions.round_push = queue_actions.round_push
        actions.wake_in = min(queue_actions.wake_in, max(0.0, wake_at - now))
        return actions

    def _start_session(self, connection: WorkerConnection) -> None:
        connection.session = next(self._session_numbers)
        connection.is_connecting = True
        session, worker = connection.session, connection.worker
        self._request(
            connection,
            msgspec.structs.replace(self.session_request, session=session, worker=worker),
        )

    def _remove_if_drained(self, connection: WorkerConnection) -> None:
        if connection.is_connected:
            if not self.queue.drain_worker(connection.worker):
                return
            self._request(connection, EndSession(session=connection.session))
            # Fence it, too: an abandoned function may still run there.
            self.queue.worker_lost(connection.worker)
        self._actions.disconnects.append(connection.worker)
        del self.connections[connection.worker]

    def _send(self, connection: WorkerConnection, closure: Closure) -> None:
        function = closure.call_spec.function
        if function.digest not in connection.known_functions:
            if len(connection.known_functions) >= _MAX_KNOWN_FUNCTIONS:
                connection.known_functions.clear()  # functions still loaded are sent again
            connection.known_functions.add(function.digest)
            self._request(connection, *build_load_request(connection.session, function))
        self._request(connection, *build_run_request(connection.session, closure))

    def _request(
        self, connection: WorkerConnection, message: Any, buffers: Sequence[Buffer] = ()
    ) -> None:
        self._actions.calls.append(WorkerCall(connection.worker, message, buffers))


_REPLY_HANDLERS: dict[type, Callable[..., None]] = {
    AwaitSessionEnd: CoordinatorCore._on_session_ended,
    CancelClosure: CoordinatorCore._on_cancel_reply,
    FeedElements: CoordinatorCore._on_run_reply,
    StartSession: CoordinatorCore._on_session_started,
    RunClosure: CoordinatorCore._on_run_reply,
    FetchResult: CoordinatorCore._on_result_fetched,
}
