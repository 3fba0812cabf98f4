"""Typed calls to a dispatcher."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar

import msgspec

from headrace.service import messages
from headrace.transport import zeromq
from headrace.transport.security import Security

__all__ = ["DispatcherStub"]

R = TypeVar("R")

_SECONDS = 5.0


class DispatcherStub:
    """One connection to a dispatcher, for one thread.

    A call waits at most `timeout` seconds and is not repeated: every request may be, and whoever
    calls knows how patient to be.

    Args:
        address: "host:port" of the dispatcher; it need not be there yet.
        security: Keys, if the dispatcher wants them.
    """

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        self._channel = zeromq.connect(
            address,
            reply_type=messages.DispatcherReply,
            security=security,
            shared_memory=False,
        )

    def register_dataset(
        self, request: messages.RegisterDataset, *, timeout: float = _SECONDS
    ) -> messages.DatasetRegistered:
        """Make a dataset known; the reply may ask for its plan first."""
        return self._call(request, messages.DatasetRegistered, timeout)

    def put_plan(
        self, request: messages.PutPlan, *, timeout: float = _SECONDS
    ) -> messages.PlanReceived:
        """Store a part of a plan."""
        return self._call(request, messages.PlanReceived, timeout)

    def get_dataset(
        self, request: messages.GetDataset, *, timeout: float = _SECONDS
    ) -> messages.DatasetDescription:
        """Ask what is known of a dataset."""
        return self._call(request, messages.DatasetDescription, timeout)

    def get_plan(
        self, request: messages.GetPlan, *, timeout: float = _SECONDS
    ) -> messages.PlanBytes:
        """Fetch a part of a plan."""
        return self._call(request, messages.PlanBytes, timeout)

    def open_iteration(
        self, request: messages.OpenIteration, *, timeout: float = _SECONDS
    ) -> messages.IterationOpened:
        """Join an iteration."""
        return self._call(request, messages.IterationOpened, timeout)

    def client_heartbeat(
        self, request: messages.ClientHeartbeat, *, timeout: float = _SECONDS
    ) -> messages.ClientUpdate:
        """Say that a client is alive; learn which tasks there are."""
        return self._call(request, messages.ClientUpdate, timeout)

    def settle_task(
        self, request: messages.SettleTask, *, timeout: float = _SECONDS
    ) -> messages.Done:
        """Say what a client received of a lost task."""
        return self._call(request, messages.Done, timeout)

    def close_iteration(
        self, request: messages.CloseIteration, *, timeout: float = _SECONDS
    ) -> messages.Done:
        """Leave an iteration."""
        return self._call(request, messages.Done, timeout)

    def report_unreachable(
        self, request: messages.ReportUnreachable, *, timeout: float = _SECONDS
    ) -> messages.Done:
        """Say that a worker does not answer."""
        return self._call(request, messages.Done, timeout)

    def register_worker(
        self, request: messages.RegisterWorker, *, timeout: float = _SECONDS
    ) -> messages.WorkerRegistered:
        """Say that a worker is there."""
        return self._call(request, messages.WorkerRegistered, timeout)

    def worker_heartbeat(
        self, request: messages.WorkerHeartbeat, *, timeout: float = _SECONDS
    ) -> messages.WorkerUpdate:
        """Say that a worker is alive; learn which tasks it may drop."""
        return self._call(request, messages.WorkerUpdate, timeout)

    def worker_leaving(
        self, request: messages.WorkerLeaving, *, timeout: float = _SECONDS
    ) -> messages.Done:
        """Say that a worker is going to leave."""
        return self._call(request, messages.Done, timeout)

    def worker_left(
        self, request: messages.WorkerLeft, *, timeout: float = _SECONDS
    ) -> messages.Done:
        """Say that a worker leaves now."""
        return self._call(request, messages.Done, timeout)

    def get_task(
        self, request: messages.GetTask, *, timeout: float = _SECONDS
    ) -> messages.TaskDefinition:
        """Ask what a task is about."""
        return self._call(request, messages.TaskDefinition, timeout)

    def get_split(
        self, request: messages.GetSplit, *, timeout: float = _SECONDS
    ) -> messages.SplitGranted:
        """Ask for the next units of a task."""
        return self._call(request, messages.SplitGranted, timeout)

    def finish_task(
        self, request: messages.FinishTask, *, timeout: float = _SECONDS
    ) -> messages.Done:
        """Say that a task reached its end."""
        return self._call(request, messages.Done, timeout)

    def fail_task(self, request: messages.FailTask, *, timeout: float = _SECONDS) -> messages.Done:
        """Say that a task ended by an error of the worker's own."""
        return self._call(request, messages.Done, timeout)

    def hand_back(self, request: messages.HandBack, *, timeout: float = _SECONDS) -> messages.Done:
        """Say that units of a task will not be delivered."""
        return self._call(request, messages.Done, timeout)

    def get_status(
        self, request: messages.GetStatus, *, timeout: float = _SECONDS
    ) -> messages.DispatcherStatus:
        """Ask who is there, and what is going on."""
        return self._call(request, messages.DispatcherStatus, timeout)

    def _call(self, request: msgspec.Struct, expected: type[R], timeout: float) -> R:
        reply, _ = self._channel.call(request, timeout=timeout)
        if not isinstance(reply, expected):
            raise TypeError(
                f"the dispatcher at {self._channel.address} answered {type(request).__name__} with "
                f"{type(reply).__name__}; is it of another version of Headrace?"
            )
        return reply

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
