"""Authorization of requests by key: clients may not send the requests of workers.

A key belongs to a worker or a client (`transport.security`). Without keys there are no roles, and
every request is allowed. Workers may send the requests of clients: their functions may read
services.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import UnauthenticatedError
from headrace.service import messages
from headrace.transport.channel import Request

__all__ = ["filter_authorized"]

_WORKER_REQUESTS = frozenset(
    {
        messages.RegisterWorker,
        messages.WorkerHeartbeat,
        messages.DrainWorker,
        messages.UnregisterWorker,
        messages.GetTask,
        messages.GetSplit,
        messages.FinishTask,
        messages.FailTask,
        messages.ReturnSplits,
        messages.ReportDepartedClient,
        messages.CommitFiles,
    }
)


def filter_authorized(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that their senders may send; reject the others."""
    allowed = []
    for request in requests:
        if request.role == "client" and type(request.message) in _WORKER_REQUESTS:
            request.fail(_refusal(type(request.message).__name__))
        else:
            allowed.append(request)
    return allowed


def _refusal(name: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"{name} is reserved for workers, but this connection uses the keys of a client. Start "
        'workers with server keys (`--keys DIR`, or Security.load(DIR, "server")), or add their '
        "public key to the folder authorized_workers of the dispatcher's keys"
    )
