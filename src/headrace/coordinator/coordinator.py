"""Cluster coordinator: schedules functions, which run on workers."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Self

import msgspec

from headrace.arguments import check_callable, check_instance, check_int, check_seconds
from headrace.coordinator.closure_factory import ClosureFactory
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.cluster import check_address, check_strategy, resolve_cluster
from headrace.coordinator.coordinator_core import CoordinatorCore
from headrace.coordinator.coordinator_runner import CoordinatorRunner, RunnerLifeCycle
from headrace.coordinator.coordinator_server import CoordinatorServer
from headrace.coordinator.per_worker import PerWorkerDataset, PerWorkerResource, PerWorkerVariable
from headrace.coordinator.remote_value import RemoteValue, fetch_structure
from headrace.coordinator.shared_dataset import EpochRunner, SharedDataset, find_shared_dataset
from headrace.coordinator.status import CoordinatorStatus
from headrace.coordinator.worker_iterator import DATASET_TYPES, build_dataset
from headrace.data.dataset import Dataset
from headrace.errors import FailedPreconditionError
from headrace.execution.build import draw_seed
from headrace.parameter_server.pickling import PerWorkerInput
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.plan.options import Options
from headrace.plan.source import INFINITE
from headrace.transport.envelope import decode_error
from headrace.transport.security import Security

__all__ = ["ClusterCoordinator", "CoordinatorStub", "find_coordinator"]


_KEY_CLEANUP_DELAY = 0.1
_CLOSURES_AHEAD = 2
_SHARDS_PER_WORKER = 4
"""Several shards per worker, so that a slow or lost worker delays little."""


class _Settings(NamedTuple):
    """Settings of a coordinator; see its arguments."""

    closures_in_flight: int = 2
    threads_per_worker: int = 1
    max_queued: int = 1 << 16


class ClusterCoordinator:
    """Schedules functions on the workers of a strategy.

    >>> import headrace as hr
    >>> from headrace.coordinator.cluster import Workers
    >>> with hr.coordinator.ClosureWorker(0) as worker:
    ...     strategy = Workers([worker.address])  # or a ParameterServerStrategy
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         value = coordinator.schedule(lambda x: x * 2, args=(21,))  # returns at once
    ...         coordinator.join()  # all have run
    ...         value.fetch()
    42

    A function whose worker is lost runs again on another worker; its writes to variables are
    applied exactly once. A second `ClusterCoordinator` for a strategy is the same object. Also a
    context manager; `close` ends its threads and its sessions with workers.

    Args:
        strategy: A `ParameterServerStrategy`.
        closures_in_flight: Minimum number of functions that a worker holds at a time, so that the
            next one is there when one returns. Workers hold more functions if these are short.
            None: the value of the strategy's existing coordinator, or 2.
        threads_per_worker: Number of functions that a worker runs at a time. None: the value of the
            existing coordinator, or 1.
        max_queued: Maximum number of functions waiting for a worker; beyond it `schedule` blocks.
            None: the value of the existing coordinator, or 65,536.
    """

    _settings: _Settings | None = None

    def __new__(cls, strategy: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the strategy's coordinator, or create one."""
        check_strategy(strategy)
        found = find_coordinator(strategy)
        if found is not None:
            assert isinstance(found, cls)
            return found
        return super().__new__(cls)

    def __init__(
        self,
        strategy: Any,
        closures_in_flight: int | None = None,
        threads_per_worker: int | None = None,
        *,
        max_queued: int | None = None,
    ) -> None:
        given = {
            "closures_in_flight": closures_in_flight,
            "threads_per_worker": threads_per_worker,
            "max_queued": max_queued,
        }
        for name, value in given.items():
            if value is not None:
                check_int(name, value, minimum=1)
        current = self._settings
        defaults = current or _Settings()
        settings = _Settings(
            closures_in_flight or defaults.closures_in_flight,
            threads_per_worker or defaults.threads_per_worker,
            max_queued or defaults.max_queued,
        )
        if current is not None:
            if current != settings:
                raise ValueError(
                    "this strategy already has a coordinator with "
                    f"closures_in_flight={current.closures_in_flight}, "
                    f"threads_per_worker={current.threads_per_worker} and "
                    f"max_queued={current.max_queued}; use that one, or close() it first"
                )
            return
        self._strategy = strategy
        cluster = resolve_cluster(strategy)
        queue = ClosureQueue(
            in_flight=settings.closures_in_flight,
            threads=settings.threads_per_worker,
            staleness=cluster.staleness,
            round_size=cluster.round_size,
            max_queued=settings.max_queued,
            key_cleanup_delay=_KEY_CLEANUP_DELAY,
        )
        core = CoordinatorCore(
            queue,
            session_request=msgspec.structs.replace(
                cluster.session_request, threads=settings.threads_per_worker
            ),
            read_error=decode_error,
        )
        for number, address in cluster.workers.items():
            core.add_worker(address, time.monotonic(), number)
        self._runner = CoordinatorRunner(core, cluster.open_channel, cluster.servers)
        self._closure_factory = ClosureFactory(self._runner, strategy)
        self._settings = settings
        self._server = CoordinatorServer(self._runner, cluster.staleness)
        self._life_cycle = RunnerLifeCycle(self._runner)
        self._life_cycle.start()
        _coordinators[strategy] = weakref.ref(self)
        if isinstance(strategy, ParameterServerStrategy):
            # Weak: the coordinator must stop when the user drops the last reference to it.
            strategy.make_per_worker_variable = functools.partial(
                PerWorkerVariable, self._closure_factory
            )
            strategy.stop_coordinator = weakref.WeakMethod(self._life_cycle.stop)

    def close(self) -> None:
        """Cancel all functions, end all threads and sessions with workers. Idempotent."""
        self._life_cycle.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._strategy

    # --- functions ------------------------------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        retries: int | None = None,
    ) -> RemoteValue:
        """Schedule a function on any worker; return at once, or when the queue has capacity.

        The function and the objects it refers to are pickled when it is first scheduled; arguments
        are pickled each time. Both may include variables, optimizers, tables, per-worker iterators
        and values, which become the worker's own; arguments may also include `RemoteValue`s.

        Args:
            fn: Any function. It runs once, or again if its worker is lost.
            args: A tuple or list.
            kwargs: A dict.
            timeout: Maximum run time in seconds. After it the function fails with
                DeadlineExceededError, and its further writes are rejected. None disables the limit.
            retries: Maximum number of reruns after its worker was lost; None: 10.

        Raises:
            Exception: The first error of an earlier function. All waiting functions were cancelled,
                and this one was not scheduled: schedule them again.
            FailedPreconditionError: If an object cannot be sent to a worker.
        """
        return self._closure_factory.schedule(
            self._closure_factory.build_closure(fn, args, kwargs, timeout=timeout, retries=retries)
        )

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions have run.

        Args:
            timeout: Seconds to wait; None waits forever.

        Raises:
            Exception: The first error of a function; all others are cancelled, and the coordinator
                is usable again.
            DeadlineExceededError: If they have not run in that time.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._runner.join(timeout)

    def done(self) -> bool:
        """Return whether all scheduled functions have run.

        Raises:
            Exception: As in `join`.
        """
        return self._runner.is_done()

    def fetch(self, structure: Any, timeout: float | None = None) -> Any:
        """Return a structure with each `RemoteValue` replaced by its value, once all are ready.

        Args:
            structure: Nested lists, tuples and dicts; other values are returned unchanged.
            timeout: Seconds to wait for all values; None waits forever.

        Raises:
            Exception: The error of the first value that has one.
            DeadlineExceededError: If they are not ready in that time.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        return fetch_structure(structure, deadline)

    def wait_for_any(self, values: Iterable[RemoteValue]) -> None:
        """Wait until at least one of several values, or its error, is ready.

        Raises:
            ValueError: If there are no values.
            Exception: As in `join`.
        """
        pending = list(values)
        if not pending:
            raise ValueError("`values` must contain at least one RemoteValue, but is empty")
        if any(each.is_ready for each in pending):
            return
        self._runner.wait(
            lambda: (
                self._runner.core.queue.failure is not None
                or any(each.is_ready for each in pending)
            ),
            f"one of {len(pending)} functions",
        )
        self._runner.raise_failure()

    @property
    def activity(self) -> tuple[int, int]:
        """Number of the last scheduled function, and of the first one that has not ended."""
        with self._runner.lock:
            queue = self._runner.core.queue
            return queue.last_number, queue.first_unended

    @property
    def capacity(self) -> int:
        """Number of scheduled functions that keeps all workers busy at their current speed."""
        with self._runner.lock:
            return _CLOSURES_AHEAD + _CLOSURES_AHEAD * sum(
                load.window for load in self._runner.core.queue.worker_pool
            )

    def evaluate(
        self,
        shard_fn: Callable[[Dataset], Any],
        dataset: Dataset,
        num_shards: int | Literal["auto"],
        merge: Callable[[list[Any]], Any],
    ) -> Any:
        """Evaluate a dataset on all workers, each element once.

        The dataset is divided into shards. A shard whose worker is lost is evaluated again from its
        start, and counts once.

        Args:
            shard_fn: Called on a worker with one shard, a Dataset; returns the input of `merge`.
            dataset: A finite dataset.
            num_shards: Number of shards; several per worker balance the load. "auto": four per
                current worker, but not more than elements, if their number is known.
            merge: Called in this process with the list of results, in shard order.
        """
        check_callable("merge", merge)
        check_instance("dataset", dataset, Dataset)
        if num_shards == "auto":
            count = self._shard_count(dataset)
        else:
            count = check_int("num_shards", num_shards, minimum=1)
        if dataset.cardinality() == INFINITE:
            raise ValueError(
                "`dataset` must be finite, but its cardinality is infinite; limit it with take(n)"
            )
        seed = dataset.options().seed
        # All shards are taken from a single order.
        seeded = dataset.with_options(Options(seed=draw_seed() if seed is None else seed))
        shards = [seeded.shard(count, index) for index in range(count)]
        values = [self.schedule(shard_fn, args=(shard,)) for shard in shards]
        self.join()
        return merge([value.fetch() for value in values])

    def _shard_count(self, dataset: Dataset) -> int:
        count = _SHARDS_PER_WORKER * max(1, len(self.workers))
        size = dataset.cardinality()
        return count if size < 0 else max(1, min(count, size))

    # --- data -----------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_or_fn: Any) -> PerWorkerDataset:
        """Create a dataset on each worker, which the worker reads independently.

        Args:
            dataset_or_fn: A dataset, a distributed dataset, or a function without arguments that
                returns one; it is called on each worker, where
                `hr.coordinator.get_current_worker_index()` returns the worker's number.
        """
        if isinstance(dataset_or_fn, PerWorkerInput):
            dataset_or_fn = dataset_or_fn.build  # runs on the worker that reads it
        if not isinstance(dataset_or_fn, DATASET_TYPES) and not callable(dataset_or_fn):
            raise ValueError(
                "Unexpected dataset type! `dataset_or_fn` must be a Dataset, a distributed "
                f"dataset, or a function that returns one, but got {dataset_or_fn!r:.80} of type "
                f"{type(dataset_or_fn).__name__}"
            )
        return PerWorkerDataset(self._closure_factory, dataset_or_fn, build_dataset)

    def create_per_worker_values(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> PerWorkerResource:
        """Create a value on each worker with a function.

        Scheduled functions receive their worker's value in place of the returned object. A worker
        that was lost creates the value again.

        Args:
            fn: Called once on each worker.
            args: A tuple or list.
            kwargs: A dict.
        """
        check_callable("fn", fn)
        return PerWorkerResource(
            self._closure_factory,
            f"{getattr(fn, '__qualname__', fn)} for each worker",
            functools.partial(fn, *(args or ()), **(kwargs or {})),
            lambda number, state: (),
        )

    def create_shared_dataset(self, dataset: Dataset) -> SharedDataset:
        """Return a dataset shared by all workers; see `run_epoch`. Its state can be saved."""
        return SharedDataset(dataset)

    def run_epoch(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> int:
        """Call a function on workers until a shared dataset ends; return how many calls returned.

        Each element is delivered to one call. A call whose worker is lost is repeated with the same
        elements. A call that raises OutOfRangeError at the end succeeds, but is not counted. To
        resume an epoch after an error, set the dataset's state again:
        `dataset.set_state(dataset.get_state())`.

        Args:
            fn: Function that calls `next` on the shared dataset any number of times.
            args: Arguments; they or `fn` must include one shared dataset.
            kwargs: Keyword arguments.
        """
        closure = self._closure_factory.build_closure(fn, args, kwargs, allow_shared=True)
        dataset = find_shared_dataset(closure)
        with dataset.open_epoch() as (elements, progress):
            steps = EpochRunner(self._runner, closure, dataset, elements, progress).run()
            self.join()
        return steps

    # --- workers --------------------------------------------------------------------------------

    def add_worker(self, address: str) -> int:
        """Add a worker; return its number.

        Args:
            address: Address at which it listens, as "host:port"; it may start later.

        Raises:
            ValueError: If the address is malformed.
        """
        check_address(address, "`address`")
        with self._runner.lock:
            worker = self._runner.core.add_worker(address, time.monotonic())
        self._runner.wake()
        return worker

    def remove_worker(self, index: int) -> None:
        """Remove a worker: running functions finish, waiting ones move to other workers.

        Raises:
            ValueError: If there is no such worker.
        """
        check_int("index", index, minimum=0)
        with self._runner.lock:
            if index not in self._runner.core.connections:
                known = sorted(self._runner.core.connections)
                raise ValueError(f"no worker {index}; known workers: {known}")
            self._server.remove(self._runner.core.connections[index].address)
            self._runner.core.remove_worker(index)
        self._runner.wake()

    def listen(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        security: Security | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> str:
        """Listen for workers that register themselves; return the address, as "host:port".

        A `ClosureWorker(..., coordinator=address)` may join at any time, from any host. `headrace
        status` and `headrace top` use the same address.

        Args:
            host: Name or address of this machine.
            port: Port to listen on; 0 takes a free one.
            security: Server keys; required if `host` is reachable from another machine.
            metrics_port: Port of `/metrics`, `/healthz` and `/readyz`; None disables them.
            metrics_host: Interface for these; by default this machine only.
        """
        self._runner.check_not_forked()
        servers = self._server.listen(host, port, security, metrics_host, metrics_port)
        self._life_cycle.on_close(servers.close)
        return self._server.address

    @property
    def metrics_address(self) -> str:
        """Address of `/metrics`, as "host:port"; empty without it."""
        return self._server.metrics_address

    def status(self) -> CoordinatorStatus:
        """Return the number of waiting functions, the running functions and the workers' state."""
        return self._server.status()

    @property
    def workers(self) -> dict[int, str]:
        """Addresses of the workers, by number."""
        with self._runner.lock:
            return {number: each.address for number, each in self._runner.core.connections.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        is_picklable = isinstance(self._strategy, ParameterServerStrategy)
        return CoordinatorStub, (self._strategy if is_picklable else None,)


def find_coordinator(strategy: Any) -> ClusterCoordinator | None:
    """Return the coordinator of a strategy; None without one, or if it is closed."""
    reference = _coordinators.get(strategy)
    coordinator = None if reference is None else reference()
    return None if coordinator is None or coordinator._life_cycle.is_stopped else coordinator


_coordinators: weakref.WeakKeyDictionary[Any, weakref.ref[ClusterCoordinator]] = (
    weakref.WeakKeyDictionary()
)


# --- replacement of a coordinator on workers, inside objects that refer to it ---------------------


class CoordinatorStub:
    """Replacement for a pickled `ClusterCoordinator`; any use raises an error.

    So methods of a class that refers to its coordinator can be scheduled.

    Args:
        strategy: The coordinator's strategy if it can be pickled; otherwise None.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy as it is on this worker."""
        if self._strategy is None:
            self._refuse("strategy")
        return self._strategy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols, such as that of copies
            raise AttributeError(name)
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise FailedPreconditionError(
            f"`{name}` of a ClusterCoordinator is only available in the coordinator's process, "
            "and this object is a pickled copy: scheduled functions must not schedule others. "
            "For the worker's number use hr.coordinator.get_current_worker_index()"
        )

    def __repr__(self) -> str:
        return "<a ClusterCoordinator of another process>"
