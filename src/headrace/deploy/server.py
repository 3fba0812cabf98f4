"""Server of a cluster task: a worker or a parameter server."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from typing import Any

from headrace.arguments import check_int, check_metrics, check_string
from headrace.cluster.spec import PS, TYPES, WORKER, ClusterSpec, check_task
from headrace.coordinator.worker import ClosureWorker
from headrace.parameter_server.server import ParameterServer
from headrace.serving.life_cycle import LifeCycle
from headrace.transport import address as addresses
from headrace.transport.security import Security, check_security

__all__ = ["Server"]

#: Listening servers. Programs of tf.distribute start some without keeping a reference.
_listening: set[Server] = set()


@atexit.register
def _stop_all() -> None:
    for server in list(_listening):
        server.stop()


class Server(LifeCycle):
    """Worker or parameter server of a cluster, at its address; a context manager.

    A worker runs the functions that a coordinator schedules, a parameter server stores its
    variables. A started server runs until it is stopped or the program ends, even without a
    reference to it.

    >>> import headrace as hr
    >>> spec = hr.distribute.ClusterSpec({"worker": ["127.0.0.1:0"], "ps": ["127.0.0.1:0"]})
    >>> with hr.distribute.Server(spec, "ps", 0) as server:
    ...     server.target.startswith("tcp://127.0.0.1:")
    True

    Args:
        cluster_spec: Tasks of the cluster. Port 0 in an address takes a free one, which only
            `target` returns.
        job_name: "worker" or "ps"; None: the only type of the cluster.
        task_index: Number of the task; None: the only one of its type.
        start: Whether to start now; otherwise call `start()`.
        protocol: Ignored: there is only one.
        security: Keys of this server and of permitted clients; required at an address that other
            machines can reach, since workers run functions.
        host: Interface to listen on, instead of the host in the address, which may be a name or an
            address that only other machines know.
        coordinator: Address at which a coordinator listens (`ClusterCoordinator.listen`): a worker
            registers itself there, and the strategy need not name it.
        metrics_port: Port of `/metrics`, `/healthz` and `/readyz` over HTTP; 0 takes a free one,
            None disables them.
        metrics_host: Interface for these; by default this machine only.

    Raises:
        ValueError: If the task is ambiguous, does not exist or has a type without a server; or if
            `security` is missing.
        TypeError: If an argument has the wrong type.
        OSError: If the port is in use, or the host is not an address of this machine.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        start: bool = True,
        protocol: str | None = None,
        security: Security | None = None,
        *,
        host: str | None = None,
        coordinator: str | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> None:
        super().__init__()
        spec = ClusterSpec(cluster_spec)
        if protocol is not None:
            check_string("protocol", protocol)
        check_security(security)
        if host is not None:
            check_string("host", host, empty=False)
        self._job_name, self._task_index = _resolve_task(spec, job_name, task_index)
        # Some resolvers write "grpc://host:port".
        written = spec.task_address(self._job_name, self._task_index).rpartition("://")[2]
        named, self._port = _split_address(written)
        self._host = named if host is None else host
        self._security = security
        check_metrics(metrics_port, metrics_host)
        self._metrics = metrics_host, metrics_port
        if coordinator is not None and self._job_name != WORKER:
            raise ValueError(
                "`coordinator` is only for workers, since the strategy finds parameter "
                f"servers in its cluster, but this is a {self._job_name!r} task"
            )
        self._coordinator = coordinator
        self._task: ClosureWorker | ParameterServer | None = None
        if start:
            self.start()

    @property
    def job_name(self) -> str:
        """Type of the task."""
        return self._job_name

    @property
    def task_index(self) -> int:
        """Number of the task among those of its type."""
        return self._task_index

    @property
    def address(self) -> str:
        """Address at which it listens, as "host:port"; empty before `start`."""
        return "" if self._task is None else self._task.address

    @property
    def target(self) -> str:
        """Address at which it listens, as "tcp://host:port"; empty before `start`."""
        return f"tcp://{self.address}" if self.address else ""

    @property
    def metrics_address(self) -> str:
        """Address of `/metrics`, as "host:port"; empty if `metrics_port` is None."""
        return "" if self._task is None else self._task.metrics_address

    def __repr__(self) -> str:
        address = self.target or "no address yet"
        return f"<Server of {self._job_name!r} task {self._task_index} at {address}>"

    def _open(self) -> None:
        make = _SERVER_TYPES[self._job_name]
        if self._coordinator is not None:
            make = functools.partial(ClosureWorker, coordinator=self._coordinator)
        metrics_host, metrics_port = self._metrics
        task = make(
            self._task_index,
            self._host,
            self._port,
            security=self._security,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
        self._on_stop(task.stop)
        task.start()
        self._task = task
        self._on_stop(lambda: _listening.discard(self))
        _listening.add(self)


#: Server class by type of task.
_SERVER_TYPES: dict[str, Callable[..., ClosureWorker | ParameterServer]] = {
    PS: ParameterServer,
    WORKER: ClosureWorker,
}


def _resolve_task(
    spec: ClusterSpec, job_name: str | None, task_index: int | None
) -> tuple[str, int]:
    """Return type and number of the requested task.

    Raises:
        ValueError: If it is ambiguous, does not exist, or has a type without a server.
    """
    if job_name is None:
        if len(spec.jobs) != 1:
            existing = ", ".join(map(repr, spec.jobs)) or "no tasks"
            raise ValueError(f"Must specify an explicit `job_name`: the cluster has {existing}")
        job_name = spec.jobs[0]
    check_string("job_name", job_name)
    if job_name in TYPES and job_name not in _SERVER_TYPES:
        raise ValueError(
            f"Unexpected task_type to start a server: {job_name}; only workers and "
            "parameter servers ('worker', 'ps') have servers, since no other program "
            "calls its tasks"
        )
    if task_index is None:
        indices = spec.task_indices(job_name)
        if len(indices) != 1:
            existing = ", ".join(map(str, indices)) or "none"
            raise ValueError(
                f"Must specify an explicit `task_index`: tasks of {job_name!r} are {existing}"
            )
        task_index = indices[0]
    task_index = check_int("task_index", task_index, minimum=0)
    check_task(spec, job_name, task_index)
    return job_name, task_index


def _split_address(address: str) -> tuple[str, int]:
    """Split an address, in which the port may be 0."""
    host, colon, port = address.rpartition(":")
    if colon and port == "0":
        return addresses.split(f"{host}:1")[0], 0
    return addresses.split(address)
