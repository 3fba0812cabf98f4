"""Replicas in several processes, on one machine or many: one program, started once for each worker.

The workers meet in the process of the first one, the chief or worker 0 (`meeting/`): what replicas
have is added up there, in the order of the workers, so that all get the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_instance, check_seconds
from headrace.cluster.environment import TFConfigClusterResolver
from headrace.cluster.resolver import ClusterResolver
from headrace.cluster.spec import EVALUATOR, PS, ClusterSpec, check_task, rank, workers
from headrace.data.at_exit import close_at_exit, close_iterators_first
from headrace.data.dataset import Dataset
from headrace.distribute.agreement import (
    Calls,
    DirectSums,
    StepAgreement,
    rows_of_all,
    said_by_all,
)
from headrace.distribute.collectives import Axis, ReduceOp, concatenated, finished, total_and_count
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.meeting.hall import ALL, ANY, ERROR, FIRST
from headrace.distribute.meeting.member import Member
from headrace.distribute.meeting.messages import MemberReply
from headrace.distribute.meeting.place import LARGEST_BYTES, place_at
from headrace.distribute.meeting.summing import summed
from headrace.distribute.strategy import Strategy
from headrace.errors import FailedPreconditionError, HeadraceError, InvalidArgumentError
from headrace.execution.build import draw_seed
from headrace.frameworks.framework import Device, device_names, framework_named
from headrace.plan.options import AutoShardPolicy
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Channel
from headrace.transport.security import Security, check_security

__all__ = ["MultiWorkerMirroredStrategy"]

_GOLDEN = 0x9E3779B97F4A7C15
_SEEDS = 1 << 52
"""As many as `draw_seed` draws from."""
_LONGEST_PATIENCE = 86_400.0
_LONGEST_ERROR = 2_000
"""Characters of an error that the other workers hear."""

#: Leaving goes over the network, which is here by now.
close_iterators_first()


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas of several workers, each a process that runs the same program.

    Every worker makes its own, and waits until all have. Then they do the same in the same order:
    what needs all of them (`reduce`, `gather`, `all_reduce`, steps of a distributed dataset) waits
    for the slowest. One that is missing for `timeout` seconds, or whose process has ended, is named
    by an UnavailableError on all others. So is one on which `run` fails, unless it fails on all.

    >>> import headrace as hr
    >>> alone = hr.distribute.MultiWorkerMirroredStrategy()  # without TF_CONFIG there is one worker
    >>> alone.num_replicas_in_sync
    1

    Args:
        cluster_resolver: Says which workers there are, and which of them this is; None: TF_CONFIG
            does.
        framework: "numpy": values are NumPy arrays; None: that. "jax" and "torch": arrays of
            theirs. Processes of JAX become one program over the devices of all, unless JAX was used
            before; with `security` call `jax.distributed.initialize()` first.
        devices: Of this worker's replicas, such as "cpu:0", "cpu:1": as many as of each other
            worker; None: one.
        timeout: Seconds that the others are waited for, also at the beginning.
        security: The keys of a server, the same pair on all workers; required where the first
            worker's address is not loopback, since workers run functions.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        framework: str | None = None,
        *,
        devices: Sequence[str] | None = None,
        timeout: float = 600.0,
        security: Security | None = None,
    ) -> None:
        if cluster_resolver is not None:
            check_instance("cluster_resolver", cluster_resolver, ClusterResolver)
        check_seconds("timeout", timeout)
        check_security(security)
        found = framework_named(framework)
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        self._names, self._rank, at = _place_in(self._resolver)
        self._workers = len(self._names)
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._seed = 0
        #: Devices of the replicas of all workers, once they were asked for.
        self._mesh: tuple[Device, ...] = ()
        #: Whether workers may use the framework's own ways to each other.
        self._may_be_direct = False
        self._member: Member | None = None
        self._leave: Callable[[], object] = _nothing
        if self._workers == 1:
            super().__init__(device_names(devices, found), found)
            return
        member, self._leave = _join(at, self._rank, self._names, float(timeout), security)
        self._member = member
        try:
            # Before anybody asks for its devices. The ways have no keys.
            host = None if security is not None else addresses.local_address_for(at)
            self._may_be_direct = found.join_workers(
                self._rank,
                self._workers,
                host,
                float(timeout),
                lambda own: said_by_all(member, f"what each has of {found.name}", own),
            )
            self._direct = DirectSums(
                member, found, self._rank, self._workers, at, float(timeout), self._may_be_direct
            )
            super().__init__(device_names(devices, found), found)
            self._seed = _greet(member, self._names, len(self._devices))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the others; the end of the program does so, too. May be called twice."""
        self._leave()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What says which workers there are."""
        return self._resolver

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        return self._workers * len(self._devices)

    @property
    def first_replica(self) -> int:
        """The number of this worker's first replica among those of all."""
        return self._rank * len(self._devices)

    def _input_context(self) -> InputContext:
        return InputContext(self._workers, self._rank, self.num_replicas_in_sync)

    def _wraps_arrays(self) -> bool:
        return self._workers > 1

    def _number(self, what: str) -> int:
        """Return how many of something this is, on each worker the same."""
        return next(self._numbers[what])

    # --- input --------------------------------------------------------------------------------

    def _agreement(self, batch_size: int | None = None) -> Callable[[], StepAgreement] | None:
        member = self._member
        if member is None:
            return None
        dataset, iterators = self._number("dataset"), itertools.count(1)
        # A part of the name: with others on some workers, rows would be read twice, or by nobody.
        size = "" if batch_size is None else f" (batches of {batch_size})"
        return lambda: StepAgreement(
            member, f"pass {next(iterators)} over distributed dataset {dataset}{size}"
        )

    def _seed_for(self, dataset: Dataset) -> int | None:
        if self._member is None:
            return None
        copies_differ = dataset.options().auto_shard_policy is AutoShardPolicy.OFF
        number = self._number("seed") * self._workers + (self._rank if copies_differ else 0)
        return (self._seed + number * _GOLDEN) % _SEEDS

    def _check_options(self, options: InputOptions) -> None:
        if options.is_per_replica and self._workers > 1:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in "
                "distribute_datasets_from_function of MirroredStrategy; workers read what "
                "dataset_fn makes for each of them"
            )

    def _rows_of_all(self, rows: list[int]) -> list[int]:
        return rows if self._member is None else rows_of_all(self._member, rows)

    # --- running ------------------------------------------------------------------------------

    def _run_all(self, on_replica: Callable[[int, Any], Any]) -> Sequence[Any]:
        try:
            return super()._run_all(on_replica)
        except Exception as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: Exception) -> None:
        """End the session, unless `run` fails on all workers.

        This worker does not come to what the others do in their step. Without this its next
        reduction would be added to what they bring to another one.
        """
        if self._member is None:
            return
        words = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        text = np.frombuffer(words.encode(errors="replace"), np.uint8)
        with contextlib.suppress(HeadraceError):  # the session is over, and all know why
            number = self._member.come("strategy.run", ERROR, arrays=[text])
            self._member.forget([number])

    # --- programs over all workers ------------------------------------------------------------

    def mesh_devices(self) -> tuple[Device, ...]:
        """Return the devices of the replicas of all workers, in the replicas' order.

        Raises:
            ValueError: The framework has no such programs.
            FailedPreconditionError: The workers' processes are not one for it.
        """
        if self._member is None:
            return super().mesh_devices()
        program = self.framework.program()
        if not self._may_be_direct:
            raise FailedPreconditionError(
                "one program, or one array, for the replicas of several workers takes processes "
                "that JAX knows as one: where security= is wanted, or JAX was used before this "
                "strategy was made, call jax.distributed.initialize() first, on all workers; or "
                "use run"
            )
        if not self._mesh:
            own = program.names_of(self.framework_devices)
            said = said_by_all(self._member, "the devices of each worker", own)
            self._mesh = program.devices_named([name for each in said for name in each])
        return self._mesh

    def calls_of_all(self, what: str) -> Calls | None:
        """Return what workers say before they call a program together; None: there are no others.

        Args:
            what: The program is.
        """
        if self._member is None:
            return None
        name = f"{what} {self._number(what)}"
        return Calls(self._member, self._names, name, self.framework.program().is_loss)

    # --- values -------------------------------------------------------------------------------

    def reduce_columns(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Any]],
        axis: Axis = None,
        what: str | None = None,
    ) -> list[Any]:
        """Return the sums or means of what all replicas have, all in one exchange."""
        member, framework = self._member, self.framework
        if member is None or not columns:
            return super().reduce_columns(op, columns, axis)
        pairs = [total_and_count(values, axis, framework) for values in columns]
        totals = [total for total, _ in pairs]
        device = self.framework_devices[0]
        direct = [self._direct.takes(total, device) for total in totals]
        here = [
            np.asarray(framework.numpy(total))
            for total, is_direct in zip(totals, direct, strict=True)
            if not is_direct
        ]
        counts = np.array([count for _, count in pairs] if op is ReduceOp.MEAN else [], np.int64)
        words = what or f"a reduction ({op.name})"
        # All workers say the same, so that none waits for another elsewhere.
        for total, is_direct in zip(totals, direct, strict=True):
            words += f" with {total.dtype} of shape {tuple(total.shape)}" if is_direct else ""
        *sums, counts = summed(member, [*here, counts], words)
        rest = iter(sums)
        large = iter(
            self._direct.sums([t for t, is_one in zip(totals, direct, strict=True) if is_one])
        )
        numbers = counts.tolist() or [0] * len(totals)
        return [
            finished(
                op,
                next(large) if is_direct else self._put(next(rest)),
                count,
                framework,
            )
            for total, is_direct, count in zip(totals, direct, numbers, strict=True)
        ]

    def gather_replicas(self, values: Sequence[Any], axis: int, what: str | None = None) -> Any:
        """Return what all replicas have, one after another."""
        here = concatenated(values, axis, self.framework)
        if self._member is None:
            return here
        array = np.asarray(self.framework.numpy(here))
        words = what or f"a gathering along axis {axis}"
        found = self._member.meet(words, ALL, arrays=[array])
        return self._put(concatenated(found.arrays, axis))

    def value_of_first(self, value: Any, what: str) -> Any:
        """Return what the first worker has; all workers have a value of one shape and dtype."""
        if self._member is None:
            return value
        array = np.asarray(self.framework.numpy(self.framework.array(value)))
        words = f"{what}, of shape {array.shape} and dtype {array.dtype}"
        found = self._member.meet(words, FIRST, arrays=[] if self._rank else [array])
        return self._put(found.arrays[0])

    def _put(self, array: NDArray[Any]) -> Any:
        """Return an array that came from the others as one of the framework."""
        return self.framework.put([array], self.framework_devices[:1])[0]


# --- who takes part ----------------------------------------------------------------------------


def _place_in(resolver: ClusterResolver) -> tuple[list[str], int, str]:
    """Return the workers' names, which of them this is, and where the first one listens.

    An evaluator, and a process without a cluster, works alone.

    Raises:
        InvalidArgumentError: The cluster has no workers, or this process is none of them.
    """
    spec = resolver.cluster_spec()
    alone = (["worker 0"], 0, "")
    if not spec.jobs:
        return alone
    if not spec:
        raise InvalidArgumentError(
            f"the cluster of {resolver!r} has {', '.join(map(repr, spec.jobs))} and not one task "
            "of it, so each process would train alone: list the workers' addresses, look at the "
            "labels that are asked for, or leave out the cluster to train alone"
        )
    check_task(spec, resolver.task_type, resolver.task_id)
    assert resolver.task_type is not None
    assert resolver.task_id is not None
    if resolver.task_type == EVALUATOR:
        return alone
    tasks = workers(spec)
    if resolver.task_type == PS or not tasks:
        raise InvalidArgumentError(
            f"this process is {resolver.task_type!r} task {resolver.task_id} of {spec}, and a "
            "MultiWorkerMirroredStrategy has chief and workers only; parameter servers belong to "
            "ParameterServerStrategy"
        )
    names = [f"{kind} {index} ({_address(spec, kind, index)})" for kind, index in tasks]
    return names, rank(spec, resolver.task_type, resolver.task_id), _address(spec, *tasks[0])


def _address(spec: ClusterSpec, kind: str, index: int) -> str:
    return spec.task_address(kind, index).rpartition("://")[2]


def _join(
    at: str,
    rank: int,
    names: Sequence[str],
    timeout: float,
    security: Security | None,
) -> tuple[Member, Callable[[], object]]:
    """Return this worker's member of the session, and what ends it; dropping it does.

    Raises:
        ValueError: The address can be reached from elsewhere, and there are no keys.
        OSError: The first worker's port is in use.
    """
    host, _ = addresses.split(at)
    if security is None and not addresses.is_loopback(host):
        raise ValueError(
            f"the first worker listens at {at}, which other machines can reach, so security=... is "
            "needed: whoever reaches that port can take part. Create keys with `headrace keys new "
            'DIR`, and pass security=Security.load(DIR, "server") on all workers'
        )
    channel: Channel
    release: Callable[[], object] = _nothing
    if rank == 0:
        place, release = place_at(at, names, security)
        channel = place.own_end()
    else:
        channel = zeromq.connect(
            at,
            reply_type=MemberReply,
            security=None if security is None else security.as_client(),
            # Who is silent and who is gone are told apart: the first is waited for.
            keepalive_timeout=min(2 * timeout + 60.0, _LONGEST_PATIENCE),
            request_bytes=LARGEST_BYTES,
        )
    member = Member(channel, rank=rank, names=names, timeout=timeout)
    # Not with the strategy: datasets and iterators outlive it.
    finalizer = weakref.finalize(member, _leave, member.end.close, release)
    close_at_exit(member, finalizer)
    return member, finalizer


def _leave(close: Callable[[], object], release: Callable[[], object]) -> None:
    close()
    release()


def _nothing() -> None:
    return


def _greet(member: Member, names: Sequence[str], replicas: int) -> int:
    """Wait for all workers, and see that they mean the same; return the first one's seed.

    Raises:
        InvalidArgumentError: They do not.
    """
    terms = {"workers": list(names), "replicas": replicas, "seed": draw_seed()}
    first, *others = said_by_all(member, "the beginning", terms)
    for other, name in zip(others, names[1:], strict=False):
        for word in ("workers", "replicas"):
            if other[word] != first[word]:
                raise InvalidArgumentError(
                    f"every worker must have the same cluster and the same number of replicas, but "
                    f"{names[0]} has {word} {first[word]}, and {name} has {word} {other[word]}"
                )
    # Whoever is here has heard it: a first worker that ended now, with answers still on their way,
    # would be waited for like one that has not started.
    member.meet("the end of the beginning", ANY)
    seed: int = first["seed"]
    return seed
