"""Remote source: a registered dataset of a service as a plan sees it."""

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

from headrace.data.iterator_cleanup import register_close_iterators
from headrace.element.frame_compression import available_codecs
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.execution.build import build_client_stage
from headrace.execution.delivered_elements import UNORDERED_STATE_MESSAGE, DeliveredElements
from headrace.execution.iterator import ElementIterator
from headrace.plan.determinism import with_fixed_seeds
from headrace.plan.elements import FromSource
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.source import INFINITE, UNKNOWN, Position, Reader, Source
from headrace.plan.traverse import transform
from headrace.rewrites.optimize import prepare
from headrace.rewrites.partition import PartitionMode, PlanPartition, partition_with_mode
from headrace.service.client.data_loss import report_loss
from headrace.service.client.exhausted_jobs import ExhaustedJobCheck
from headrace.service.client.iteration_opening import open_iteration
from headrace.service.client.options import ReadOptions
from headrace.service.client.read_session import ReadSession
from headrace.service.client.reader import RemoteReader
from headrace.service.client.reader_runner import ReaderRunner
from headrace.service.client.replay import ReplayRegistry
from headrace.service.client.saved_positions import (
    find_read_splits,
    position_digest,
    resume_iteration,
)
from headrace.service.client.task_selector import TaskSelector
from headrace.service.client.visitation import describe_partition, explain_unusable_position
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
from headrace.service.modes.ordered.client_stage import (
    NO_SPLITS,
    ArrivingSplits,
    ClientStageReader,
    create_ordered_session,
)
from headrace.service.modes.ordered.ordered_partition import OrderedPartition
from headrace.service.ranges import total_length
from headrace.service.stub import DispatcherStub
from headrace.service.worker.local_workers import is_local_worker
from headrace.transport import address as addresses
from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel

__all__ = ["RemoteSource"]

#: Leaving an iteration needs the network, which is imported by now.
register_close_iterators()


_CANNOT_RESTORE = (
    "an iterator over the data service can be restored within an epoch only if each element is "
    "delivered exactly once. Use ShardingPolicy.DYNAMIC with `distribute` and the default "
    'visitation="exactly_once", or save the state of an iterator without `distribute`'
)
_FORKED = (
    "an iterator over the data service cannot be used in a forked process. Create a new iterator "
    "in the child with iter(dataset)"
)
_MAX_EPOCH = 1
"""Maximum epoch of a dataset that trainers share, because it must be infinite."""


class _LatestReader:
    """Holder of a source's latest reader in this process, for reports."""

    def __init__(self) -> None:
        self.reader: RemoteReader | ArrivingSplits | None = None

    def __reduce__(self) -> tuple[type[_LatestReader], tuple[()]]:
        # Each process has its own readers.
        return _LatestReader, ()


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteSource(Source):
    """Elements of a registered dataset, produced by the workers (`plan.source.Source`).

    Each opening joins the job's iteration of the given epoch.

    Attributes:
        options: Reading options.
        dataset_id: ID of the dataset.
        cardinality: Number of elements, INFINITE or UNKNOWN.
        job_name: Job whose iterations to share, as the dispatcher knows it; None for a private job.
        spec: Spec of one element, or None.
        compression: "AUTO" allows compressed replies over slow networks; None disables them.
        partition_mode: Mode of the partition, if workers run only the worker stage
            (`rewrites.partition`). In ordered reading, `ordered_partition` has the mode for
            reading from the start.
        num_splits: Number of splits of the worker stage.
        exclusive_reason: Part of the client stage that depends on the whole stream, so that no
            other client may read the job; "" if there is none.
        remote_plan: The plan, if its client stage runs here; None if elements are used as they
            arrive.
        ordered_partition: Partition for ordered reading; None without `remote_plan`.
        fixed_seeds: See `plan.source.Source`.
    """

    options: ReadOptions
    dataset_id: str
    cardinality: int
    job_name: str | None = None
    spec: Spec | None = None
    compression: str | None = None
    partition_mode: str = ""
    num_splits: int | None = None
    exclusive_reason: str = ""
    remote_plan: Node | None = None
    ordered_partition: OrderedPartition | None = field(default=None, repr=False)
    fixed_seeds: tuple[int, ...] = ()
    _counter: IterationCounter | None = field(default=None, repr=False)
    _occurrence: int = field(default=0, repr=False)
    _job_check: ExhaustedJobCheck = field(default_factory=ExhaustedJobCheck, repr=False)
    _seed: int | None = field(default=None, repr=False)
    _replay_registry: ReplayRegistry = field(default_factory=ReplayRegistry, repr=False)
    _latest_reader: _LatestReader = field(default_factory=_LatestReader, repr=False)

    @property
    def element_spec(self) -> Spec | None:
        """Spec of one element, or None if only reading can tell."""
        return self.spec

    @property
    def size(self) -> int:
        """One index for the whole dataset; 0 or INFINITE if the cardinality is."""
        return self.cardinality if self.cardinality in (0, INFINITE) else 1

    @property
    def elements_per_index(self) -> int | None:
        return 1 if self.cardinality == INFINITE else None

    @property
    def ordered_partition_mode(self) -> str:
        if not self.has_ordered_partition:
            return ""
        assert self.ordered_partition is not None
        return self.ordered_partition.mode

    @property
    def has_ordered_partition(self) -> bool:
        return self._is_ordered or self.has_positions

    @property
    def _is_ordered(self) -> bool:
        return self.partition_mode.startswith("ordered")

    @property
    def has_order(self) -> bool:
        return not self.has_positions

    @property
    def has_positions(self) -> bool:
        """Whether unordered positions record which elements were delivered."""
        options = self.options
        is_dynamic = options.processing_mode is ShardingPolicy.DYNAMIC
        is_exact = is_dynamic and options.visitation == "exactly_once"
        return is_exact and self.remote_plan is not None and not self.partition_mode

    @property
    def _lacks_plan(self) -> bool:
        options = self.options
        is_dynamic = options.processing_mode is ShardingPolicy.DYNAMIC and not options.trainer_id
        is_exact = is_dynamic and options.visitation == "exactly_once"
        return (
            is_exact
            and options.num_consumers is None
            and self.remote_plan is None
            and not self.replay_buffers.can_reopen
        )

    @property
    def explanation(self) -> str:
        if self.remote_plan is None:
            return ""
        if not self._is_ordered:
            return describe_partition(self.remote_plan, self.options)
        assert self.ordered_partition is not None
        return self.ordered_partition.explain()

    def with_seed(self, seed: int) -> Source:
        return dataclasses.replace(self, _seed=seed) if self.remote_plan is not None else self

    def detach(self) -> RemoteSource:
        private_options = dataclasses.replace(
            self.options,
            job_name=None,
            num_consumers=None,
            consumer_index=None,
            remainder="drop",
            trainer_id="",
            group="",
            group_options="",
            cost_fn_id="",
            cost_fn=b"",
        )
        return dataclasses.replace(
            self,
            options=private_options,
            job_name=None,
            _counter=None,
            _job_check=ExhaustedJobCheck(),
            _replay_registry=ReplayRegistry(),
            _latest_reader=_LatestReader(),
        )

    def with_occurrence(self, occurrence: int) -> RemoteSource:
        return dataclasses.replace(self, _occurrence=occurrence)

    def explain_unusable_position(self, mode: str, *, is_single_process: bool) -> str:
        assert self.remote_plan is not None
        return explain_unusable_position(
            self.remote_plan, cast(PartitionMode, mode), is_single_process=is_single_process
        )

    def with_fixed_seeds(self, seeds: tuple[int, ...]) -> RemoteSource:
        return dataclasses.replace(self, fixed_seeds=seeds)

    @property
    def element_count(self) -> int | None:
        is_known = self.options.ordered and self.cardinality not in (INFINITE, UNKNOWN)
        return self.cardinality if is_known else None

    @property
    def coordinated_job(self) -> str:
        return self.job_name or "" if self.options.num_consumers is not None else ""

    @property
    def splittable(self) -> bool:
        return False

    @property
    def replay_buffers(self) -> ReplayRegistry:
        """Registry of the readers, which replay elements after an interrupt."""
        return self._replay_registry

    @property
    def restore_obstacle(self) -> str:
        if self.has_ordered_partition:
            return ""
        if self.exclusive_reason and self.remote_plan is not None:
            return (
                f"{self.exclusive_reason} needs the whole stream, but runs in this process on "
                "elements that arrive in no fixed order: set `ordered=True`, or move that step "
                "after `distribute`"
            )
        if self._lacks_plan:
            return (
                "an unordered iterator over a dataset of `from_dataset_id` has no state, because "
                "this process does not have the dataset's plan: set `ordered=True`, or use "
                "`distribute`"
            )
        # After an interrupt, a reader that is still open is rewound.
        return "" if self.replay_buffers.can_reopen else _CANNOT_RESTORE

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        epoch = tuple((position or {}).get("iteration", pass_number)) or (0,)
        if self.counter is not None:  # set by a position in a dataset that a function opened
            self.counter.advance(epoch[0])
        if self.remote_plan is not None and (self.partition_mode or "splits" in (position or ())):
            return self._client_stage_reader(self.remote_plan, position, epoch)
        if self.replay_buffers.can_reopen:
            reopened = self.replay_buffers.reopen(position, epoch)
            if reopened is not None:
                return cast(RemoteReader, reopened)
        open_request, base = self._make_open_request(epoch), None
        if self.has_positions:
            base = DeliveredElements()
        if position is not None:
            if base is None or "positions" not in position:
                prefix = _process_prefix()
                is_forked = not position.get("reader", prefix).startswith(prefix)
                raise FailedPreconditionError(_FORKED if is_forked else _CANNOT_RESTORE)
            open_request, base = resume_iteration(open_request, position)
        if self.options.trainer_id and max(epoch) > _MAX_EPOCH:
            raise InvalidArgumentError(
                "Cross-trainer caching requires infinite datasets and disallows multiple "
                f"repetitions of the same dataset. Got repetition {max(epoch)}. Keep one "
                "iterator, or apply `distribute` again"
            )
        reader = RemoteReader(
            open_request,
            dispatcher=self.options.service,
            open_stub=self._open_stub,
            connect_dispatcher=self._connect_dispatcher,
            connect_worker=self._connect_worker,
            task_selector=self._create_task_selector(),
            max_outstanding_requests=self.options.max_outstanding_requests,
            wait_timeout=self.options.wait_timeout,
            replay_registry=self.replay_buffers,
            trainer_id=self.options.trainer_id,
            cost_fn=self.options.cost_fn,
            codec=available_codecs()[0] if self.compression == "AUTO" else "",
            base=base,
            job_check=self._job_check,
            on_loss=self._on_loss,
            earlier_loss=self.replay_buffers.take_loss_error(),
        )
        self._latest_reader.reader = reader
        return reader

    def _create_task_selector(self) -> TaskSelector:
        return TaskSelector(
            self.options.target_workers,
            static_policy=self.options.static_policy,
            uses_tags=self.options.num_consumers is None,
            is_copy=self.options.processing_mode == ShardingPolicy.OFF,
        )

    def _make_open_request(self, epoch: tuple[int, ...]) -> OpenIteration:
        return OpenIteration(
            client_id=f"{_process_prefix()}{uuid.uuid4().hex}",
            dataset_id=self.dataset_id,
            job_name=self.job_name,
            epoch=epoch,
            seed=self._draw_seed(),
            fixed_seeds=self.fixed_seeds,
            options=self._job_options(),
            consumer_index=self.options.consumer_index,
            exclusive_reason=self.exclusive_reason,
        )

    def _draw_seed(self) -> int:
        """Return the seed of this source, or a random one."""
        return secrets.randbits(52) if self._seed is None else self._seed

    def _job_options(self) -> JobOptions:
        options = self.options
        return JobOptions(
            processing_mode=int(options.processing_mode),
            target_workers=options.target_workers,
            num_consumers=options.num_consumers,
            cross_trainer_cache=bool(options.trainer_id),
            visitation=options.visitation,
            ordered=self._is_ordered,
            remainder=options.remainder,
            cost_fn_id=options.cost_fn_id,
            cost_fn_digest=hashlib.sha256(options.cost_fn).digest() if options.cost_fn else b"",
            partition_mode=self.partition_mode,
            num_splits=self.num_splits,
            group=options.group,
            group_options=options.group_options,
        )

    # --- client stage -----------------------------------------------------------------------------

    def _client_stage_reader(
        self, plan: Node, position: Position, epoch: tuple[int, ...]
    ) -> ClientStageReader:
        """Return a reader of the client stage.

        Args:
            plan: The plan.
            position: Position to start from, which may be of another partition mode.
            epoch: The epoch.
        """
        if "positions" in (position or ()):
            raise FailedPreconditionError(UNORDERED_STATE_MESSAGE)
        saved_seed = (position or {}).get("seed", self._seed)
        saved_state = (position or {}).get("splits")
        partition = partition_with_mode(
            prepare(with_fixed_seeds(plan, self.fixed_seeds)),
            self._partition_mode_at(position or {}),
        )
        if not partition.is_ordered:
            return self._unordered_stage_reader(partition, position, epoch)
        own_seed = partition.options.seed
        open_request = self._make_open_request(epoch)
        first, read = find_read_splits(partition, saved_state)
        open_request = msgspec.structs.replace(
            open_request,
            options=msgspec.structs.replace(
                open_request.options,
                partition_mode=partition.worker_mode,
                num_splits=partition.num_splits,
                ordered=True,
            ),
            exclusive_reason=self.exclusive_reason or "ordered reading",
            first_split=first,
            delivered=read,
            seed=open_request.seed if saved_seed is None else saved_seed,
            start_position_id=""
            if position is None
            else position_digest([saved_state, partition.mode, saved_seed]),
        )
        session = create_ordered_session(
            open_request.client_id,
            self.options.service,
            self.options.max_outstanding_requests,
            self.options.wait_timeout,
            codec=available_codecs()[0] if self.compression == "AUTO" else "",
        )
        task_selector = self._create_task_selector()
        num_splits = partition.num_splits - first - total_length(read)
        splits = ArrivingSplits(
            session,
            lambda session: self._create_runner(session, task_selector),
            lambda runner: self._open_iteration(open_request, runner, task_selector),
            num_splits,
            self.lost_split_error,
        )
        self._latest_reader.reader = splits
        state_fields: dict[str, Any] = {"partition_mode": partition.mode, "seed": open_request.seed}
        if self.counter is not None:
            state_fields["iteration"] = list(epoch)

        def create_iterator() -> ElementIterator:
            reply = splits.open_iteration()
            if position is not None and reply.seed != open_request.seed:
                raise FailedPreconditionError(
                    f"job {reply.job_name!r} already reads this epoch with another seed than that "
                    "of the state; use another job_name"
                )
            state_fields["seed"] = seed = reply.seed if own_seed is None else own_seed
            return build_client_stage(partition, splits, seed=seed, epochs=epoch)

        return ClientStageReader(
            create_iterator,
            saved_state,
            splits.close,
            state_fields,
            lambda: report_loss(splits.unreported_losses, self._on_loss),
            self.replay_buffers.take_loss_error(),
        )

    def _unordered_stage_reader(
        self, partition: PlanPartition, position: Position, epoch: tuple[int, ...]
    ) -> ClientStageReader:
        """Return a reader of a client stage that reads elements as they arrive."""
        arriving = FromSource(
            source=dataclasses.replace(self, remote_plan=None, spec=None, _counter=None)
        )
        client_stage = transform(
            partition.client_stage, lambda node: arriving if isinstance(node, ReadSplits) else node
        )
        partition = dataclasses.replace(partition, client_stage=client_stage)
        own_seed = partition.options.seed
        seed = self._draw_seed() if own_seed is None else own_seed
        return ClientStageReader(
            lambda: build_client_stage(partition, NO_SPLITS, seed=seed, epochs=epoch), position
        )

    def _partition_mode_at(self, position: dict[str, Any]) -> PartitionMode:
        """Return the partition mode for reading from a position; {} is the start."""
        mode = cast(PartitionMode, position.get("partition_mode", self.partition_mode))
        if not mode.startswith("ordered"):
            return mode
        assert self.ordered_partition is not None
        if "partition_mode" not in position:
            return self.ordered_partition.mode
        if self.job_name is not None:
            self.ordered_partition.fix_mode(mode)  # all epochs of a job have the same partition
        return mode

    def _create_runner(self, session: ReadSession, task_selector: TaskSelector) -> ReaderRunner:
        return ReaderRunner(
            session,
            dispatcher=self.options.service,
            connect_dispatcher=self._connect_dispatcher,
            connect_worker=self._connect_worker,
            task_selector=task_selector,
            reports_consumption=False,
        )

    def _open_iteration(
        self, open_request: OpenIteration, runner: ReaderRunner, task_selector: TaskSelector
    ) -> OpenIterationReply:
        reply = open_iteration(
            open_request,
            self._open_stub,
            dispatcher=self.options.service,
            wait_timeout=self.options.wait_timeout,
            task_selector=task_selector,
            keep_channel=runner.channel_handover.put,
            job_check=self._job_check,
            cost_fn=self.options.cost_fn,
        )
        runner.iteration_opened(reply)
        if not reply.finished:  # no other client may join before the end
            self._job_check.element_received()
        return reply

    @property
    def _on_loss(self) -> Callable[[Exception], None] | None:
        """Receiver of the error about missing elements; None if they are only logged."""
        options = self.options
        is_promised = options.visitation == "exactly_once" and options.num_consumers is None
        return (
            self.replay_buffers.schedule_loss_error
            if is_promised and options.on_data_loss == "error"
            else None
        )

    @property
    def lost_split_error(self) -> Callable[[int], Exception] | None:
        """Makes the error that ordered reading raises for a split that killed each worker.

        None reports such splits at the end.
        """
        return None

    # --- reports ----------------------------------------------------------------------------------

    def explain_exhausted(self, number: int) -> str:
        return self._job_check.exhausted_message(number)

    def elements_by_worker(self) -> dict[str, int]:
        """Return the elements delivered by each worker address in the latest iteration."""
        reader = self._latest_reader.reader
        return {} if reader is None else reader.elements_by_worker()

    def skipped(self) -> int:
        """Return the number of elements skipped in the latest iteration by a slow trainer."""
        reader = self._latest_reader.reader
        return 0 if reader is None else reader.skipped

    def losses(self) -> tuple[LostSplits, ...]:
        """Return the losses of the latest iteration; known at its end."""
        reader = self._latest_reader.reader
        return () if reader is None else reader.losses

    def _open_stub(self) -> DispatcherStub:
        return DispatcherStub(self.options.service, security=self.options.security)

    def _connect_dispatcher(self) -> Channel:
        return zeromq.connect(
            self.options.service,
            reply_type=DispatcherReply,
            security=self.options.security,
            shared_memory=False,
        )

    def _connect_worker(self, task: TaskAddress) -> Channel:
        address = task.worker_address
        protocol = self.options.data_transfer_protocol
        if protocol in (None, "local"):
            if inprocess.is_in_process(address):
                return inprocess.connect(address)
            if protocol == "local" and is_local_worker(task.worker_id):
                raise UnavailableError(f"the worker at {address} in this process has stopped")
            if protocol == "local":
                raise FailedPreconditionError(
                    'data_transfer_protocol="local" requires workers in this process, but the '
                    f'worker at {address} is in another process; use None, "shm" or "tcp"'
                )
        if protocol == "shm" and not addresses.is_local_host(addresses.split(address)[0]):
            raise FailedPreconditionError(
                'data_transfer_protocol="shm" requires workers on this machine, but the worker at '
                f'{address} is on another machine; use None or "tcp"'
            )
        return zeromq.connect(
            address,
            reply_type=WorkerReply,
            security=self.options.security,
            shared_memory=protocol != "tcp",
        )


def _process_prefix() -> str:
    """Return the prefix of the names of this process's readers."""
    return f"{socket.gethostname()}-{os.getpid()}-"
