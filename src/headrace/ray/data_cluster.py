"""A data service on a Ray cluster."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Self

from headrace.arguments import check_int, check_path, check_string
from headrace.cluster.resolver import wait_for
from headrace.data.dataset import Dataset
from headrace.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.ray.actor_launcher import list_actors
from headrace.ray.controller import ClusterOptions, Controller
from headrace.ray.nodes import (
    NAMESPACE,
    ClusterKeys,
    call_actor,
    connect_ray,
    fetch_security,
    find_actor,
    import_ray,
    init_ray,
)
from headrace.ray.service_addresses import CONTROLLER_PREFIX, service_address
from headrace.service.config import ProcessingMode, parse_service
from headrace.service.dataset import distribute
from headrace.transport import address as addresses
from headrace.transport.security import Security

__all__ = ["DataCluster", "connect"]

_START_SECONDS = 300.0
_CLOSE_SECONDS = 30.0
_CONCURRENT_CALLS = 16
_PORTS = range(20_000, 32_000)
"""Ports of dispatchers; as in `transport.address.find_stable_port`."""
_NUM_PORTS = 8


class DataCluster:
    """A data service whose dispatcher and workers are Ray actors; a context manager.

    >>> with hr.ray.DataCluster(min_workers=2) as cluster:
    ...     sorted(int(x) for x in cluster.distribute(hr.Dataset.range(5)))
    [0, 1, 2, 3, 4]

    Ray restarts actors whose processes die. With a `work_dir`, a restarted dispatcher continues
    where it was: each element is delivered exactly once. Without, iterations that were running
    raise an error. The servers accept only processes with the keys of the cluster, which are
    created here and travel in calls of Ray actors.

    If `ray.init` was not called, it is called without arguments.

    Args:
        min_workers: Number of workers; with `max_workers`, the minimum. The constructor waits up to
            5 minutes for them, and logs after 10 s what Ray lacks.
        max_workers: Maximum number of workers. The number then follows the load; None: it is fixed.
        resources_per_worker: Resources of Ray that each worker needs: "CPU", "GPU", "memory" (in
            bytes) or custom ones; None for {"CPU": 1}. User functions see no accelerators without
            "GPU".
        placement: Scheduling strategy of the workers: "SPREAD" (over all nodes), "DEFAULT", or an
            object of `ray.util.scheduling_strategies`.
        work_dir: Directory of the dispatcher's journal, at which the same files are found on each
            node where the dispatcher may run. It prefers the node of this program.
        runtime_env: Runtime environment of the actors, as in `ray.init`.
        name: Name of a service that outlives this program, until `shutdown`; other programs find it
            with `hr.ray.connect(name)`. None: it ends with `close`, or with this program.

    Raises:
        AlreadyExistsError: If a service with this name is running.
        FailedPreconditionError: If the package `ray` is not installed, or `work_dir` is in use.
        UnavailableError: If the workers did not start; the message says what Ray lacks.
    """

    def __init__(
        self,
        min_workers: int = 1,
        max_workers: int | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        placement: Any = "SPREAD",
        work_dir: str | os.PathLike[str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        check_int("min_workers", min_workers, minimum=0)
        if max_workers is not None:
            check_int("max_workers", max_workers, minimum=max(1, min_workers))
        if name is not None:
            _check_name(name)
        if work_dir is not None:
            check_path("work_dir", work_dir)
        actor = CONTROLLER_PREFIX + (name or f"unnamed-{uuid.uuid4().hex[:12]}")
        options = ClusterOptions(
            actor=actor,
            ports=tuple(random.SystemRandom().sample(_PORTS, _NUM_PORTS)),
            min_workers=min_workers,
            max_workers=max_workers,
            resources=_check_resources(resources_per_worker),
            placement=placement,
            work_dir=None if work_dir is None else _absolute(work_dir),
            runtime_env=runtime_env,
        )
        keys = ClusterKeys.create()
        options.config(0, "127.0.0.1", keys)  # checks `work_dir`
        ray = init_ray()
        controller = _create_controller(ray, options, keys, is_detached=name is not None)
        self._attach(actor, controller, keys.client(actor), is_owner=name is None)
        if self._is_owner:
            atexit.register(self.close)
        try:
            wait_for(
                lambda: self._check_workers(min_workers),
                what=f"{min_workers} workers",
                seconds=_START_SECONDS,
            )
        except BaseException:
            self.shutdown()
            raise

    def _attach(self, actor: str, controller: Any, security: Security, *, is_owner: bool) -> None:
        self._actor = actor
        self._controller = controller
        self._security = security
        self._is_owner = is_owner
        self._is_closed = False
        self._process = os.getpid()

    @property
    def name(self) -> str | None:
        """Name of the service; None if it ends with the program that created it."""
        name = self._actor.removeprefix(CONTROLLER_PREFIX)
        return None if name.startswith("unnamed-") else name

    @property
    def target(self) -> str:
        """Current address of the service, for `hr.service.distribute(service=...)`.

        Raises:
            UnavailableError: If the cluster was closed, or its dispatcher is being restarted.
        """
        return str(self._call("target"))

    @property
    def security(self) -> Security:
        """Keys of clients, for `hr.service.distribute(security=...)`."""
        return self._security

    @property
    def num_workers(self) -> int:
        """Number of workers that are registered with the dispatcher."""
        return int(self._call("num_workers"))

    def __repr__(self) -> str:
        status = ", closed" if self._is_closed else ""
        return f"<DataCluster {self._actor.removeprefix(CONTROLLER_PREFIX)}{status}>"

    def __reduce__(self) -> tuple[Callable[[str], DataCluster], tuple[str]]:
        return _find, (self._actor,)

    def distribute(
        self, dataset: Any, processing_mode: ProcessingMode = "distributed_epoch", **options: Any
    ) -> Dataset:
        """Move a dataset's work to the workers; return a dataset that reads their elements.

        Args:
            dataset: A dataset, or another input of `Dataset.from_pipeline`.
            processing_mode: How the workers share it, as in `hr.service.distribute`.
            **options: Further arguments of `hr.service.distribute`, such as `job_name` or
                `ordered`; `service` and `security` are set.

        Raises:
            Exception: As `hr.service.distribute`.
        """
        for option in ("service", "security"):
            if option in options:
                raise TypeError(f"`{option}` is set by DataCluster.distribute; remove it")
        _, port = addresses.split(parse_service(self.target))
        service = service_address(self._actor, port)
        return Dataset.from_pipeline(dataset).apply(
            distribute(processing_mode, service, security=self._security, **options)
        )

    def scale(self, count: int) -> None:
        """Set the number of workers; returns at once.

        Surplus workers drain: they deliver what they have computed, and return the rest of their
        work to the dispatcher.

        Raises:
            FailedPreconditionError: If the number follows the load (`max_workers`).
        """
        self._call("scale", check_int("count", count, minimum=0))

    def close(self) -> None:
        """Stop the service, or disconnect from it if it has a name. Idempotent."""
        if self._is_owner:
            self.shutdown()
        self._is_closed = True

    def shutdown(self) -> None:
        """Stop the service, also a named one. Idempotent.

        Raises:
            UnavailableError: If Ray was shut down in this process, and the service may still run.
        """
        atexit.unregister(self.close)
        if os.getpid() != self._process or self._is_closed:
            return
        ray = import_ray()
        if not ray.is_initialized() and not self._is_owner:
            raise UnavailableError(f"{self!r} was not stopped: Ray was shut down in this process")
        self._is_closed = True
        if not ray.is_initialized():
            return  # `ray.shutdown()` has ended the controller, and the workers end
        with contextlib.suppress(UnavailableError):
            call_actor(self._controller, "close", what=repr(self), timeout=_CLOSE_SECONDS)
        ray.kill(self._controller, no_restart=True)
        # The name is free when this returns.
        deadline = time.monotonic() + _CLOSE_SECONDS
        while find_actor(self._actor) is not None and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._is_closed:
            raise FailedPreconditionError(f"{self!r}: the cluster was closed")
        return call_actor(self._controller, method, *arguments, what=repr(self))

    def _check_workers(self, count: int) -> None:
        found = self.num_workers
        if found < count:
            shortage = self._call("shortage") or "starting"
            raise UnavailableError(f"{found} are registered; {shortage}")


def connect(name: str) -> DataCluster:
    """Return a running service: of another program, or of the driver in a worker of Ray Train.

    >>> _ = hr.ray.DataCluster(name="input")  # in the first program
    >>> with hr.ray.connect("input") as cluster:
    ...     sorted(int(x) for x in cluster.distribute(hr.Dataset.range(5)))
    [0, 1, 2, 3, 4]
    >>> hr.ray.connect("input").shutdown()

    Closing it disconnects; `shutdown` stops the service. If `ray.init` was not called, this
    connects to the cluster of RAY_ADDRESS, or to the one that runs on this machine.

    Args:
        name: Name of the service, as in `hr.ray.DataCluster(name=...)`.

    Raises:
        FailedPreconditionError: If the package `ray` is not installed.
        NotFoundError: If there is no such service; lists those that run.
        UnavailableError: If there is no Ray cluster.
    """
    _check_name(name)
    return _find(CONTROLLER_PREFIX + name)


def _find(actor: str) -> DataCluster:
    """Return the service of a controller's actor."""
    connect_ray()
    controller = find_actor(actor)
    if controller is None:
        running = [each.removeprefix(CONTROLLER_PREFIX) for each in list_actors(CONTROLLER_PREFIX)]
        names = [each for each in running if "/" not in each]
        name = actor.removeprefix(CONTROLLER_PREFIX)
        raise NotFoundError(
            f"no data service named {name!r} runs on this Ray cluster; running: "
            f"{', '.join(names) or 'none'}. Start it with hr.ray.DataCluster(name=...)"
        )
    cluster = DataCluster.__new__(DataCluster)
    cluster._attach(actor, controller, fetch_security(actor), is_owner=False)
    return cluster


def _create_controller(
    ray: Any, options: ClusterOptions, keys: ClusterKeys, *, is_detached: bool
) -> Any:
    """Create the controller's actor, preferably on this node."""
    strategies = ray.util.scheduling_strategies
    settings: dict[str, Any] = {
        "name": options.actor,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": _CONCURRENT_CALLS,
        "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        ),
    }
    if is_detached:
        settings["lifetime"] = "detached"
    if options.runtime_env is not None:
        settings["runtime_env"] = dict(options.runtime_env)
    try:
        return ray.remote(Controller).options(**settings).remote(options, keys)
    except ValueError as error:
        if find_actor(options.actor) is None:
            raise
        name = options.actor.removeprefix(CONTROLLER_PREFIX)
        raise AlreadyExistsError(
            f"a data service named {name!r} runs already: use it with hr.ray.connect({name!r}), or "
            f"stop it with hr.ray.connect({name!r}).shutdown()"
        ) from error


def _check_name(name: str) -> None:
    check_string("name", name, empty=False)
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("unnamed-"):
        raise ValueError(
            f"name={name!r} must consist of letters, digits, '_', '.' and '-', and must not begin "
            "with 'unnamed-'"
        )


def _check_resources(resources: Mapping[str, float] | None) -> dict[str, float]:
    if resources is None:
        return {"CPU": 1}
    if not isinstance(resources, Mapping):
        raise TypeError(
            "`resources_per_worker` must be a dict such as {'CPU': 2}, but got "
            f"{resources!r} of type {type(resources).__name__}"
        )
    for name, amount in resources.items():
        check_string("resources_per_worker", name, empty=False)
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
            raise ValueError(
                f"resources_per_worker[{name!r}] must be a number >= 0, got {amount!r}"
            )
    return dict(resources)


def _absolute(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)
