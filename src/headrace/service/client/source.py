"""The remote source: a dataset on the service, as a plan sees it."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field

from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.plan.source import INFINITE, Position, Reader
from headrace.service.client.reader import RemoteReader
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import OpenIteration, WorkerReply
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel
from headrace.transport.security import Security

__all__ = ["RemoteSource"]


class _Openings:
    """How often a source was opened in this process, and what the latest reader is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self.latest: dict[str, int] = {}

    def next(self) -> int:
        with self._lock:
            number = self._count
            self._count += 1
        return number

    def __reduce__(self) -> tuple[type[_Openings], tuple[()]]:
        # Another process opens on its own account.
        return _Openings, ()


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteSource:
    """What the workers of a service make of a registered dataset (`plan.source.Source`).

    Each opening joins the next repetition of the job: the first of this object in this process
    joins repetition 0, the second 1, and so on.

    Attributes:
        service: The dispatcher's address.
        dataset_id: What to read.
        processing_mode: How the workers share it.
        cardinality: Number of elements, INFINITE or UNKNOWN.
        job_name: Whose iterations to share; None: nobody's.
        max_outstanding_requests: Requests and unused answers that may be outstanding.
        data_transfer_protocol: "local", "shm", "tcp", or None: the first of these that works.
        target_workers: "AUTO", "ANY" or "LOCAL".
        security: Keys of this client.
        element_spec: Spec of one element, or None.
    """

    service: str
    dataset_id: str
    processing_mode: ShardingPolicy
    cardinality: int
    job_name: str | None = None
    max_outstanding_requests: int = 16
    data_transfer_protocol: str | None = None
    target_workers: str = "AUTO"
    security: Security | None = None
    element_spec: Spec | None = None
    _openings: _Openings = field(default_factory=_Openings, repr=False)

    @property
    def size(self) -> int:
        """One index that holds everything; none, or no end, where that is known."""
        return self.cardinality if self.cardinality in (0, INFINITE) else 1

    @property
    def elements_per_index(self) -> int | None:
        return 1 if self.cardinality == INFINITE else None

    @property
    def splittable(self) -> bool:
        return False

    def open(self, start: int, stop: int, position: Position = None) -> Reader:
        if position is not None and position.get("received", 0):
            raise FailedPreconditionError(
                "an iterator over the data service cannot be restored yet, but this one was at "
                f"element {position['received']} of repetition {position['repetition']}. Start the "
                "epoch anew; or keep the state of an iterator that reads the dataset in this "
                "process, without `distribute`"
            )
        reader = RemoteReader(
            OpenIteration(
                client_id=uuid.uuid4().hex,
                dataset_id=self.dataset_id,
                processing_mode=int(self.processing_mode),
                job_name=self.job_name,
                repetition=self._openings.next(),
                target_workers=self.target_workers,
            ),
            dispatcher=self.service,
            dial=self._dial,
            connect=self._connect,
            local_only=self.target_workers == "LOCAL",
            max_outstanding_requests=self.max_outstanding_requests,
        )
        self._openings.latest = reader.delivered
        return reader

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, delivered in the latest iteration."""
        return dict(self._openings.latest)

    def _dial(self) -> DispatcherStub:
        return DispatcherStub(self.service, security=self.security)

    def _connect(self, address: str) -> Channel:
        protocol = self.data_transfer_protocol
        if protocol in (None, "local"):
            if inprocess.is_local(address):
                return inprocess.connect(address)
            if protocol == "local":
                raise FailedPreconditionError(
                    'data_transfer_protocol="local" reads workers of this process alone, but the '
                    f"worker at {address} is in another; use None, "
                    '"shm" or "tcp"'
                )
        return zeromq.connect(
            address,
            reply_type=WorkerReply,
            security=self.security,
            shared_memory=protocol != "tcp",
        )
