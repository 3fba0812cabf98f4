"""One place for all clients of a job: each says where it stands, and hears where all do."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from headrace.errors import DeadlineExceededError
from headrace.execution.delivered import Delivered
from headrace.service.client.contact import CALL_SECONDS
from headrace.service.messages import GatherPlace
from headrace.service.rows import END
from headrace.service.stub import DispatcherStub
from headrace.waiting import WaitWarnings, retry

__all__ = ["GATHER_SECONDS", "gathered"]

_log = logging.getLogger(__name__)

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
    question = GatherPlace(
        client_id=client_id, token=uuid.uuid4().hex, delivered=own.whole, parts=own.parts
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
            if not reply.missing:
                break
            waited = time.monotonic() - since
            if warnings.is_due(waited):
                _log.warning(
                    "get_state has waited %.0f s for the place of %s: the state of a job that "
                    "several clients share is of all of them, and each is to call `get_state` at "
                    "the same step",
                    waited,
                    ", ".join(reply.missing),
                )
            if waited > timeout:
                raise DeadlineExceededError(
                    f"waited {timeout:g} s for the place of {', '.join(reply.missing)}: the state "
                    "of a job that several clients share is of all of them, and each is to call "
                    "`get_state` at the same step"
                )
            time.sleep(_SLICE)
    found = Delivered()
    found.add((start, stop - start, 0, END) for start, stop in reply.delivered)
    found.add((unit, 1, start, stop - start) for unit, rows in reply.parts for start, stop in rows)
    return found
