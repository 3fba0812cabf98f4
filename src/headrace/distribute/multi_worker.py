"""Replicas in several processes, on one or more machines: one program, run once per worker.

The workers' collectives run in the process of the first worker, the chief or worker 0
(`collective_server/`). It sums the replicas' values in worker order, so that all workers get
bitwise identical results.
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
from headrace.data.dataset import Dataset
from headrace.data.iterator_cleanup import close_at_exit, register_close_iterators
from headrace.distribute.agreement import (
    DirectAllReduce,
    ProgramCalls,
    StepAgreement,
    gather_json,
    gather_row_counts,
)
from headrace.distribute.collective_server.chunked_sums import sum_arrays
from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.messages import CollectiveReply
from headrace.distribute.collective_server.server import MAX_MESSAGE_BYTES, acquire_server
from headrace.distribute.collective_server.state import ALL, ANY, ERROR, FIRST
from headrace.distribute.collectives import (
    Axis,
    ReduceOp,
    concatenate_values,
    finish_reduction,
    sum_and_count,
)
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.strategy import Strategy
from headrace.errors import FailedPreconditionError, HeadraceError, InvalidArgumentError
from headrace.execution.build import draw_seed
from headrace.frameworks.framework import Device, FrameworkName, device_names, find_framework
from headrace.plan.options import AutoShardPolicy
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Channel
from headrace.transport.security import Security, check_security

__all__ = ["MultiWorkerMirroredStrategy"]

_HASH_MULTIPLIER = 0x9E3779B97F4A7C15
_NUM_SEEDS = 1 << 52
"""Number of seeds that `draw_seed` chooses from."""
_MAX_TIMEOUT = 86_400.0
_MAX_ERROR_LENGTH = 2_000
"""Maximum number of characters of an error sent to the other workers."""

# Leaving uses the network, whose modules are imported by now.
register_close_iterators()


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas of several workers, each a process that runs the same program.

    Every worker creates its own strategy and waits until all have. Then all run the same operations
    in the same order: each operation that involves all of them (`reduce`, `gather`, `all_reduce`,
    steps of a distributed dataset) waits for the slowest. A worker that is missing for `timeout`
    seconds, or whose process has ended, is named by an UnavailableError on all others. So is a
    worker on which `run` fails, unless it fails on all.

    >>> import headrace as hr
    >>> alone = hr.distribute.MultiWorkerMirroredStrategy()  # without TF_CONFIG there is one worker
    >>> alone.num_replicas_in_sync
    1

    Args:
        cluster_resolver: Provides the workers and this process's task; None reads TF_CONFIG.
        framework: "numpy" or None: values are NumPy arrays. "jax" and "torch": values are arrays of
            that framework. JAX processes become one program over all devices, unless JAX was used
            before; with `security` call `jax.distributed.initialize()` first.
        devices: Devices of this worker's replicas, such as "cpu:0", "cpu:1"; the same number on
            every worker. None: one device.
        timeout: Seconds to wait for other workers, also at the start.
        security: Server keys, the same pair on all workers; required unless the first worker's
            address is loopback, since workers run functions.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        framework: FrameworkName | None = None,
        *,
        devices: Sequence[str] | None = None,
        timeout: float = 600.0,
        security: Security | None = None,
    ) -> None:
        if cluster_resolver is not None:
            check_instance("cluster_resolver", cluster_resolver, ClusterResolver)
        check_seconds("timeout", timeout)
        check_security(security)
        found = find_framework(framework)
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        self._names, self._rank, address = _find_rank(self._resolver)
        self._num_workers = len(self._names)
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._seed = 0
        #: Devices of the replicas of all workers, once requested.
        self._mesh_devices: tuple[Device, ...] = ()
        #: Whether workers may connect through the framework's own collectives.
        self._allow_direct = False
        self._client: CollectiveClient | None = None
        self._finalizer: Callable[[], object] = _do_nothing
        if self._num_workers == 1:
            super().__init__(device_names(devices, found), found)
            return
        client, self._finalizer = _join_session(
            address, self._rank, self._names, float(timeout), security
        )
        self._client = client
        try:
            # Before any use of its devices. The framework's connections do not authenticate.
            host = None if security is not None else addresses.local_address_for(address)
            self._allow_direct = found.join_workers(
                self._rank,
                self._num_workers,
                host,
                float(timeout),
                lambda own: gather_json(client, f"the setup of {found.name}", own),
            )
            self._direct_allreduce = DirectAllReduce(
                client,
                found,
                self._rank,
                self._num_workers,
                address,
                float(timeout),
                self._allow_direct,
            )
            super().__init__(device_names(devices, found), found)
            self._seed = _exchange_setup(client, self._names, len(self._devices))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the session, as does the end of the program. Idempotent."""
        self._finalizer()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Resolver that provides the workers."""
        return self._resolver

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of all workers."""
        return self._num_workers * len(self._devices)

    @property
    def first_replica(self) -> int:
        """Index of this worker's first replica among those of all workers."""
        return self._rank * len(self._devices)

    def _input_context(self) -> InputContext:
        return InputContext(self._num_workers, self._rank, self.num_replicas_in_sync)

    def _wraps_arrays(self) -> bool:
        return self._num_workers > 1

    def _next_number(self, kind: str) -> int:
        """Return the next number of a kind of object; the same on each worker."""
        return next(self._counters[kind])

    # --- input --------------------------------------------------------------------------------

    def _agreement(self, batch_size: int | None = None) -> Callable[[], StepAgreement] | None:
        client = self._client
        if client is None:
            return None
        dataset, iterators = self._next_number("dataset"), itertools.count(1)
        # Part of the name: with different batch sizes, rows would be duplicated or lost.
        size = "" if batch_size is None else f" (batches of {batch_size})"
        return lambda: StepAgreement(
            client, f"epoch {next(iterators)} of distributed dataset {dataset}{size}"
        )

    def _seed_for(self, dataset: Dataset) -> int | None:
        if self._client is None:
            return None
        copies_differ = dataset.options().auto_shard_policy is AutoShardPolicy.OFF
        number = self._next_number("seed") * self._num_workers + (
            self._rank if copies_differ else 0
        )
        return (self._seed + number * _HASH_MULTIPLIER) % _NUM_SEEDS

    def _check_options(self, options: InputOptions) -> None:
        if options.is_per_replica and self._num_workers > 1:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in "
                "distribute_datasets_from_function of MirroredStrategy; with several workers, "
                "dataset_fn is called once for each worker"
            )

    def _gather_row_counts(self, rows: list[int]) -> list[int]:
        return rows if self._client is None else gather_row_counts(self._client, rows)

    # --- running ------------------------------------------------------------------------------

    def _run_all(self, on_replica: Callable[[int, Any], Any]) -> Sequence[Any]:
        try:
            return super()._run_all(on_replica)
        except Exception as error:
            self._report_failure(error)
            raise

    def _report_failure(self, error: Exception) -> None:
        """Fail the session, unless `run` fails on all workers.

        This worker does not take part in the remaining collectives of the other workers' step.
        Without the failure its next reduction would be combined with a different operation of
        theirs.
        """
        if self._client is None:
            return
        description = f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]
        text = np.frombuffer(description.encode(errors="replace"), np.uint8)
        with contextlib.suppress(HeadraceError):  # the session has failed, and all workers know why
            number = self._client.start("strategy.run", ERROR, arrays=[text])
            self._client.discard([number])

    # --- programs over all workers ------------------------------------------------------------

    def mesh_devices(self) -> tuple[Device, ...]:
        """Return the devices of the replicas of all workers, in replica order.

        Raises:
            ValueError: If the framework has no programs over several processes.
            FailedPreconditionError: If the framework does not see the processes as one program.
        """
        if self._client is None:
            return super().mesh_devices()
        program = self.framework.replica_programs()
        if not self._allow_direct:
            raise FailedPreconditionError(
                "one program or array for the replicas of several workers requires that JAX runs "
                "their processes as one program: with `security`, or if JAX was used before this "
                "strategy was created, call jax.distributed.initialize() first on all workers; "
                "or use run"
            )
        if not self._mesh_devices:
            local_keys = program.device_keys(self.framework_devices)
            gathered = gather_json(self._client, "the devices of each worker", local_keys)
            self._mesh_devices = program.find_devices([name for keys in gathered for name in keys])
        return self._mesh_devices

    def open_program_calls(self, description: str) -> ProgramCalls | None:
        """Return the agreement on calls of a program over all workers; None with one worker.

        Args:
            description: Kind of program.
        """
        if self._client is None:
            return None
        name = f"{description} {self._next_number(description)}"
        return ProgramCalls(
            self._client, self._names, name, self.framework.replica_programs().is_peer_loss
        )

    # --- values -------------------------------------------------------------------------------

    def reduce_columns(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Any]],
        axis: Axis = None,
        description: str | None = None,
    ) -> list[Any]:
        """Return the sums or means over all replicas, in a single exchange."""
        client, framework = self._client, self.framework
        if client is None or not columns:
            return super().reduce_columns(op, columns, axis)
        pairs = [sum_and_count(values, axis, framework) for values in columns]
        totals = [total for total, _ in pairs]
        device = self.framework_devices[0]
        direct = [self._direct_allreduce.is_used_for(total, device) for total in totals]
        local_totals = [
            np.asarray(framework.to_numpy(total))
            for total, is_direct in zip(totals, direct, strict=True)
            if not is_direct
        ]
        counts = np.array([count for _, count in pairs] if op is ReduceOp.MEAN else [], np.int64)
        description = description or f"a reduction ({op.name})"
        # All workers use the same description, so that mismatches are detected.
        for total, is_direct in zip(totals, direct, strict=True):
            description += f" with {total.dtype} of shape {tuple(total.shape)}" if is_direct else ""
        *sums, counts = sum_arrays(client, [*local_totals, counts], description)
        remaining_sums = iter(sums)
        direct_sums = iter(
            self._direct_allreduce.sum_totals(
                [t for t, is_one in zip(totals, direct, strict=True) if is_one]
            )
        )
        numbers = counts.tolist() or [0] * len(totals)
        return [
            finish_reduction(
                op,
                next(direct_sums) if is_direct else self._put(next(remaining_sums)),
                count,
                framework,
            )
            for total, is_direct, count in zip(totals, direct, numbers, strict=True)
        ]

    def gather_replicas(
        self, values: Sequence[Any], axis: int, description: str | None = None
    ) -> Any:
        """Return the concatenated values of all replicas."""
        local = concatenate_values(values, axis, self.framework)
        if self._client is None:
            return local
        array = np.asarray(self.framework.to_numpy(local))
        description = description or f"a gather along axis {axis}"
        gathered = self._client.run(description, ALL, arrays=[array])
        return self._put(concatenate_values(gathered.arrays, axis))

    def broadcast_first(self, value: Any, description: str) -> Any:
        """Return the first worker's value; all workers pass values of one shape and dtype."""
        if self._client is None:
            return value
        array = np.asarray(self.framework.to_numpy(self.framework.as_array(value)))
        description = f"{description}, of shape {array.shape} and dtype {array.dtype}"
        received = self._client.run(description, FIRST, arrays=[] if self._rank else [array])
        return self._put(received.arrays[0])

    def _put(self, array: NDArray[Any]) -> Any:
        """Convert an array from other workers to one of the framework."""
        return self.framework.put([array], self.framework_devices[:1])[0]


# --- participants ------------------------------------------------------------------------------


def _find_rank(resolver: ClusterResolver) -> tuple[list[str], int, str]:
    """Return the workers' names, this worker's rank, and the first worker's address.

    An evaluator, and a process without a cluster, runs alone.

    Raises:
        InvalidArgumentError: If the cluster has no workers, or this process is not one of them.
    """
    spec = resolver.cluster_spec()
    alone = (["worker 0"], 0, "")
    if not spec.jobs:
        return alone
    if not spec:
        raise InvalidArgumentError(
            f"the cluster of {resolver!r} has the jobs {', '.join(map(repr, spec.jobs))}, but no "
            "task in them, so each process would train alone: list the workers' addresses, check "
            "the labels that the resolver selects, or pass no cluster to train alone"
        )
    check_task(spec, resolver.task_type, resolver.task_id)
    assert resolver.task_type is not None
    assert resolver.task_id is not None
    if resolver.task_type == EVALUATOR:
        return alone
    tasks = workers(spec)
    if resolver.task_type == PS or not tasks:
        raise InvalidArgumentError(
            f"this process is {resolver.task_type!r} task {resolver.task_id} of {spec}, but a "
            "MultiWorkerMirroredStrategy runs on chief and workers only; use "
            "ParameterServerStrategy with parameter servers"
        )
    names = [f"{kind} {index} ({_address(spec, kind, index)})" for kind, index in tasks]
    return names, rank(spec, resolver.task_type, resolver.task_id), _address(spec, *tasks[0])


def _address(spec: ClusterSpec, kind: str, index: int) -> str:
    return spec.task_address(kind, index).rpartition("://")[2]


def _join_session(
    address: str,
    rank: int,
    names: Sequence[str],
    timeout: float,
    security: Security | None,
) -> tuple[CollectiveClient, Callable[[], object]]:
    """Return this worker's client of the session, and the function that ends it.

    The client's garbage collection ends the session, too.

    Raises:
        ValueError: If the address is not loopback, and there are no keys.
        OSError: If the first worker's port is in use.
    """
    host, _ = addresses.split(address)
    if security is None and not addresses.is_loopback(host):
        raise ValueError(
            f"the first worker listens at {address}, which other machines can reach, so "
            "`security` is required: otherwise any process that reaches the port can join. "
            "Create keys with `headrace keys new DIR`, and pass security=Security.load(DIR, "
            '"server") on all workers'
        )
    channel: Channel
    release: Callable[[], object] = _do_nothing
    if rank == 0:
        server, release = acquire_server(address, names, security)
        channel = server.local_channel()
    else:
        channel = zeromq.connect(
            address,
            reply_type=CollectiveReply,
            security=None if security is None else security.as_client(),
            # Silent and lost workers are distinguished: the session waits for silent ones.
            keepalive_timeout=min(2 * timeout + 60.0, _MAX_TIMEOUT),
            request_bytes=MAX_MESSAGE_BYTES,
        )
    client = CollectiveClient(channel, rank=rank, names=names, timeout=timeout)
    # Tied to the client, not the strategy: datasets and iterators outlive the strategy.
    finalizer = weakref.finalize(client, _leave_session, client.closer.close, release)
    close_at_exit(client, finalizer)
    return client, finalizer


def _leave_session(close: Callable[[], object], release: Callable[[], object]) -> None:
    close()
    release()


def _do_nothing() -> None:
    return


def _exchange_setup(client: CollectiveClient, names: Sequence[str], replicas: int) -> int:
    """Wait for all workers, and compare their settings; return the first worker's seed.

    Raises:
        InvalidArgumentError: If the settings differ.
    """
    settings = {"workers": list(names), "replicas": replicas, "seed": draw_seed()}
    first, *others = gather_json(client, "the setup", settings)
    for other, name in zip(others, names[1:], strict=False):
        for setting in ("workers", "replicas"):
            if other[setting] != first[setting]:
                raise InvalidArgumentError(
                    "every worker must have the same cluster and the same number of replicas, "
                    f"but {names[0]} has {setting} {first[setting]}, and {name} has {setting} "
                    f"{other[setting]}"
                )
    # Every worker that completes this has the setup. A first worker that ended now, with replies
    # still in flight, would otherwise look like one that has not started.
    client.run("the end of the setup", ANY)
    seed: int = first["seed"]
    return seed
