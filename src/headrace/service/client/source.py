"""The remote source: a dataset on the service, as a plan sees it."""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from dataclasses import dataclass, field
from typing import cast

from headrace.element.packing import codecs
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.plan.source import INFINITE, Position, Reader, Source
from headrace.service.client.keeping import Keeper
from headrace.service.client.options import ReadingOptions
from headrace.service.client.reader import RemoteReader
from headrace.service.client.targets import Target
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.stub import DispatcherStub
from headrace.service.messages import DispatcherReply, LostUnits, OpenIteration, WorkerReply
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel

__all__ = ["RemoteSource"]


_CANNOT_RESTORE = (
    "an iterator over the data service cannot be restored yet in the middle of a pass, nor go on "
    "in a forked process. Read the pass again from its start; or keep the state of an iterator "
    "that reads the dataset in this process, without `distribute`"
)


_MOST_REPETITIONS = 1
"""Of one dataset whose elements trainers share: it has no end to come to."""


class _Latest:
    """The latest reader of a source in this process, for reports."""

    def __init__(self) -> None:
        self.reader: RemoteReader | None = None

    def __reduce__(self) -> tuple[type[_Latest], tuple[()]]:
        # Another process reads on its own account.
        return _Latest, ()


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteSource(Source):
    """What the workers of a service make of a registered dataset (`plan.source.Source`).

    Each opening joins the job's iteration for the pass over the data that it is opened for.

    Attributes:
        options: How the service is read.
        dataset_id: What to read.
        cardinality: Number of elements, INFINITE or UNKNOWN.
        job_name: Whose iterations to share, as the dispatcher knows it; None: nobody's.
        spec: Spec of one element, or None.
        compression: "AUTO": what comes through a slow wire may be packed; None: it is not.
    """

    options: ReadingOptions
    dataset_id: str
    cardinality: int
    job_name: str | None = None
    spec: Spec | None = None
    compression: str | None = None
    _keeper: Keeper = field(default_factory=Keeper, repr=False)
    _latest: _Latest = field(default_factory=_Latest, repr=False)

    @property
    def element_spec(self) -> Spec | None:
        """Spec of one element, or None when only reading can tell."""
        return self.spec

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

    @property
    def keeper(self) -> Keeper:
        """Keeps what the readers gave, so that an interrupted iterator goes on."""
        return self._keeper

    @property
    def cannot_restore(self) -> str:
        # After an interruption a reader that is still open goes back.
        return "" if self.keeper.is_holding else _CANNOT_RESTORE

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        number = tuple(pass_number) or (0,)
        if self.keeper.is_holding:
            kept = self.keeper.take(position, number)
            if kept is not None:
                return cast(RemoteReader, kept)
        if position is not None:
            raise FailedPreconditionError(_CANNOT_RESTORE)
        if self.options.trainer_id and max(number) > _MOST_REPETITIONS:
            raise InvalidArgumentError(
                "Cross-trainer caching requires infinite datasets and disallows multiple "
                f"repetitions of the same dataset. Got repetition {max(number)}. Keep one "
                "iterator, or apply `distribute` again"
            )
        reader = RemoteReader(
            OpenIteration(
                client_id=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}",
                dataset_id=self.dataset_id,
                processing_mode=int(self.options.processing_mode),
                job_name=self.job_name,
                pass_number=number,
                seed=secrets.randbits(52),
                target_workers=self.options.target_workers,
                num_consumers=self.options.num_consumers,
                consumer_index=self.options.consumer_index,
                cross_trainer_cache=bool(self.options.trainer_id),
                trainer_id=self.options.trainer_id,
                visitation=self.options.visitation,
                ordered=self.options.ordered,
                remainder=self.options.remainder,
                cost=self.options.cost,
                cost_fn=self.options.cost_fn,
            ),
            dispatcher=self.options.service,
            dial=self._dial,
            connect_dispatcher=self._connect_dispatcher,
            connect=self._connect,
            target=Target(
                self.options.target_workers,
                static_policy=self.options.static_policy,
                heeds_tags=self.options.num_consumers is None,
                is_copy=self.options.processing_mode == ShardingPolicy.OFF,
            ),
            max_outstanding_requests=self.options.max_outstanding_requests,
            wait_timeout=self.options.wait_timeout,
            keeper=self.keeper,
            trainer_id=self.options.trainer_id,
            codec=codecs()[0] if self.compression == "AUTO" else "",
        )
        self._latest.reader = reader
        return reader

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, delivered in the latest iteration."""
        reader = self._latest.reader
        return {} if reader is None else reader.elements_by_worker()

    def skipped(self) -> int:
        """Return how many elements the latest iteration did not get: its trainer fell behind."""
        reader = self._latest.reader
        return 0 if reader is None else reader.skipped

    def lost_units(self) -> tuple[LostUnits, ...]:
        """Return what the latest iteration lost with workers; known at its end."""
        reader = self._latest.reader
        return () if reader is None else reader.lost

    def _dial(self) -> DispatcherStub:
        return DispatcherStub(self.options.service, security=self.options.security)

    def _connect_dispatcher(self) -> Channel:
        return zeromq.connect(
            self.options.service,
            reply_type=DispatcherReply,
            security=self.options.security,
            shared_memory=False,
        )

    def _connect(self, address: str) -> Channel:
        protocol = self.options.data_transfer_protocol
        if protocol in (None, "local"):
            if inprocess.is_local(address):
                return inprocess.connect(address)
            if protocol == "local" and inprocess.was_local(address):
                raise UnavailableError(f"the worker at {address}, of this process, has stopped")
            if protocol == "local":
                raise FailedPreconditionError(
                    'data_transfer_protocol="local" reads workers of this process alone, but the '
                    f"worker at {address} is in another; use None, "
                    '"shm" or "tcp"'
                )
        if protocol == "shm" and not addresses.is_this_machine(addresses.split(address)[0]):
            raise FailedPreconditionError(
                'data_transfer_protocol="shm" reads workers of this machine alone, but the worker '
                f'at {address} is on another, which offers "tcp"; use that, or None'
            )
        return zeromq.connect(
            address,
            reply_type=WorkerReply,
            security=self.options.security,
            shared_memory=protocol != "tcp",
        )
