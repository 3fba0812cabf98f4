"""Coordinator workers and parameter servers as Ray actors.

Each task is an actor in its own bundle of a placement group. Ray restarts the process of an actor
in the same bundle, hence on the same node unless that is lost. A thread of the owner notices this
and starts the server of the task again, at its address if the node is the same.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Self, get_args

from headrace.arguments import check_int, check_seconds, check_string
from headrace.cluster.resolver import SimpleClusterResolver
from headrace.cluster.spec import PS, WORKER, ClusterSpec
from headrace.coordinator.coordinator import find_coordinator
from headrace.errors import AlreadyExistsError, FailedPreconditionError, UnavailableError
from headrace.forks import register_fork_sensitive
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.process.child import NO_ACCELERATORS
from headrace.ray.actor_launcher import resource_options
from headrace.ray.nodes import NAMESPACE, ClusterKeys, find_actor, init_ray
from headrace.ray.training_task import TaskActor, TrainingTask, check_resources
from headrace.threads import start_thread
from headrace.transport.security import Security
from headrace.waiting import WaitWarningLimiter

__all__ = ["TrainingCluster"]

_log = logging.getLogger(__name__)

_CONCURRENT_CALLS = 4
"""Calls of an actor at a time; one of them waits for the end of the server."""
_POLL_SECONDS = 0.25
_STOP_SECONDS = 5.0
"""Seconds that all servers together get to stop before their processes are killed."""

Placement = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]

#: Open clusters, which are closed at the end of the program, before Ray is.
_open: weakref.WeakSet[TrainingCluster] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for cluster in list(_open):
        cluster.close()


class TrainingCluster:
    """Coordinator workers and parameter servers as Ray actors; a context manager.

    >>> with hr.ray.TrainingCluster(workers=1, ps=2) as cluster:
    ...     strategy = cluster.strategy(replication=2)
    ...     with strategy.scope():
    ...         weights = hr.Variable(np.zeros(3), name="weights")
    ...     coordinator = hr.coordinator.ClusterCoordinator(strategy)
    ...     total = coordinator.schedule(sum, args=([1, 2, 3],)).fetch()
    ...     _ = weights.assign_add(np.full(3, total))
    ...     weights.numpy().tolist()
    [6.0, 6.0, 6.0]

    This process is not a task of the cluster: it runs the coordinator. The actors end with it.
    Servers accept only clients with the keys of this cluster, which `strategy` passes on.

    Ray restarts a task whose process ends. On the same node it returns at its address, and
    strategies continue with it. If its node is lost, Ray restarts it on another node: a worker is
    added to the coordinators under the next number, in place of the old one; an existing strategy
    cannot reach a parameter server at its new address. The contents of a parameter server are lost
    with its process, unless the strategy has `replication=2`; `CheckpointManager` restores them.

    Args:
        workers: Number of workers.
        ps: Number of parameter servers.
        resources_per_worker: Resources that Ray reserves for each worker, such as
            {"CPU": 2, "GPU": 1}; None: one CPU. GPUs are hidden from tasks that reserve none.
        resources_per_ps: The same for each parameter server.
        placement: Strategy of the placement group: "SPREAD" distributes tasks over nodes as far as
            possible, "PACK" uses few nodes; "STRICT_SPREAD" and "STRICT_PACK" fail otherwise.
        runtime_env: Ray's runtime environment of the actors.
        name: Prefix of the actors' names, as in "NAME-worker-0"; None chooses one.
        timeout: Seconds to wait for resources and the start of all tasks.

    Raises:
        FailedPreconditionError: If Ray is not installed.
        AlreadyExistsError: If actors of this name exist.
        UnavailableError: If tasks did not start in time; names them.
        TypeError, ValueError: If an argument is invalid.
    """

    def __init__(
        self,
        workers: int,
        ps: int,
        resources_per_worker: Mapping[str, float] | None = None,
        resources_per_ps: Mapping[str, float] | None = None,
        placement: Placement = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        name: str | None = None,
        *,
        timeout: float = 300.0,
    ) -> None:
        counts = {
            WORKER: check_int("workers", workers, minimum=0),
            PS: check_int("ps", ps, minimum=0),
        }
        if not any(counts.values()):
            raise ValueError("`workers` and `ps` are both 0, but a cluster needs at least one task")
        resources = {
            WORKER: check_resources("resources_per_worker", resources_per_worker),
            PS: check_resources("resources_per_ps", resources_per_ps),
        }
        if placement not in get_args(Placement):
            raise ValueError(
                f"`placement` must be one of {get_args(Placement)}, but got {placement!r}"
            )
        if runtime_env is not None and not isinstance(runtime_env, Mapping):
            raise TypeError(f"`runtime_env` must be a dict or None, but got {runtime_env!r}")
        if name is not None:
            check_string("name", name, empty=False)
        check_seconds("timeout", timeout)
        self._name = name or f"headrace-training-{secrets.token_hex(4)}"
        self._timeout = timeout
        self._process = os.getpid()
        self._keys = ClusterKeys.create()
        self._ray = init_ray()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._tasks: dict[tuple[str, int], TrainingTask] = {}
        self._group: Any = None
        self._thread = threading.Thread(
            target=self._supervise, name=f"supervisor of {self._name}", daemon=True
        )
        #: Strategies that use this cluster; they wait for its tasks until they are closed.
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        tasks = [(job_name, i) for job_name, count in counts.items() for i in range(count)]
        deadline = time.monotonic() + timeout
        _open.add(self)
        register_fork_sensitive(self)
        try:
            self._check_names(tasks)
            self._reserve([resources[job_name] for job_name, _ in tasks], placement, deadline)
            for bundle, (job_name, index) in enumerate(tasks):
                self._tasks[job_name, index] = self._create_task(
                    job_name, index, bundle, resources[job_name], runtime_env or {}
                )
            start_thread(self._thread)
            self._wait_until_running(list(self._tasks.values()), deadline)
        except BaseException:
            self.close()
            raise

    @property
    def cluster_resolver(self) -> SimpleClusterResolver:
        """Return a resolver of the tasks at their current addresses; this process has no task."""
        spec: dict[str, dict[int, str]] = {}
        with self._lock:
            for (job_name, index), task in self._tasks.items():
                spec.setdefault(job_name, {})[index] = task.address
        resolver = SimpleClusterResolver(ClusterSpec(spec), environment="ray")
        resolver.users = self._users
        return resolver

    @property
    def security(self) -> Security:
        """Keys of a client of the servers, for this process only: they cannot be pickled."""
        return self._keys.client()

    def strategy(
        self, variable_partitioner: Callable[..., Any] | None = None, **options: Any
    ) -> ParameterServerStrategy:
        """Create a strategy with the current addresses and the keys of this cluster.

        Waits until all parameter servers are running, as long as the constructor does at most.

        Args:
            variable_partitioner: As in `ParameterServerStrategy`.
            **options: Further arguments of `ParameterServerStrategy`, such as `mode="sync"`.

        Raises:
            FailedPreconditionError: If the cluster is closed, or Ray was shut down.
            UnavailableError: If a parameter server is not running; names it.
            TypeError, ValueError: If an option is invalid.
        """
        for option in ("cluster_resolver", "security"):
            if option in options:
                raise TypeError(f"`{option}` is set by TrainingCluster.strategy; remove it")
        servers = [task for task in self._tasks.values() if task.job_name == PS]
        self._wait_until_running(servers, time.monotonic() + self._timeout)
        return ParameterServerStrategy(
            self.cluster_resolver, variable_partitioner, security=self.security, **options
        )

    def is_running(self, task_type: str, task_index: int) -> bool:
        """Return whether a task is running."""
        return self.pid(task_type, task_index) is not None

    def pid(self, task_type: str, task_index: int) -> int | None:
        """Return the process id of a task on its node, or None if it is not running."""
        process = self._find_task(task_type, task_index).process
        return process.pid if process is not None and self._ray.is_initialized() else None

    def kill(self, task_type: str, task_index: int) -> None:
        """Kill the process of a task (SIGKILL), to test what follows; Ray restarts it.

        Raises:
            ValueError: If there is no such task.
            FailedPreconditionError: If the cluster is closed, or Ray was shut down.
        """
        task = self._find_task(task_type, task_index)
        with self._lock:
            self._check_open()
            task.kill(time.monotonic())

    def close(self) -> None:
        """Close strategies that use this cluster, and stop all tasks. Idempotent."""
        _open.discard(self)
        if os.getpid() != self._process:
            return  # forked: the parent owns it
        for each in list(self._users):
            each.close()
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._ray.is_initialized():
            return  # `ray.shutdown()` has ended the actors
        tasks = list(self._tasks.values())
        running = [task.actor.stop.remote() for task in tasks if task.process is not None]
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_STOP_SECONDS)
        for task in tasks:
            task.process = None
            self._ray.kill(task.actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    stop = close

    def after_fork_in_child(self) -> None:
        """Leave the cluster to the parent process, in a forked child."""
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TrainingCluster {self._name!r} of {', '.join(map(str, self._tasks.values()))}>"

    # --- start ------------------------------------------------------------------------------------

    def _actor_name(self, job_name: str, index: int) -> str:
        return f"{self._name}-{job_name}-{index}"

    def _check_names(self, tasks: list[tuple[str, int]]) -> None:
        for actor_name in (self._actor_name(*task) for task in tasks):
            if find_actor(actor_name) is not None:
                raise AlreadyExistsError(
                    f"a Ray actor {actor_name!r} exists already: close that cluster, or choose "
                    "another `name`"
                )

    def _reserve(
        self, resources: list[dict[str, float]], placement: Placement, deadline: float
    ) -> None:
        """Reserve a bundle for each task, and wait for it."""
        self._group = self._ray.util.placement_group(resources, strategy=placement)
        ready = self._group.ready()

        def describe() -> str:
            total, unused = self._ray.cluster_resources(), self._ray.available_resources()
            needed: Counter[str] = Counter()
            for each in resources:
                needed.update(each)
            amounts = ", ".join(
                f"{amount:g} {name} ({unused.get(name, 0):g} of {total.get(name, 0):g} are unused)"
                for name, amount in needed.items()
            )
            return (
                f"Ray has not reserved resources for {len(resources)} tasks with "
                f"placement={placement!r}. They need {amounts}: add nodes, or reserve less"
            )

        def is_reserved() -> bool:
            return bool(self._ray.wait([ready], timeout=_POLL_SECONDS)[0])

        _wait(is_reserved, describe, deadline)

    def _create_task(
        self,
        job_name: str,
        index: int,
        bundle: int,
        resources: dict[str, float],
        runtime_env: Mapping[str, Any],
    ) -> TrainingTask:
        # Set by the actor, as another environment of its process would slow down its start.
        hidden = {} if "GPU" in resources else NO_ACCELERATORS
        variables = runtime_env.get("env_vars", {})
        environment = {name: value for name, value in hidden.items() if name not in variables}
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        actor = (
            self._ray.remote(TaskActor)
            .options(
                name=self._actor_name(job_name, index),
                namespace=NAMESPACE,
                max_restarts=-1,
                max_concurrency=_CONCURRENT_CALLS,
                scheduling_strategy=place,
                runtime_env=dict(runtime_env),
                **resource_options(resources),
            )
            .remote(job_name, index, self._keys, environment)
        )
        task = TrainingTask(job_name, index, actor)
        task.start(time.monotonic())
        return task

    def _wait_until_running(self, tasks: list[TrainingTask], deadline: float) -> None:
        def describe() -> str:
            return "; ".join(
                f"{task} is not running" + (f": {task.last_error}" if task.last_error else "")
                for task in tasks
                if task.process is None
            )

        def are_running() -> bool:
            self._check_open()
            if all(task.process is not None for task in tasks):
                return True
            if any(task.is_dead for task in tasks):
                raise UnavailableError(describe())
            time.sleep(0.02)
            return False

        _wait(are_running, describe, deadline)

    # --- supervision ------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Advance tasks until the cluster is closed."""
        # Without Ray, calls of its functions would start another Ray cluster.
        while not self._closed.is_set() and self._ray.is_initialized():
            try:
                self._supervise_once(list(self._tasks.values()))
            except Exception as error:
                if self._closed.is_set() or not self._ray.is_initialized():
                    return
                _log.warning("%s: %s; retrying", self._name, error)
                self._closed.wait(1.0)

    def _supervise_once(self, tasks: list[TrainingTask]) -> None:
        calls = {task.pending: task for task in tasks if task.pending is not None}
        if calls:
            ended, _ = self._ray.wait(list(calls), num_returns=1, timeout=_POLL_SECONDS)
        else:
            ended = []
            self._closed.wait(_POLL_SECONDS)
        if not self._ray.is_initialized():
            return
        now = time.monotonic()
        for call in ended:
            task = calls[call]
            with self._lock:
                previous = task.address
                has_moved = task.advance(now)
            if has_moved:
                self._handle_moved(task, previous)
        for task in tasks:
            with self._lock:
                if task.pending is None and not task.is_dead and task.retry_at <= now:
                    task.start(now)
            task.warn_if_missing(now)

    def _handle_moved(self, task: TrainingTask, previous: str) -> None:
        """Replace a worker in running coordinators after its address has changed."""
        if task.job_name == PS:
            _log.error(
                "ps %d moved from %s to %s, without its contents; existing strategies cannot reach "
                "it: create another one with `strategy()`, and restore a checkpoint",
                task.index,
                previous,
                task.address,
            )
            return
        _log.warning("worker %d moved from %s to %s", task.index, previous, task.address)
        for strategy in list(self._users):
            coordinator = find_coordinator(strategy)
            if coordinator is None:
                continue
            coordinator.add_worker(task.address)
            for number, address in coordinator.workers.items():
                if address == previous:
                    with suppress(ValueError):  # removed in the meantime
                        coordinator.remove_worker(number)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise FailedPreconditionError("the cluster is closed; create another one")
        if not self._ray.is_initialized():
            raise FailedPreconditionError(
                "Ray was shut down in this process, which ended the cluster; create another one"
            )

    def _find_task(self, task_type: str, task_index: int) -> TrainingTask:
        check_string("task_type", task_type)
        check_int("task_index", task_index, minimum=0)
        task = self._tasks.get((task_type, task_index))
        if task is None:
            raise ValueError(f"the cluster has no {task_type!r} task {task_index}: {self!r}")
        return task


def _wait(is_done: Callable[[], bool], describe: Callable[[], str], deadline: float) -> None:
    """Wait for a condition; log after ten seconds what is missing.

    Args:
        is_done: The condition; it sleeps for a moment if it does not hold.
        describe: Returns what is missing.
        deadline: Time of the monotonic clock.

    Raises:
        UnavailableError: At the deadline.
    """
    began = time.monotonic()
    warnings = WaitWarningLimiter()
    while not is_done():
        now = time.monotonic()
        if now >= deadline:
            raise UnavailableError(f"after {now - began:.0f} s: {describe()}")
        if warnings.should_warn(now - began):
            _log.warning("waiting for %.0f s: %s", now - began, describe())
