"""A task of a cluster: what listens at its address."""

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

#: Servers that listen. Programs of tf.distribute start some and keep none.
_listening: set[Server] = set()


@atexit.register
def _stop_all() -> None:
    for server in list(_listening):
        server.stop()


class Server(LifeCycle):
    """A worker or a parameter server of a cluster, at its address; a context manager.

    A worker runs what a coordinator schedules, a parameter server keeps its variables. One that
    was started runs until it is stopped, or the program ends, whether anybody holds it or not.

    >>> import headrace as hr
    >>> spec = hr.distribute.ClusterSpec({"worker": ["127.0.0.1:0"], "ps": ["127.0.0.1:0"]})
    >>> with hr.distribute.Server(spec, "ps", 0) as server:
    ...     server.target.startswith("tcp://127.0.0.1:")
    True

    Args:
        cluster_spec: The tasks of the cluster. Port 0 in an address takes one that is free, which
            only `target` names.
        job_name: "worker" or "ps"; None: the only type that the cluster has.
        task_index: The number of the task; None: the only one of its type.
        start: Start now; else `start()` does.
        protocol: Left out of account: there is one.
        security: The keys of this server, and who may enter; needed at an address that other
            machines reach, since workers run functions.
        host: Where to listen, in place of the host in the address, which may be a name or an
            address that only other machines know.
        coordinator: Where a coordinator listens (`ClusterCoordinator.listen`): a worker announces
            itself there, and need not be known to the strategy.
        metrics_port: Where `/metrics`, `/healthz` and `/readyz` are served over HTTP; 0 takes one
            that is free, None serves none.
        metrics_host: Whom these are served for; the default is this machine alone.

    Raises:
        ValueError: It is not clear which task this is, there is no such one, or it is none that
            listens; or `security` is missing.
        TypeError: An argument is of another type.
        OSError: The port is in use, or the host is none of this machine.
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
        self._job_name, self._task_index = _task(spec, job_name, task_index)
        # "grpc://host:port" is what some resolvers write.
        written = spec.task_address(self._job_name, self._task_index).rpartition("://")[2]
        named, self._port = _split(written)
        self._host = named if host is None else host
        self._security = security
        check_metrics(metrics_port, metrics_host)
        self._metrics = metrics_host, metrics_port
        if coordinator is not None and self._job_name != WORKER:
            raise ValueError(
                "`coordinator` is for workers, which announce themselves there; the strategy knows "
                f"the parameter servers from its cluster, but this is a {self._job_name!r} task"
            )
        self._coordinator = coordinator
        self._task: ClosureWorker | ParameterServer | None = None
        if start:
            self.start()

    @property
    def job_name(self) -> str:
        """The type of the task."""
        return self._job_name

    @property
    def task_index(self) -> int:
        """The number of the task among those of its type."""
        return self._task_index

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"; empty before `start`."""
        return "" if self._task is None else self._task.address

    @property
    def target(self) -> str:
        """Where it listens, as "tcp://host:port"; empty before `start`."""
        return f"tcp://{self.address}" if self.address else ""

    @property
    def metrics_address(self) -> str:
        """Where `/metrics` is, as "host:port"; empty where `metrics_port` is None."""
        return "" if self._task is None else self._task.metrics_address

    def __repr__(self) -> str:
        where = self.target or "no address yet"
        return f"<Server of {self._job_name!r} task {self._task_index} at {where}>"

    def _open(self) -> None:
        make = _KINDS[self._job_name]
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
        self._keep(task.stop)
        task.start()
        self._task = task
        self._keep(lambda: _listening.discard(self))
        _listening.add(self)


#: What listens, for each type of tasks that does.
_KINDS: dict[str, Callable[..., ClosureWorker | ParameterServer]] = {
    PS: ParameterServer,
    WORKER: ClosureWorker,
}


def _task(spec: ClusterSpec, job_name: str | None, task_index: int | None) -> tuple[str, int]:
    """Return the task that is meant.

    Raises:
        ValueError: It is not clear, not there, or none that listens.
    """
    if job_name is None:
        if len(spec.jobs) != 1:
            there = ", ".join(map(repr, spec.jobs)) or "no tasks"
            raise ValueError(f"Must specify an explicit `job_name`: the cluster has {there}")
        job_name = spec.jobs[0]
    check_string("job_name", job_name)
    if job_name in TYPES and job_name not in _KINDS:
        raise ValueError(
            f"Unexpected task_type to start a server: {job_name}; its program is not called by "
            "others, so it needs none. Workers and parameter servers ('worker', 'ps') do"
        )
    if task_index is None:
        indices = spec.task_indices(job_name)
        if len(indices) != 1:
            there = ", ".join(map(str, indices)) or "none"
            raise ValueError(
                f"Must specify an explicit `task_index`: tasks of {job_name!r} are {there}"
            )
        task_index = indices[0]
    task_index = check_int("task_index", task_index, minimum=0)
    check_task(spec, job_name, task_index)
    return job_name, task_index


def _split(address: str) -> tuple[str, int]:
    """Take an address apart, in which the port may be 0."""
    host, colon, port = address.rpartition(":")
    if colon and port == "0":
        return addresses.split(f"{host}:1")[0], 0
    return addresses.split(address)
