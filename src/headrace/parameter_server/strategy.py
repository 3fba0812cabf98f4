"""The parameter-server strategy: placement of variables and tables, and execution on a worker.

Workers run asynchronously: `num_replicas_in_sync` counts the replicas of one worker. A
`ClusterCoordinator` schedules functions on workers; a strategy without one runs them in this
process, against the servers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

from headrace.arguments import check_callable, check_int, check_seconds
from headrace.cluster.environment import TFConfigClusterResolver
from headrace.cluster.resolver import ClusterResolver
from headrace.cluster.spec import CHIEF, EVALUATOR, PS, TYPES, WORKER, ClusterSpec
from headrace.data.dataset import Dataset
from headrace.distribute.execution_context import check_cross_replica
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.strategy import Extended, Strategy
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.cluster_registry import (
    ServerCluster,
    find_cluster,
    number_name,
    register_cluster,
)
from headrace.parameter_server.operations import DescribeStore, StoreDescription
from headrace.parameter_server.optimizer import COUNTING_SERVER, step_counts
from headrace.parameter_server.partitioners import make_placement
from headrace.parameter_server.pickling import PerWorkerInput
from headrace.parameter_server.server_requests import ParameterServerClient
from headrace.parameter_server.specs import TableSpec, name_of
from headrace.parameter_server.table import PlacedTable, TableRecord
from headrace.parameter_server.variable import ServerVariable
from headrace.parameter_server.variable_shards import (
    InitialValue,
    PlacedShard,
    VariableRecord,
    create_shards,
    place_shards,
)
from headrace.parameter_server.write_context import current_closure_run
from headrace.transport.security import Security, check_security

__all__ = [
    "ParameterServerStrategy",
]


_log = logging.getLogger(__name__)

_NOT_SCHEDULED_MESSAGE = (
    "A `ParameterServerStrategy` method is invoked without using `ClusterCoordinator.schedule`: "
    "it runs in this process, not on a worker"
)

_ITERATED_DATASET_MESSAGE = (
    "To use this dataset, you need to pass this dataset to "
    "ClusterCoordinator.create_per_worker_dataset."
)

_ITERATED_FUNCTION_MESSAGE = (
    "You need to use this dataset in ClusterCoordinator.create_per_worker_dataset."
)


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, updated asynchronously (default) or in synchronous rounds.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         weights = hr.Variable([1.0, 2.0], name="weights")
    ...     print(weights)
    ...     print(weights.assign_add([1.0, 1.0]).read())
    ...     strategy.close()
    <Variable 'weights' shape=(2,) dtype=float64 on server 0>
    [2. 3.]

    Args:
        cluster_resolver: Provides the addresses of parameter servers ("ps") and workers; None means
            `TF_CONFIG`.
        variable_partitioner: One of `hr.distribute.partitioners`, or a function of a shape and a
            dtype that returns the number of parts along each axis. None does not partition
            variables.
        mode: "async": writes of a function take effect at once. "sync": gradients of a round of
            functions are averaged and applied together, before the next round begins.
        staleness: How many earlier functions may be unfinished when a function starts; None means
            unlimited.
        round_size: Number of functions in a round with mode "sync"; None means the number of
            workers.
        placement: "round_robin" assigns shards to servers in turn; "bytes" to the server with the
            fewest bytes.
        replication: Number of servers that hold each shard, table and counter. With 2, the
            follower of a lost server's store becomes its leader.
        security: Keys of a client of the servers.
        server_timeout: Seconds to wait for an unreachable server.
        replicas: Number of replicas on each worker.

    Raises:
        ValueError: If the cluster lacks a required task, or an argument is invalid.
        UnavailableError: If a parameter server is unreachable.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        mode: Literal["async", "sync"] = "async",
        staleness: int | None = None,
        round_size: int | None = None,
        placement: Literal["round_robin", "bytes"] = "round_robin",
        replication: int = 1,
        security: Security | None = None,
        server_timeout: float = 120.0,
        replicas: int = 1,
    ) -> None:
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        _check_resolver(resolver)
        if variable_partitioner is not None:
            check_callable("variable_partitioner", variable_partitioner)
            if isinstance(variable_partitioner, type):
                raise TypeError(
                    "`variable_partitioner` must be a partitioner, but got the class "
                    f"{variable_partitioner.__name__}: pass an instance"
                )
        check_security(security)
        check_seconds("server_timeout", server_timeout)
        settings = _check_settings(mode, staleness, round_size, replication, replicas)
        spec = _check_cluster(resolver)
        addresses = _server_addresses(spec)
        if replication > len(addresses):
            raise ValueError(
                f"`replication` must be at most the number of parameter servers, {len(addresses)}, "
                f"but got {replication}: each shard is on {replication} servers, so add one"
            )
        self._placement = make_placement(placement, len(addresses))
        self._resolver: ClusterResolver | None = resolver
        self._partitioner = variable_partitioner
        self.security = security
        servers = ParameterServerClient(
            addresses,
            security=None if security is None else security.as_client(),
            timeout=server_timeout,
            replication=replication,
        )
        self._initialize(ServerCluster(secrets.token_hex(8), servers), settings)
        self._spec = spec
        servers.wait_until_reachable()
        self._cluster.optimizers.assigns_numbers = True
        self._find_earlier_steps()
        register_cluster(self._cluster)
        users = getattr(resolver, "users", None)
        if users is not None:
            users.add(self)

    def _find_earlier_steps(self) -> None:
        """Record step counts of earlier programs, which optimizers of the same name continue."""
        answer, _ = self._cluster.servers.execute(COUNTING_SERVER, DescribeStore())
        assert isinstance(answer, StoreDescription)
        self._cluster.optimizers.record_earlier_counts(step_counts(answer.counters))

    def _initialize(self, cluster: ServerCluster, settings: StrategySettings) -> None:
        super().__init__([f"cpu:{number}" for number in range(settings.replicas)])
        self._cluster = cluster
        self._settings = settings
        self._lock = threading.Lock()
        #: Names of variables and tables.
        self._names = UniqueNames()
        #: Names of variables that existed on the servers before this program created them.
        self.existing: set[str] = set()
        self._has_warned = False
        cluster.register("strategy", "", self)

    @classmethod
    def for_worker(
        cls, cluster: ServerCluster, settings: StrategySettings
    ) -> ParameterServerStrategy:
        """Return the strategy as a worker process sees it, which unpickled its handle."""
        strategy = cls.__new__(cls)
        strategy._resolver = None
        strategy._spec = ClusterSpec({})
        strategy.security = None
        strategy._partitioner = None
        strategy._initialize(cluster, settings)
        return strategy

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve, (self._cluster.cluster_id, self._settings)

    # --- properties -------------------------------------------------------------------------------

    #: Creates a variable with a copy on each worker; set by a coordinator.
    make_per_worker_variable: Callable[..., Any] | None = None
    #: Stops the coordinator, which sets it and may be deleted before this object.
    stop_coordinator: weakref.WeakMethod[Callable[[], None]] | None = None

    def variable_type(self, *args: Any, per_worker_variable: bool = False, **kwargs: Any) -> Any:
        """Create an `hr.Variable` in this scope: on the servers, or with a copy on each worker."""
        if not per_worker_variable:
            return ServerVariable(*args, **kwargs)
        if self.make_per_worker_variable is None:
            raise FailedPreconditionError(
                "a variable with per_worker_variable=True is on the workers: create "
                "hr.coordinator.ClusterCoordinator(strategy) first"
            )
        return self.make_per_worker_variable(*args, **kwargs)

    @property
    def cluster(self) -> ServerCluster:
        """The cluster as this process sees it: its id, and its servers."""
        return self._cluster

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Resolver of the cluster; None on a worker."""
        return self._resolver

    @property
    def cluster_id(self) -> str:
        """Id of the cluster in handles."""
        return self._cluster.cluster_id

    @property
    def server_addresses(self) -> Sequence[str]:
        """Addresses of the parameter servers."""
        return self._cluster.servers.addresses

    @property
    def worker_addresses(self) -> Sequence[str]:
        """Addresses of the workers; empty on a worker."""
        return _worker_addresses(self._spec)

    @property
    def settings(self) -> StrategySettings:
        """Settings that a worker needs."""
        return self._settings

    @property
    def mode(self) -> str:
        """Mode: "async" if writes take effect at once, "sync" if they do so in rounds."""
        return self._settings.mode

    @property
    def staleness(self) -> int | None:
        """Number of earlier functions that may be unfinished when one starts; None: unlimited."""
        return self._settings.staleness

    @property
    def round_size(self) -> int | None:
        """Number of functions in a round with mode="sync"; None without rounds."""
        if self.mode == "async":
            return None
        return self._settings.round_size or max(1, len(self.worker_addresses))

    @property
    def extended(self) -> Extended:
        """Counterpart of tf.distribute's `extended`."""
        return _ServerExtended(self)

    def close(self) -> None:
        """Close the connections to the servers, and the coordinator.

        Variables and tables stay on the servers until those end.
        """
        if self.stop_coordinator is not None and (stop := self.stop_coordinator()) is not None:
            stop()
        self._cluster.close()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy of {len(self._cluster.servers)} parameter servers>"

    # --- variables ----------------------------------------------------------------------------

    def unused_name(self, name: str) -> str:
        """Return a name for a variable or table, with a number appended if the name is taken."""
        return self._names.find_unused(name)

    def reserve_name(self, name: str) -> str:
        """Reserve a name, with a number appended if it is taken, and return it."""
        return self._names.assign_name(name)

    def make_variable(
        self, initial: InitialValue, name: str | None, trainable: bool, aggregation: str
    ) -> tuple[ServerCluster, VariableRecord]:
        """Partition a variable into shards, and create them on the servers."""
        with contextlib.ExitStack() as undo:
            # The n-th variable gets the n-th placement, in every run of a program.
            with self._lock:
                own_name = self._names.assign_name("Variable", name)
                undo.callback(self._names.release, own_name)
                colocated_with = _colocated_with.get()
                if colocated_with is None:
                    shards = place_shards(
                        own_name, initial, self._partitioner, self._placement.place
                    )
                else:
                    server = colocated_with.placed[0].server
                    shards = place_shards(own_name, initial, None, lambda size: server)
            self._create_shards(own_name, initial, shards)
            undo.pop_all()
        record = VariableRecord(
            own_name, initial.shape, name_of(initial.dtype), trainable, aggregation, shards
        )
        return self._cluster, record

    def _create_shards(
        self, name: str, initial: InitialValue, shards: Sequence[PlacedShard]
    ) -> None:
        if create_shards(self._cluster.servers, shards, initial):
            self.existing.add(name)
            _log.warning(
                "variable %r already exists on the parameter servers and keeps its value; another "
                "program created it, or this one before a restart",
                name,
            )

    def place_table(self, spec: TableSpec) -> tuple[ServerCluster, TableRecord]:
        """Shard a table over all servers."""
        self._names.assign_name("EmbeddingTable", spec.name)
        count = len(self._cluster.servers)
        capacity = None if spec.capacity is None else -(-spec.capacity // count)
        shards = tuple(
            PlacedTable(
                msgspec.structs.replace(
                    spec,
                    name=f"{spec.table}/part_{index}",
                    index=index,
                    shards=count,
                    capacity=capacity,
                ),
                index,
            )
            for index in range(count)
        )
        return self._cluster, TableRecord(spec.table, spec.dim, spec.dtype, shards)

    # --- running ------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` on each replica of the current worker; see `Strategy.run`.

        Outside of functions that a coordinator schedules, it is called in this process, with one
        warning.
        """
        self._warn_once("run")
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduce the values of all replicas of a worker to one; see `Strategy.reduce`."""
        self._warn_once("reduce", "all_reduce()")
        return super().reduce(reduce_op, value, axis)

    def _warn_once(self, method: str, instead: str = "merge_call()") -> None:
        check_cross_replica(self, method, instead)
        if self._has_warned or current_closure_run() is not None:
            return
        self._has_warned = True
        warnings.warn(_NOT_SCHEDULED_MESSAGE, stacklevel=3)

    # --- input --------------------------------------------------------------------------------

    def distribute_dataset(  # type: ignore[override]
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> PerWorkerInput:
        """Return a dataset for `create_per_worker_dataset`: each worker reads all of it."""
        check_cross_replica(self, "distribute_dataset")
        super().distribute_dataset(dataset, options)  # raises the errors that workers would raise
        return PerWorkerInput(
            functools.partial(_build, self, "distribute_dataset", dataset, options),
            _ITERATED_DATASET_MESSAGE,
        )

    def distribute_datasets_from_function(  # type: ignore[override]
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> PerWorkerInput:
        """Return a dataset for `create_per_worker_dataset`: each worker calls the function."""
        check_cross_replica(self, "distribute_datasets_from_function")
        check_callable("dataset_fn", dataset_fn)
        return PerWorkerInput(
            functools.partial(
                _build, self, "distribute_datasets_from_function", dataset_fn, options
            ),
            _ITERATED_FUNCTION_MESSAGE,
        )

    experimental_distribute_dataset = distribute_dataset  # type: ignore[assignment]
    experimental_distribute_datasets_from_function = distribute_datasets_from_function  # type: ignore[assignment]


def _build(strategy: ParameterServerStrategy, method: str, *args: Any) -> Any:
    return getattr(super(ParameterServerStrategy, strategy), method)(*args)


def _resolve(cluster_id: str, settings: StrategySettings) -> ParameterServerStrategy:
    cluster = find_cluster(cluster_id, "the ParameterServerStrategy")
    return cluster.resolve(
        "strategy", "", lambda: ParameterServerStrategy.for_worker(cluster, settings)
    )


# --- settings of a strategy -----------------------------------------------------------------------


class StrategySettings(msgspec.Struct, frozen=True):
    """Settings of a strategy, which its handle carries."""

    mode: str
    staleness: int | None
    round_size: int | None
    replication: int
    replicas: int


def _check_settings(
    mode: Any, staleness: Any, round_size: Any, replication: Any, replicas: Any
) -> StrategySettings:
    """Check the settings of a strategy.

    Raises:
        ValueError: If an argument is out of bounds, or excludes another one.
    """
    if mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync", but got {mode!r}')
    if staleness is not None:
        check_int("staleness", staleness, minimum=0)
    if round_size is not None:
        check_int("round_size", round_size, minimum=1)
    check_int("replication", replication, minimum=1)
    check_int("replicas", replicas, minimum=1)
    if mode == "sync" and staleness is not None:
        raise ValueError('`staleness` requires mode="async": with mode="sync" no write is stale')
    if mode == "async" and round_size is not None:
        raise ValueError('`round_size` requires mode="sync"')
    if replication > 2:
        raise ValueError(
            f"`replication` must be 1 or 2, but got {replication}: use checkpoints for the case "
            "that two servers are lost together"
        )
    return StrategySettings(mode, staleness, round_size, replication, replicas)


# --- `strategy.extended` for variables on servers -------------------------------------------------

_colocated_with: ContextVar[ServerVariable | None] = ContextVar(
    "headrace_colocated_with", default=None
)


class _ServerExtended(Extended):
    """Attributes of `strategy.extended` for variables on servers."""

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the parameter servers."""
        count = len(self._strategy.cluster.servers)
        return tuple(f"ps:{number}" for number in range(count))

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Place new variables unpartitioned, on the server of that variable's first shard."""
        if getattr(colocate_with_variable, "cluster", None) is not self._strategy.cluster:
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"Strategy.scope(), but got {colocate_with_variable!r:.80}"
            )
        token = _colocated_with.set(colocate_with_variable)
        try:
            yield
        finally:
            _colocated_with.reset(token)


# --- checks of a cluster for parameter-server training --------------------------------------------


def _check_resolver(resolver: object) -> None:
    """Raise TypeError if the value is not a resolver, and say where to find one."""
    if isinstance(resolver, ClusterResolver):
        return
    fix = ""
    if isinstance(resolver, ClusterSpec):
        fix = "; use hr.distribute.SimpleClusterResolver(spec)"
    elif isinstance(getattr(resolver, "cluster_resolver", None), ClusterResolver):
        fix = "; use its `cluster_resolver`"
    raise TypeError(
        f"`cluster_resolver` must be a ClusterResolver, but got {resolver!r:.80} of type "
        f"{type(resolver).__name__}{fix}"
    )


def _check_cluster(resolver: ClusterResolver) -> ClusterSpec:
    """Return the cluster spec after checking that it has all required tasks.

    Raises:
        ValueError: If a task is missing or not allowed.
    """
    spec = resolver.cluster_spec()
    if not spec:
        raise ValueError(
            f"Cluster spec must be non-empty in {type(resolver).__name__}: name the addresses of "
            'the workers and of the parameter servers ("ps"), in a resolver or in TF_CONFIG'
        )
    allowed = ", ".join(map(repr, TYPES))
    disallowed = [name for name in spec.jobs if name not in TYPES]
    if disallowed:
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {allowed}, and the "
            f"cluster spec has {', '.join(map(repr, disallowed))}"
        )
    task_type, task_id = resolver.task_type, resolver.task_id
    if task_type is not None and task_type not in TYPES:
        raise ValueError(f"Unrecognized task_type: {task_type}, valid task types are: {allowed}")
    if task_type not in (None, EVALUATOR, *spec.jobs):
        raise ValueError(f"task_type {task_type!r} not found in cluster_spec: {spec}")
    for single in (CHIEF, EVALUATOR):
        if single in spec.jobs and spec.num_tasks(single) > 1:
            raise ValueError(f"There must be at most one {single!r} job: {spec}")
    if task_type in spec.jobs and task_id is not None:
        last = max(spec.task_indices(task_type), default=-1)
        if task_id > last:
            raise ValueError(
                f"The task_id {task_id} exceeds the maximum id of {task_type}: it is {last}"
            )
    for needed in (PS, WORKER):
        if needed not in spec.jobs or not spec.num_tasks(needed):
            raise ValueError(f"There must be at least one {needed}: {spec}")
    return spec


def _server_addresses(spec: ClusterSpec) -> list[str]:
    """Return the addresses of the parameter servers, by index.

    Raises:
        ValueError: If their indices have gaps.
    """
    numbers = spec.task_indices(PS)
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"parameter servers must be numbered from 0 without gaps, but have {numbers}"
        )
    return [_strip_scheme(spec.task_address(PS, number)) for number in numbers]


def _worker_addresses(spec: ClusterSpec) -> list[str]:
    """Return the addresses of the workers, by index."""
    numbers = spec.task_indices(WORKER) if WORKER in spec.jobs else []
    return [_strip_scheme(spec.task_address(WORKER, number)) for number in numbers]


def _strip_scheme(address: str) -> str:
    """Return "host:port" for addresses that some resolvers write as "grpc://host:port"."""
    return address.rpartition("://")[2]


# --- names assigned by a strategy: unique, and the same in each run of a program ------------------


class UniqueNames:
    """Assigned names of one kind of object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: set[str] = set()

    def assign_name(self, kind: str, name: str | None = None) -> str:
        """Return `name`; or, if it is None, the kind, with a number from the second one on.

        Raises:
            ValueError: If the name is taken.
        """
        with self._lock:
            if name in self._used:
                raise ValueError(
                    f"`name` must be unique in a strategy, but a variable or table {name!r} exists"
                )
            assigned = name or number_name(kind, self._used)
            self._used.add(assigned)
            return assigned

    def find_unused(self, name: str) -> str:
        """Return a name, with a number appended if it is taken."""
        with self._lock:
            return number_name(name, self._used)

    def release(self, name: str) -> None:
        """Release a name whose object could not be created."""
        with self._lock:
            self._used.discard(name)
