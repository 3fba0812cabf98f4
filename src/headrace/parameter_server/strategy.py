"""The strategy of parameter servers: what is placed where, and what runs on a worker.

Workers are not in step: `num_replicas_in_sync` counts the replicas of one worker. Functions run on
workers when a `ClusterCoordinator` schedules them; a strategy that is used without one runs them
here, against the servers.
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
from headrace.distribute.context import check_cross_replica
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
from headrace.parameter_server.partitioners import make_placement as placement_named
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
    "A `ParameterServerStrategy` method is invoked without using `ClusterCoordinator.schedule`: it "
    "runs here, in the coordinator's process, and not on a worker"
)

_READ_IN_PROGRAM_MESSAGE = (
    "To use this dataset, you need to pass this dataset to "
    "ClusterCoordinator.create_per_worker_dataset."
)

_READ_FUNCTION_IN_PROGRAM_MESSAGE = (
    "You need to use this dataset in ClusterCoordinator.create_per_worker_dataset."
)


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, and workers that change them without waiting for each other.

    >>> import headrace as hr
    >>> from headrace.parameter_server.server import ParameterServer
    >>> server = ParameterServer(0)
    >>> spec = hr.distribute.ClusterSpec({"ps": [server.address], "worker": ["localhost:2222"]})
    >>> resolver = hr.distribute.SimpleClusterResolver(spec)
    >>> strategy = hr.distribute.ParameterServerStrategy(resolver)
    >>> with strategy.scope():
    ...     weights = hr.Variable([1.0, 2.0], name="weights")
    >>> weights
    <Variable 'weights' shape=(2,) dtype=float64 on server 0>
    >>> weights.assign_add([1.0, 1.0]).read()
    array([2., 3.])
    >>> strategy.close()
    >>> server.stop()

    Args:
        cluster_resolver: Says where parameter servers ("ps") and workers are; None: `TF_CONFIG`.
        variable_partitioner: One of `hr.distribute.partitioners`, or a function of a shape and a
            dtype that returns the parts along each axis. None: variables are not cut.
        mode: "async": what a function writes counts at once. "sync": gradients of a round of
            functions are averaged and applied together, before the next round begins.
        staleness: A function begins only when all but so many of those that were scheduled before
            it are done; None: no bound.
        round_size: How many functions make a round of "sync"; None: as many as there are workers.
        placement: "round_robin": shards go to servers in turn; "bytes": to the one with the least.
        replication: How many servers have each shard, table and counter. With 2, what a server that
            is lost had is on another one, which goes on with it.
        security: Keys of a client of the servers.
        server_timeout: Seconds for which a server that cannot be reached is waited for.
        replicas: Of each worker.

    Raises:
        ValueError: The cluster lacks what is needed, or an argument makes no sense.
        UnavailableError: A parameter server cannot be reached.
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
                    f"{variable_partitioner.__name__}: make one of it"
                )
        check_security(security)
        check_seconds("server_timeout", server_timeout)
        settings = _checked_settings(mode, staleness, round_size, replication, replicas)
        spec = _checked_cluster(resolver)
        addresses = _server_addresses(spec)
        if replication > len(addresses):
            raise ValueError(
                f"`replication` is {replication}, but there is {len(addresses)} parameter server: "
                "each shard is on as many servers, so add one"
            )
        self._placement = placement_named(placement, len(addresses))
        self._resolver: ClusterResolver | None = resolver
        self._partitioner = variable_partitioner
        self.security = security
        servers = ParameterServerClient(
            addresses,
            security=None if security is None else security.as_client(),
            timeout=server_timeout,
            replication=replication,
        )
        self._begin(ServerCluster(secrets.token_hex(8), servers), settings)
        self._spec = spec
        servers.wait_until_reachable()
        self._cluster.optimizers.assigns_numbers = True
        self._find_earlier_steps()
        register_cluster(self._cluster)
        users = getattr(resolver, "users", None)
        if users is not None:
            users.add(self)

    def _find_earlier_steps(self) -> None:
        """Ask what the servers counted for an earlier program, which optimizers would continue."""
        answer, _ = self._cluster.servers.execute(COUNTING_SERVER, DescribeStore())
        assert isinstance(answer, StoreDescription)
        self._cluster.optimizers.record_earlier_counts(step_counts(answer.counters))

    def _begin(self, cluster: ServerCluster, settings: StrategySettings) -> None:
        super().__init__([f"cpu:{number}" for number in range(settings.replicas)])
        self._cluster = cluster
        self._settings = settings
        self._lock = threading.Lock()
        #: Of variables and tables.
        self._names = UniqueNames()
        #: Names of variables that the servers had before this program made them.
        self.existing: set[str] = set()
        self._warned = False
        cluster.register("strategy", "", self)

    @classmethod
    def at_worker(
        cls, cluster: ServerCluster, settings: StrategySettings
    ) -> ParameterServerStrategy:
        """Return a strategy's handle in a process that takes part in its cluster."""
        made = cls.__new__(cls)
        made._resolver = None
        made._spec = ClusterSpec({})
        made.security = None
        made._partitioner = None
        made._begin(cluster, settings)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve, (self._cluster.cluster_id, self._settings)

    # --- what it is ---------------------------------------------------------------------------

    #: Makes a variable of each worker's own; a coordinator sets it.
    make_per_worker_variable: Callable[..., Any] | None = None
    #: Stops the coordinator, which sets it and may be gone before this object.
    stop_coordinator: weakref.WeakMethod[Callable[[], None]] | None = None

    def variable_type(self, *args: Any, per_worker_variable: bool = False, **kwargs: Any) -> Any:
        """Make what `hr.Variable` is in its scope: on the servers, or a copy for each worker."""
        if not per_worker_variable:
            return ServerVariable(*args, **kwargs)
        if self.make_per_worker_variable is None:
            raise FailedPreconditionError(
                "a variable with per_worker_variable=True is kept by workers: make "
                "hr.coordinator.ClusterCoordinator(strategy) before it"
            )
        return self.make_per_worker_variable(*args, **kwargs)

    @property
    def cluster(self) -> ServerCluster:
        """The cluster as this process sees it: its id, and its servers."""
        return self._cluster

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What says who takes part; None on a worker."""
        return self._resolver

    @property
    def cluster_id(self) -> str:
        """What handles call the cluster."""
        return self._cluster.cluster_id

    @property
    def server_addresses(self) -> Sequence[str]:
        """Where the parameter servers listen."""
        return self._cluster.servers.addresses

    @property
    def worker_addresses(self) -> Sequence[str]:
        """Where the workers listen; none on a worker."""
        return _worker_addresses(self._spec)

    @property
    def settings(self) -> StrategySettings:
        """How it works: what a worker needs to know."""
        return self._settings

    @property
    def mode(self) -> str:
        """Whether writes count at once, "async", or by rounds, "sync"."""
        return self._settings.mode

    @property
    def staleness(self) -> int | None:
        """How many functions one may be behind; None: no bound."""
        return self._settings.staleness

    @property
    def round_size(self) -> int | None:
        """How many functions make a round of mode="sync"; None: there are no rounds."""
        if self.mode == "async":
            return None
        return self._settings.round_size or max(1, len(self.worker_addresses))

    @property
    def extended(self) -> Extended:
        """What tf.distribute has there."""
        return _ServerExtended(self)

    def close(self) -> None:
        """Ask the servers nothing more, and close the coordinator.

        Variables and tables stay on the servers until those end.
        """
        if self.stop_coordinator is not None and (stop := self.stop_coordinator()) is not None:
            stop()
        self._cluster.close()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy of {len(self._cluster.servers)} parameter servers>"

    # --- variables ----------------------------------------------------------------------------

    def unused_name(self, name: str) -> str:
        """Return a name for a variable or table, with a number behind it if there is one so."""
        return self._names.find_unused(name)

    def reserve_name(self, name: str) -> str:
        """Return such a name, which nothing else gets from now on."""
        return self._names.assign_name(name)

    def make_variable(
        self, initial: InitialValue, name: str | None, trainable: bool, aggregation: str
    ) -> tuple[ServerCluster, VariableRecord]:
        """Cut a variable into shards and have the servers make them."""
        with contextlib.ExitStack() as undo:
            with self._lock:  # the n-th name has the n-th place, in each program alike
                own_name = self._names.assign_name("Variable", name)
                undo.callback(self._names.release, own_name)
                beside = _colocated_with.get()
                if beside is None:
                    shards = place_shards(
                        own_name, initial, self._partitioner, self._placement.place
                    )
                else:
                    server = beside.placed[0].server
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
                "the parameter servers had a variable %r already, of another program or of this "
                "one before it was started again; it keeps its value",
                name,
            )

    def place_table(self, spec: TableSpec) -> tuple[ServerCluster, TableRecord]:
        """Deal a table to all servers."""
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
        """Call `fn` on each replica of the worker that this runs on; see `Strategy.run`.

        Outside of functions that a coordinator schedules it is called here, with one warning.
        """
        self._warn_once("run")
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Return one value for those of all replicas of a worker; see `Strategy.reduce`."""
        self._warn_once("reduce", "all_reduce()")
        return super().reduce(reduce_op, value, axis)

    def _warn_once(self, method: str, instead: str = "merge_call()") -> None:
        check_cross_replica(self, method, instead)
        if self._warned or current_closure_run() is not None:
            return
        self._warned = True
        warnings.warn(_NOT_SCHEDULED_MESSAGE, stacklevel=3)

    # --- input --------------------------------------------------------------------------------

    def distribute_dataset(  # type: ignore[override]
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> PerWorkerInput:
        """Return a dataset for `create_per_worker_dataset`: each worker reads all of it."""
        check_cross_replica(self, "distribute_dataset")
        super().distribute_dataset(dataset, options)  # refuses what no worker could build
        return PerWorkerInput(
            functools.partial(_build, self, "distribute_dataset", dataset, options),
            _READ_IN_PROGRAM_MESSAGE,
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
            _READ_FUNCTION_IN_PROGRAM_MESSAGE,
        )

    experimental_distribute_dataset = distribute_dataset  # type: ignore[assignment]
    experimental_distribute_datasets_from_function = distribute_datasets_from_function  # type: ignore[assignment]


def _build(strategy: ParameterServerStrategy, method: str, *args: Any) -> Any:
    return getattr(super(ParameterServerStrategy, strategy), method)(*args)


def _resolve(cluster_id: str, settings: StrategySettings) -> ParameterServerStrategy:
    cluster = find_cluster(cluster_id, "the ParameterServerStrategy")
    return cluster.resolve(
        "strategy", "", lambda: ParameterServerStrategy.at_worker(cluster, settings)
    )


# --- how a strategy of parameter servers works: what its handle carries, checked once -------------


class StrategySettings(msgspec.Struct, frozen=True):
    """How a strategy works, as its handle carries it."""

    mode: str
    staleness: int | None
    round_size: int | None
    replication: int
    replicas: int


def _checked_settings(
    mode: Any, staleness: Any, round_size: Any, replication: Any, replicas: Any
) -> StrategySettings:
    """Check how a strategy is to work.

    Raises:
        ValueError: An argument is out of its bounds, or does not go with another.
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
        raise ValueError('`staleness` is for mode="async": in mode="sync" no write is stale')
    if mode == "async" and round_size is not None:
        raise ValueError('`round_size` is for mode="sync"')
    if replication > 2:
        raise ValueError(
            f"`replication` must be 1 or 2, but got {replication}: what is on two servers is lost "
            "with both alone, and checkpoints keep it then"
        )
    return StrategySettings(mode, staleness, round_size, replication, replicas)


# --- `strategy.extended`, where variables are on servers ------------------------------------------

_colocated_with: ContextVar[ServerVariable | None] = ContextVar("headrace_beside", default=None)


class _ServerExtended(Extended):
    """What `strategy.extended` has, where variables are on servers."""

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The parameter servers."""
        count = len(self._strategy.cluster.servers)
        return tuple(f"ps:{number}" for number in range(count))

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Place the variables that are made inside where that one's first shard is, in one."""
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


# --- what a cluster must have, so that parameter servers can train in it --------------------------


def _check_resolver(resolver: object) -> None:
    """Raise TypeError for what is no resolver, and say where there is one."""
    if isinstance(resolver, ClusterResolver):
        return
    cure = ""
    if isinstance(resolver, ClusterSpec):
        cure = "; hr.distribute.SimpleClusterResolver(spec) is one"
    elif isinstance(getattr(resolver, "cluster_resolver", None), ClusterResolver):
        cure = "; its `cluster_resolver` is one"
    raise TypeError(
        f"`cluster_resolver` must be a ClusterResolver, but got {resolver!r:.80} of type "
        f"{type(resolver).__name__}{cure}"
    )


def _checked_cluster(resolver: ClusterResolver) -> ClusterSpec:
    """Return the tasks of a cluster that has what is needed.

    Raises:
        ValueError: It says what is missing, or too much.
    """
    spec = resolver.cluster_spec()
    if not spec:
        raise ValueError(
            f"Cluster spec must be non-empty in {type(resolver).__name__}: name the addresses of "
            'the workers and of the parameter servers ("ps"), in a resolver or in TF_CONFIG'
        )
    allowed = ", ".join(map(repr, TYPES))
    strange = [name for name in spec.jobs if name not in TYPES]
    if strange:
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {allowed}, and the "
            f"cluster spec has {', '.join(map(repr, strange))}"
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
    """Return where the parameter servers are, in the order of their numbers.

    Raises:
        ValueError: Their numbers have gaps.
    """
    numbers = spec.task_indices(PS)
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"parameter servers must be numbered from 0 without gaps, but have {numbers}"
        )
    return [_strip_scheme(spec.task_address(PS, number)) for number in numbers]


def _worker_addresses(spec: ClusterSpec) -> list[str]:
    """Return where the workers are, in the order of their numbers."""
    numbers = spec.task_indices(WORKER) if WORKER in spec.jobs else []
    return [_strip_scheme(spec.task_address(WORKER, number)) for number in numbers]


def _strip_scheme(address: str) -> str:
    """Return "host:port" of what some resolvers write: "grpc://host:port"."""
    return address.rpartition("://")[2]


# --- names that a strategy gives: unique, and the same ones whenever the same program runs --------


class UniqueNames:
    """Names of one sort of thing that were given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: set[str] = set()

    def assign_name(self, kind: str, name: str | None = None) -> str:
        """Return `name`; or, if it is None, the kind, with a number from the second one on.

        Raises:
            ValueError: It was given before.
        """
        with self._lock:
            if name in self._used:
                raise ValueError(
                    "`name` must be unique in a strategy, and there is a variable or table "
                    f"{name!r}"
                )
            free = name or number_name(kind, self._used)
            self._used.add(free)
            return free

    def find_unused(self, name: str) -> str:
        """Return a name, with a number behind it if it was given already."""
        with self._lock:
            return number_name(name, self._used)

    def release(self, name: str) -> None:
        """Forget a name: what was to have it could not be made."""
        with self._lock:
            self._used.discard(name)
