"""Opening an iteration: the dispatcher is asked until it answers, or patience ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.errors import UnavailableError
from headrace.service.client.contact import CALL_SECONDS
from headrace.service.client.job_use import JobUse
from headrace.service.client.targets import Target
from headrace.service.messages import (
    PLAN_PART_BYTES,
    IterationOpened,
    OpenIteration,
    PutPlan,
)
from headrace.service.stub import DispatcherStub
from headrace.transport.channel import Channel
from headrace.waiting import retry

__all__ = ["open_iteration"]

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
) -> IterationOpened:
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
) -> IterationOpened:
    opened = stub.call(opening, timeout=timeout)
    if not opened.wanted:
        return opened
    received = 0
    while received < len(cost_fn):
        part = cost_fn[received : received + PLAN_PART_BYTES]
        put = PutPlan(
            digest=opening.terms.cost_plan, offset=received, total=len(cost_fn), part=part
        )
        received = stub.call(put, timeout=timeout).received
    opened = stub.call(opening, timeout=timeout)
    if opened.wanted:  # it was restarted in between: the next try finds it as it is then
        raise UnavailableError("the dispatcher forgot the cost function that it was just sent")
    return opened
