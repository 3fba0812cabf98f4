"""Opening an iteration: the dispatcher is asked until it answers, or patience ends."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from headrace.errors import DeadlineExceededError, UnavailableError
from headrace.execution.delivered import Delivered
from headrace.service.client.contact import CALL_SECONDS
from headrace.service.client.job_use import JobUse
from headrace.service.client.targets import Target
from headrace.service.messages import (
    PLAN_CHUNK_BYTES,
    ContributeCheckpoint,
    OpenIteration,
    OpenIterationReply,
    PutPlan,
)
from headrace.service.rows import END
from headrace.service.stub import DispatcherStub
from headrace.transport.channel import Channel
from headrace.waiting import WaitWarnings, retry

__all__ = ["GATHER_SECONDS", "gathered", "open_iteration"]


_log = logging.getLogger(__name__)


def open_iteration(
    opening: OpenIteration,
    dial: Callable[[], DispatcherStub],
    *,
    dispatcher: str,
    wait_timeout: float,
    target: Target,
    keep: Callable[[Channel], None],
    use: JobUse,
    cost_fn: bytes = b"",
) -> OpenIterationReply:
    """Join an iteration; return what there is to read.

    Args:
        opening: Which one.
        dial: Opens a connection to the dispatcher.
        dispatcher: Its address, for messages.
        wait_timeout: Seconds for which it is asked, as for everything that reading waits for.
        target: Chooses what to read.
        keep: Takes the channel on which the dispatcher answered: to go on with, and to close.
        use: Is told what the dispatcher said.
        cost_fn: The plan of the job's cost function, which is put where the dispatcher wants it;
            empty: there is none.

    Raises:
        FailedPreconditionError: Only workers of this process are to be read, and there are none.
        InvalidArgumentError: The dispatcher says that there is one, and there is none.
        UnavailableError: The dispatcher did not answer for so long.
    """
    with dial() as stub:
        opened = retry(
            lambda timeout: _ask(stub, opening, cost_fn, timeout),
            deadline=wait_timeout,
            whom=f"the dispatcher at {dispatcher}",
            attempt_timeout=CALL_SECONDS,
            warn=lambda words: _log.warning("%s", words),
        )
        keep(stub.release())
    chosen = target.opened(opened)
    use.opened(opening, opened)
    return chosen


def _ask(
    stub: DispatcherStub, opening: OpenIteration, cost_fn: bytes, timeout: float
) -> OpenIterationReply:
    opened = stub.call(opening, timeout=timeout)
    if not opened.cost_fn_needed:
        return opened
    received = 0
    while received < len(cost_fn):
        part = cost_fn[received : received + PLAN_CHUNK_BYTES]
        put = PutPlan(
            digest=opening.options.cost_fn_digest,
            offset=received,
            total_bytes=len(cost_fn),
            chunk=part,
        )
        received = stub.call(put, timeout=timeout).received_bytes
    opened = stub.call(opening, timeout=timeout)
    if opened.cost_fn_needed:  # it was restarted in between: the next try finds it as it is then
        raise UnavailableError("the dispatcher forgot the cost function that it was just sent")
    return opened


# --- one place for all clients of a job: each says where it stands, and hears where all do --------

GATHER_SECONDS = 60.0

"""How long clients wait for each other in `get_state`, or `wait_timeout` where that is less."""

_SLICE = 0.05


def gathered(
    own: Delivered,
    client_id: str,
    dial: Callable[[], DispatcherStub],
    *,
    dispatcher: str,
    timeout: float,
) -> Delivered:
    """Return what was delivered to all clients of an iteration, once each has said its part.

    Args:
        own: What was delivered to this one.
        client_id: Who asks.
        dial: Opens a connection to the dispatcher.
        dispatcher: Its address, for messages.
        timeout: Seconds for which others are waited for.

    Raises:
        DeadlineExceededError: Others did not say where they stand; it names them.
        FailedPreconditionError: One of them is gone.
    """
    question = ContributeCheckpoint(
        client_id=client_id, token=uuid.uuid4().hex, delivered=own.whole, partial_splits=own.parts
    )
    since = time.monotonic()
    warnings = WaitWarnings()
    with dial() as stub:
        while True:
            reply = retry(
                lambda timeout: stub.call(question, timeout=timeout),
                deadline=timeout,
                whom=f"the dispatcher at {dispatcher}",
                attempt_timeout=CALL_SECONDS,
            )
            if not reply.missing_clients:
                break
            waited = time.monotonic() - since
            if warnings.is_due(waited):
                _log.warning(
                    "get_state has waited %.0f s for the place of %s: the state of a job that "
                    "several clients share is of all of them, and each is to call `get_state` at "
                    "the same step",
                    waited,
                    ", ".join(reply.missing_clients),
                )
            if waited > timeout:
                raise DeadlineExceededError(
                    f"waited {timeout:g} s for the place of {', '.join(reply.missing_clients)}: "
                    "the state "
                    "of a job that several clients share is of all of them, and each is to call "
                    "`get_state` at the same step"
                )
            time.sleep(_SLICE)
    found = Delivered()
    found.add((start, stop - start, 0, END) for start, stop in reply.delivered)
    found.add(
        (unit, 1, start, stop - start)
        for unit, rows in reply.partial_splits
        for start, stop in rows
    )
    return found
