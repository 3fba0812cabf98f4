"""Calls of the dispatcher that open an iteration and gather the positions of its clients."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from headrace.errors import DeadlineExceededError, UnavailableError
from headrace.execution.delivered_elements import DeliveredElements
from headrace.service.client.exhausted_jobs import ExhaustedJobCheck
from headrace.service.client.heartbeat_schedule import CALL_TIMEOUT
from headrace.service.client.task_selector import TaskSelector
from headrace.service.element_sets import END_ORDINAL
from headrace.service.messages import (
    PLAN_CHUNK_BYTES,
    ContributeCheckpoint,
    OpenIteration,
    OpenIterationReply,
    PutPlan,
)
from headrace.service.stub import DispatcherStub
from headrace.transport.channel import Channel
from headrace.waiting import WaitWarningLimiter, retry

__all__ = ["GATHER_SECONDS", "gather_positions", "open_iteration"]


_log = logging.getLogger(__name__)


def open_iteration(
    open_request: OpenIteration,
    open_stub: Callable[[], DispatcherStub],
    *,
    dispatcher: str,
    wait_timeout: float,
    task_selector: TaskSelector,
    keep_channel: Callable[[Channel], None],
    job_check: ExhaustedJobCheck,
    cost_fn: bytes = b"",
) -> OpenIterationReply:
    """Join an iteration; return the tasks to read.

    Args:
        open_request: Request for the iteration.
        open_stub: Opens a connection to the dispatcher.
        dispatcher: Address of the dispatcher, for messages.
        wait_timeout: Seconds to wait for the dispatcher.
        task_selector: Selects the tasks to read.
        keep_channel: Receives the channel on which the dispatcher replied, for further use; must
            close it.
        job_check: Receives the dispatcher's reply.
        cost_fn: Pickled plan of the job's cost function, uploaded if the dispatcher needs it; empty
            if there is none.

    Raises:
        FailedPreconditionError: If only local workers may be read and there are none.
        InvalidArgumentError: If the dispatcher's deployment mode requires a local worker and there
            is none.
        UnavailableError: If the dispatcher did not reply within `wait_timeout`.
    """
    with open_stub() as stub:
        reply = retry(
            lambda timeout: _open_once(stub, open_request, cost_fn, timeout),
            deadline=wait_timeout,
            peer=f"the dispatcher at {dispatcher}",
            attempt_timeout=CALL_TIMEOUT,
            warn=lambda message: _log.warning("%s", message),
        )
        keep_channel(stub.release())
    selected = task_selector.select_initial(reply)
    job_check.iteration_opened(open_request, reply)
    return selected


def _open_once(
    stub: DispatcherStub, open_request: OpenIteration, cost_fn: bytes, timeout: float
) -> OpenIterationReply:
    reply = stub.call(open_request, timeout=timeout)
    if not reply.cost_fn_needed:
        return reply
    received = 0
    while received < len(cost_fn):
        chunk = cost_fn[received : received + PLAN_CHUNK_BYTES]
        upload = PutPlan(
            digest=open_request.options.cost_fn_digest,
            offset=received,
            total_bytes=len(cost_fn),
            chunk=chunk,
        )
        received = stub.call(upload, timeout=timeout).received_bytes
    reply = stub.call(open_request, timeout=timeout)
    if reply.cost_fn_needed:  # it was restarted in between; the next attempt uploads it again
        raise UnavailableError("the dispatcher lost the cost function that was just uploaded")
    return reply


# --- common position of all clients of a job: each contributes its part and receives the union ----

GATHER_SECONDS = 60.0
"""Maximum seconds of the clients' wait for each other in `get_state`; at most `wait_timeout`."""

_POLL_SECONDS = 0.05


def gather_positions(
    own: DeliveredElements,
    client_id: str,
    open_stub: Callable[[], DispatcherStub],
    *,
    dispatcher: str,
    timeout: float,
) -> DeliveredElements:
    """Return the elements delivered to all clients of an iteration, once all have contributed.

    Args:
        own: Elements delivered to this client.
        client_id: ID of this client.
        open_stub: Opens a connection to the dispatcher.
        dispatcher: Address of the dispatcher, for messages.
        timeout: Seconds to wait for the other clients.

    Raises:
        DeadlineExceededError: If other clients did not contribute; the message names them.
        FailedPreconditionError: If one of them has left or expired.
    """
    request = ContributeCheckpoint(
        client_id=client_id,
        token=uuid.uuid4().hex,
        delivered=own.complete_splits,
        partial_splits=own.partial_splits,
    )
    started_at = time.monotonic()
    warnings = WaitWarningLimiter()
    with open_stub() as stub:
        while True:
            reply = retry(
                lambda timeout: stub.call(request, timeout=timeout),
                deadline=timeout,
                peer=f"the dispatcher at {dispatcher}",
                attempt_timeout=CALL_TIMEOUT,
            )
            if not reply.missing_clients:
                break
            waited = time.monotonic() - started_at
            if warnings.should_warn(waited):
                _log.warning(
                    "get_state has waited %.0f s for the positions of %s: clients that share a "
                    "job have one common state, so each must call `get_state` at the same step",
                    waited,
                    ", ".join(reply.missing_clients),
                )
            if waited > timeout:
                raise DeadlineExceededError(
                    f"waited {timeout:g} s for the positions of "
                    f"{', '.join(reply.missing_clients)}: clients that share a job have one common "
                    "state, so each must call `get_state` at the same step"
                )
            time.sleep(_POLL_SECONDS)
    delivered = DeliveredElements()
    delivered.add((start, stop - start, 0, END_ORDINAL) for start, stop in reply.delivered)
    delivered.add(
        (split, 1, start, stop - start)
        for split, ordinals in reply.partial_splits
        for start, stop in ordinals
    )
    return delivered
