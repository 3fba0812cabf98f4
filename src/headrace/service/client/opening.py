"""Opening an iteration: the dispatcher is asked until it answers, or patience ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.errors import FailedPreconditionError
from headrace.service.client.contact import CALL_SECONDS
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import ClientUpdate, IterationOpened, OpenIteration
from headrace.transport import inprocess
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["of_this_process", "open_iteration"]

_log = logging.getLogger(__name__)

M = TypeVar("M", IterationOpened, ClientUpdate)


def open_iteration(
    opening: OpenIteration,
    dial: Callable[[], DispatcherStub],
    *,
    dispatcher: str,
    wait_timeout: float,
    local_only: bool,
    prefers_local: bool = False,
) -> tuple[IterationOpened, bool]:
    """Join an iteration; return what there is to read, and whether of this process alone.

    Args:
        opening: Which one.
        dial: Opens a connection to the dispatcher.
        dispatcher: Its address, for messages.
        wait_timeout: Seconds for which it is asked, as for everything that reading waits for.
        local_only: Whether to read the workers of this process alone.
        prefers_local: Whether to do so if there are any.

    Raises:
        FailedPreconditionError: `local_only`, and there is no worker in this process.
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
    local = of_this_process(opened)
    if prefers_local and local.tasks:
        local_only = True
    if local_only:
        if not opened.finished and not local.tasks:
            raise FailedPreconditionError(
                "Local reads require local workers, but no local worker is found. Run a "
                '`WorkerServer` in this process, or use target_workers="AUTO"'
            )
        opened = local
    if opened.finished and opened.finished_by:
        _log.warning(
            "job %r has no elements left in pass %s: %s. A job's pass is read once; choose "
            "another job_name to read it again",
            opened.job_name,
            opening.pass_number,
            opened.finished_by,
        )
    return opened, local_only


def of_this_process(heard: M) -> M:
    """Leave out the tasks of other processes; where none is left, there is nothing to read."""
    tasks = tuple(task for task in heard.tasks if inprocess.is_local(task.worker_address))
    return msgspec.structs.replace(heard, tasks=tasks, finished=heard.finished or not tasks)
