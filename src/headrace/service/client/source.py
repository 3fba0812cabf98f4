"""The remote source: a dataset on the service, as a plan sees it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from headrace.data.at_exit import close_iterators_first
from headrace.element.packing import codecs
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.execution.build import start_above
from headrace.execution.delivered import NO_ORDER, Delivered
from headrace.execution.iterator import ElementIterator
from headrace.plan.determinism import with_fixed_seeds
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN, Position, Reader, Source
from headrace.plan.traverse import transform
from headrace.plan.units import Units
from headrace.rewrites.cut import Half, cut_as
from headrace.rewrites.optimize import prepare
from headrace.service.client.job_use import JobUse
from headrace.service.client.keeping import Keeper
from headrace.service.client.losses import report_loss
from headrace.service.client.opening import open_iteration
from headrace.service.client.options import ReadingOptions
from headrace.service.client.places import going_on, named_place, units_read
from headrace.service.client.reader import RemoteReader
from headrace.service.client.session import Session
from headrace.service.client.shell import Shell
from headrace.service.client.targets import Target
from headrace.service.client.visits import account_of, cannot_begin
from headrace.service.config import ShardingPolicy
from headrace.service.messages import (
    DispatcherReply,
    JobOptions,
    LostSplits,
    OpenIteration,
    OpenIterationReply,
    TaskAddress,
    WorkerReply,
)
from headrace.service.modes.ordered.plan_cut import InOrder
from headrace.service.modes.ordered.reader import NO_UNITS, ArrivingUnits, UpperReader, new_session
from headrace.service.stub import DispatcherStub
from headrace.service.worker.here import was_here
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel

__all__ = ["RemoteSource"]

#: The goodbye goes over the network, which is here by now.
close_iterators_first()


_CANNOT_RESTORE = (
    "an iterator over the data service cannot be restored in the middle of a pass where elements "
    "are not visited exactly once. Use ShardingPolicy.DYNAMIC (with "
    '`distribute`, and visitation="exactly_once", its default), or keep the state of an iterator '
    "that reads the dataset in this process, without `distribute`"
)
_FORKED = (
    "an iterator over the data service does not survive a fork: this process was forked from the "
    "one that reads with it. Make a new iterator in the child, with iter(dataset)"
)
_MOST_REPETITIONS = 1
"""Of one dataset whose elements trainers share: it has no end to come to."""


class _Latest:
    """The latest reader of a source in this process, for reports."""

    def __init__(self) -> None:
        self.reader: RemoteReader | ArrivingUnits | None = None

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
        half: How the plan is cut in two, where workers run the lower half alone (`rewrites.cut`).
            In order, `in_order` says how it is read from the start.
        units: Units that the lower half is dealt in.
        whole_stream: What in the upper half is about the whole stream, so that no other client may
            read the same; "": nothing.
        written: The plan, where its upper half is run here; None: what comes is what there is.
        in_order: How it is cut in order; None: there is no `written`.
        fixed_seeds: See `plan.source.Source`.
    """

    options: ReadingOptions
    dataset_id: str
    cardinality: int
    job_name: str | None = None
    spec: Spec | None = None
    compression: str | None = None
    half: str = ""
    units: int | None = None
    whole_stream: str = ""
    written: Node | None = None
    in_order: InOrder | None = field(default=None, repr=False)
    fixed_seeds: tuple[int, ...] = ()
    _counter: IterationCounter | None = field(default=None, repr=False)
    _occurrence: int = field(default=0, repr=False)
    _use: JobUse = field(default_factory=JobUse, repr=False)
    _seed: int | None = field(default=None, repr=False)
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
    def half_in_order(self) -> str:
        if not self.has_halves:
            return ""
        assert self.in_order is not None
        return self.in_order.half

    @property
    def has_halves(self) -> bool:
        return self._is_in_order or self.has_positions

    @property
    def _is_in_order(self) -> bool:
        return self.half.startswith("in order")

    @property
    def has_order(self) -> bool:
        return not self.has_positions

    @property
    def has_positions(self) -> bool:
        """Whether places say which elements were delivered, in no order."""
        options = self.options
        is_dealt = options.processing_mode is ShardingPolicy.DYNAMIC
        is_exact = is_dealt and options.visitation == "exactly_once"
        return is_exact and self.written is not None and not self.half

    @property
    def _lacks_plan(self) -> bool:
        options = self.options
        is_dealt = options.processing_mode is ShardingPolicy.DYNAMIC and not options.trainer_id
        is_exact = is_dealt and options.visitation == "exactly_once"
        is_alone = options.num_consumers is None
        return is_exact and is_alone and self.written is None and not self.keeper.is_holding

    @property
    def account(self) -> str:
        if self.written is None:
            return ""
        if not self._is_in_order:
            return account_of(self.written, self.options)
        assert self.in_order is not None
        return self.in_order.account()

    def seeded(self, seed: int) -> Source:
        return dataclasses.replace(self, _seed=seed) if self.written is not None else self

    def apart(self) -> RemoteSource:
        alone = dataclasses.replace(
            self.options,
            job_name=None,
            num_consumers=None,
            consumer_index=None,
            remainder="drop",
            trainer_id="",
            group="",
            group_terms="",
            cost="",
            cost_fn=b"",
        )
        return dataclasses.replace(
            self,
            options=alone,
            job_name=None,
            _counter=None,
            _use=JobUse(),
            _keeper=Keeper(),
            _latest=_Latest(),
        )

    def at_occurrence(self, occurrence: int) -> RemoteSource:
        return dataclasses.replace(self, _occurrence=occurrence)

    def cannot_begin_at(self, half: str, *, is_of_one_process: bool) -> str:
        assert self.written is not None
        return cannot_begin(self.written, cast(Half, half), is_of_one_process=is_of_one_process)

    def with_fixed_seeds(self, seeds: tuple[int, ...]) -> RemoteSource:
        return dataclasses.replace(self, fixed_seeds=seeds)

    @property
    def element_count(self) -> int | None:
        known = self.options.ordered and self.cardinality not in (INFINITE, UNKNOWN)
        return self.cardinality if known else None

    @property
    def meets_in(self) -> str:
        return self.job_name or "" if self.options.num_consumers is not None else ""

    @property
    def splittable(self) -> bool:
        return False

    @property
    def keeper(self) -> Keeper:
        """Keeps what the readers gave, so that an interrupted iterator goes on."""
        return self._keeper

    @property
    def cannot_restore(self) -> str:
        if self.has_halves:
            return ""
        if self.whole_stream and self.written is not None:
            return (
                f"{self.whole_stream} needs the whole stream, and runs in this process over what "
                "workers send in no order: read with `ordered=True`, or put that step after "
                "`distribute`"
            )
        if self._lacks_plan:
            return (
                "an iterator over a dataset of `from_dataset_id` has no state in any order, for "
                "the plan that it would be a place in is not here: read with `ordered=True`, or "
                "use `distribute`"
            )
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
        number = tuple((position or {}).get("iteration", pass_number)) or (0,)
        if self.counter is not None:  # of a place in a dataset that a function opened
            self.counter.advance(number[0])
        if self.written is not None and (self.half or "units" in (position or ())):
            return self._upper(self.written, position, number)
        if self.keeper.is_holding:
            kept = self.keeper.take(position, number)
            if kept is not None:
                return cast(RemoteReader, kept)
        opening, base = self._opening(number), None
        if self.has_positions:
            base = Delivered()
        if position is not None:
            if base is None or "positions" not in position:
                forked = not position.get("reader", _names_here()).startswith(_names_here())
                raise FailedPreconditionError(_FORKED if forked else _CANNOT_RESTORE)
            opening, base = going_on(opening, position)
        if self.options.trainer_id and max(number) > _MOST_REPETITIONS:
            raise InvalidArgumentError(
                "Cross-trainer caching requires infinite datasets and disallows multiple "
                f"repetitions of the same dataset. Got repetition {max(number)}. Keep one "
                "iterator, or apply `distribute` again"
            )
        reader = RemoteReader(
            opening,
            dispatcher=self.options.service,
            dial=self._dial,
            connect_dispatcher=self._connect_dispatcher,
            connect=self._connect,
            target=self._target(),
            max_outstanding_requests=self.options.max_outstanding_requests,
            wait_timeout=self.options.wait_timeout,
            keeper=self.keeper,
            trainer_id=self.options.trainer_id,
            cost_fn=self.options.cost_fn,
            codec=codecs()[0] if self.compression == "AUTO" else "",
            base=base,
            use=self._use,
            lose=self._lose,
            earlier_loss=self.keeper.take_loss(),
        )
        self._latest.reader = reader
        return reader

    def _target(self) -> Target:
        return Target(
            self.options.target_workers,
            static_policy=self.options.static_policy,
            heeds_tags=self.options.num_consumers is None,
            is_copy=self.options.processing_mode == ShardingPolicy.OFF,
        )

    def _opening(self, pass_number: tuple[int, ...]) -> OpenIteration:
        return OpenIteration(
            client_id=f"{_names_here()}{uuid.uuid4().hex}",
            dataset_id=self.dataset_id,
            job_name=self.job_name,
            epoch=pass_number,
            seed=secrets.randbits(52) if self._seed is None else self._seed,
            fixed_seeds=self.fixed_seeds,
            options=self._terms(),
            consumer_index=self.options.consumer_index,
            exclusive_reason=self.whole_stream,
        )

    def _terms(self) -> JobOptions:
        options = self.options
        return JobOptions(
            processing_mode=int(options.processing_mode),
            target_workers=options.target_workers,
            num_consumers=options.num_consumers,
            cross_trainer_cache=bool(options.trainer_id),
            visitation=options.visitation,
            ordered=self._is_in_order,
            remainder=options.remainder,
            cost_fn_id=options.cost,
            cost_fn_digest=hashlib.sha256(options.cost_fn).digest() if options.cost_fn else b"",
            partition_mode=self.half,
            num_splits=self.units,
            group=options.group,
            group_options=options.group_terms,
        )

    # --- the upper half -------------------------------------------------------------------------

    def _upper(
        self, written: Node, position: Position, pass_number: tuple[int, ...]
    ) -> UpperReader:
        """Return a reader of the upper half.

        Args:
            written: The plan.
            position: Where to begin: a place in a half, which may be another one.
            pass_number: The pass.
        """
        if "positions" in (position or ()):
            raise FailedPreconditionError(NO_ORDER)
        place = {"seed": self._seed, **(position or {})}
        made = cut_as(
            prepare(with_fixed_seeds(written, self.fixed_seeds)), self._half_at(position or {})
        )
        at, own = place.get("units"), made.options.seed
        opening = self._opening(pass_number)
        if not made.is_ordered:
            arriving = FromSource(
                source=dataclasses.replace(self, written=None, spec=None, _counter=None)
            )
            above = transform(
                made.above, lambda node: arriving if isinstance(node, Units) else node
            )
            seed = opening.seed if own is None else own
            over = dataclasses.replace(made, above=above)
            return UpperReader(
                lambda: start_above(over, NO_UNITS, seed=seed, pass_number=pass_number),
                position,
            )
        first, read = units_read(made, at)
        opening = msgspec.structs.replace(
            opening,
            options=msgspec.structs.replace(
                opening.options, partition_mode=made.told, num_splits=made.units, ordered=True
            ),
            exclusive_reason=self.whole_stream or "reading in order",
            first_split=first,
            delivered=read,
            seed=opening.seed if place["seed"] is None else place["seed"],
            start_position_id=""
            if position is None
            else named_place([at, made.half, place["seed"]]),
        )
        session = new_session(
            opening.client_id,
            self.options.service,
            self.options.max_outstanding_requests,
            self.options.wait_timeout,
            codec=codecs()[0] if self.compression == "AUTO" else "",
        )
        target = self._target()
        left = made.units - first - sum(stop - start for start, stop in read)
        units = ArrivingUnits(
            session,
            lambda session: self._shell(session, target),
            lambda shell: self._join(opening, shell, target, left),
            left,
        )
        self._latest.reader = units
        named: dict[str, Any] = {"half": made.half, "seed": opening.seed}
        if self.counter is not None:
            named["iteration"] = list(pass_number)

        def begin() -> ElementIterator:
            opened = units.join()
            if position is not None and opened.seed != opening.seed:
                raise FailedPreconditionError(
                    f"job {opened.job_name!r} reads this pass already, from another seed than that "
                    "of the state; choose another job_name"
                )
            named["seed"] = seed = opened.seed if own is None else own
            return start_above(made, units, seed=seed, pass_number=pass_number)

        return UpperReader(
            begin,
            at,
            units.close,
            named,
            lambda: report_loss(units.lost, self._lose),
            self.keeper.take_loss(),
        )

    def _half_at(self, position: dict[str, Any]) -> Half:
        """Return how the plan is cut for reading from a place on; {}: from the start."""
        half = cast(Half, position.get("half", self.half))
        if not half.startswith("in order"):
            return half
        assert self.in_order is not None
        if "half" not in position:
            return self.in_order.half
        if self.job_name is not None:
            self.in_order.keep(half)  # All passes of a job are cut alike.
        return half

    def _shell(self, session: Session, target: Target) -> Shell:
        return Shell(
            session,
            dispatcher=self.options.service,
            connect_dispatcher=self._connect_dispatcher,
            connect=self._connect,
            target=target,
            settles=False,
        )

    def _join(
        self, opening: OpenIteration, shell: Shell, target: Target, left: int
    ) -> OpenIterationReply:
        opened = open_iteration(
            opening,
            self._dial,
            dispatcher=self.options.service,
            wait_timeout=self.options.wait_timeout,
            target=target,
            keep=shell.line.keep,
            use=self._use,
            cost_fn=self.options.cost_fn,
        )
        shell.opened(opened)
        if not opened.finished:  # nobody else is let in before it is
            self._use.received()
        return opened

    @property
    def _lose(self) -> Callable[[Exception], None] | None:
        """How an error about missing elements is raised; None: they are only logged."""
        options = self.options
        is_promised = options.visitation == "exactly_once" and options.num_consumers is None
        return self.keeper.lose if is_promised and options.on_data_loss == "error" else None

    # --- reports --------------------------------------------------------------------------------

    def used_up(self, number: int) -> str:
        return self._use.used_up(number)

    def elements_by_worker(self) -> dict[str, int]:
        """Return how many elements each worker, by address, delivered in the latest iteration."""
        reader = self._latest.reader
        return {} if reader is None else reader.elements_by_worker()

    def skipped(self) -> int:
        """Return how many elements the latest iteration did not get: its trainer fell behind."""
        reader = self._latest.reader
        return 0 if reader is None else reader.skipped

    def lost_units(self) -> tuple[LostSplits, ...]:
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

    def _connect(self, task: TaskAddress) -> Channel:
        address = task.worker_address
        protocol = self.options.data_transfer_protocol
        if protocol in (None, "local"):
            if inprocess.is_in_process(address):
                return inprocess.connect(address)
            if protocol == "local" and was_here(task.worker_id):
                raise UnavailableError(f"the worker at {address}, of this process, has stopped")
            if protocol == "local":
                raise FailedPreconditionError(
                    'data_transfer_protocol="local" reads workers of this process alone, but the '
                    f"worker at {address} is in another; use None, "
                    '"shm" or "tcp"'
                )
        if protocol == "shm" and not addresses.is_local_host(addresses.split(address)[0]):
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


def _names_here() -> str:
    """Return how the names of readers of this process begin."""
    return f"{socket.gethostname()}-{os.getpid()}-"
