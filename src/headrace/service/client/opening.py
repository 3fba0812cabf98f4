"""Opening an iteration: the dispatcher is asked until it answers, or patience ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.service.client.contact import CALL_SECONDS
from headrace.service.client.targets import Target
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import IterationOpened, OpenIteration
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["open_iteration"]

_log = logging.getLogger(__name__)


def open_iteration(
    opening: OpenIteration,
    dial: Callable[[], DispatcherStub],
    *,
    dispatcher: str,
    wait_timeout: float,
    target: Target,
) -> IterationOpened:
    """Join an iteration; return what there is to read.

    Args:
        opening: Which one.
        dial: Opens a connection to the dispatcher.
        dispatcher: Its address, for messages.
        wait_timeout: Seconds for which it is asked, as for everything that reading waits for.
        target: Chooses what to read.

    Raises:
        FailedPreconditionError: Only workers of this process are to be read, and there are none.
        InvalidArgumentError: The dispatcher says that there is one, and there is none.
        UnavailableError: The dispatcher did not answer for so long.
    """
    with dial() as stub:
        opened = retry(
            lambda timeout: stub.call(opening, timeout=timeout),
            RetryPolicy(deadline=wait_timeout),
            whom=f"the dispatcher at {dispatcher}",
            attempt_timeout=CALL_SECONDS,
            say=lambda words: _log.warning("%s", words),
        )
    chosen = target.opened(opened)
    if opened.finished and opened.finished_by:
        _log.warning(
            "job %r has no elements left in pass %s: %s. A job's pass is read once; choose "
            "another job_name to read it again",
            opened.job_name,
            opening.pass_number,
            opened.finished_by,
        )
    return chosen
