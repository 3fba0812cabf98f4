"""The cluster coordinator: functions are scheduled here, and run on workers."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, Self

import msgspec

from headrace.arguments import check_callable, check_instance, check_int, check_seconds
from headrace.coordinator.closure_queue import ClosureQueue
from headrace.coordinator.cluster import check_address, check_strategy, cluster_of
from headrace.coordinator.coordination import Coordination
from headrace.coordinator.keeping import Keeping
from headrace.coordinator.per_worker import PerWorkerDataset, PerWorkerResource, PerWorkerVariable
from headrace.coordinator.reception import Reception
from headrace.coordinator.remote_value import RemoteValue, fetched
from headrace.coordinator.shared_dataset import Epoch, SharedDataset, shared_by
from headrace.coordinator.shell import RunningShell, Shell
from headrace.coordinator.status import CoordinatorStatus
from headrace.coordinator.worker_iterator import DATASETS, build_dataset
from headrace.data.dataset import Dataset
from headrace.errors import FailedPreconditionError
from headrace.execution.build import draw_seed
from headrace.parameter_server.pickling import PerWorkerInput
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.plan.options import Options
from headrace.plan.source import INFINITE
from headrace.transport.envelope import decode_error
from headrace.transport.security import Security

__all__ = ["ClusterCoordinator", "CoordinatorStub", "coordinator_of"]


_MOST_QUEUED = 1 << 16
_SETTLE_WITHIN = 0.1
_AHEAD = 2
_SHARDS_PER_WORKER = 4
"""So that a worker that is slower, or lost, leaves little to wait for."""


class ClusterCoordinator:
    """Schedules functions, which run on the workers of a strategy.

    >>> import headrace as hr
    >>> from headrace.coordinator.cluster import Workers
    >>> with hr.coordinator.ClosureWorker(0) as worker:
    ...     strategy = Workers([worker.address])  # or a ParameterServerStrategy
    ...     with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         value = coordinator.schedule(lambda x: x * 2, args=(21,))  # returns at once
    ...         coordinator.join()  # all have run
    ...         value.fetch()
    42

    A function runs again on another worker if its worker is lost; what it wrote to variables is
    applied once all the same. Made again for a strategy that has one, it is the same object.
    Also a context manager; `close` ends its threads, and lets the workers go.

    Args:
        strategy: A `ParameterServerStrategy`.
        closures_in_flight: How many functions a worker has at a time, at least: one runs, the next
            one is there already. Workers get more of short ones. None: that of the coordinator
            that the strategy has, or 2.
        threads_per_worker: How many functions a worker runs at a time. None: likewise, or 1.
        most_queued: How many may wait for a worker; `schedule` waits beyond that. None: likewise,
            or 65,536.
    """

    _settings: tuple[int, int, int] | None = None

    def __new__(cls, strategy: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the coordinator that the strategy has, or a new one."""
        check_strategy(strategy)
        found = coordinator_of(strategy)
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
        most_queued: int | None = None,
    ) -> None:
        given = {
            "closures_in_flight": closures_in_flight,
            "threads_per_worker": threads_per_worker,
            "most_queued": most_queued,
        }
        for name, value in given.items():
            if value is not None:
                check_int(name, value, minimum=1)
        defaults = self._settings or (2, 1, _MOST_QUEUED)
        settings = closures_in_flight, threads_per_worker, most_queued = (
            closures_in_flight or defaults[0],
            threads_per_worker or defaults[1],
            most_queued or defaults[2],
        )
        if self._settings is not None:
            if self._settings != settings:
                raise ValueError(
                    "this strategy has a coordinator already, with closures_in_flight="
                    f"{self._settings[0]} and threads_per_worker={self._settings[1]}; close() that "
                    "one first, or use it"
                )
            return
        self._strategy = strategy
        cluster = cluster_of(strategy)
        queue = ClosureQueue(
            in_flight=closures_in_flight,
            threads=threads_per_worker,
            staleness=cluster.staleness,
            round_size=cluster.round_size,
            most_queued=most_queued,
            settle_within=_SETTLE_WITHIN,
        )
        core = Coordination(
            queue,
            greeting=msgspec.structs.replace(cluster.greeting, threads=threads_per_worker),
            read_error=decode_error,
        )
        for number, address in cluster.workers.items():
            core.add_worker(address, time.monotonic(), number)
        self._shell = Shell(core, cluster.dial, cluster.servers)
        self._keeping = Keeping(self._shell, strategy)
        self._settings = settings
        self._reception = Reception(self._shell, cluster.staleness)
        self._running = RunningShell(self._shell)
        self._running.start()
        _known[strategy] = weakref.ref(self)
        if isinstance(strategy, ParameterServerStrategy):
            # Not this object: it ends when nobody holds it.
            strategy.make_per_worker_variable = functools.partial(PerWorkerVariable, self._keeping)
            strategy.stop_coordinator = weakref.WeakMethod(self._running.stop)

    def close(self) -> None:
        """Call off what there is, end all threads and let the workers go. May be called twice."""
        self._running.stop()

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
        """Have a function run on some worker; return at once, or as soon as the queue has room.

        The function is pickled when it is scheduled first, with what it refers to; arguments are
        pickled each time. Among both may be variables, optimizers, tables, per-worker iterators
        and values, which are the worker's there; among arguments also `RemoteValue`s.

        Args:
            fn: Any function. It runs once, or again if its worker is lost.
            args: A tuple or list.
            kwargs: A dict.
            timeout: Seconds that it may run; then it fails with DeadlineExceededError, and what it
                still writes is refused.
            retries: How often it is run again after its worker was lost; None: 10 times.

        Raises:
            Exception: The first error of a function that was scheduled before. All that waited is
                cancelled then, and this function was not taken: schedule it again.
            FailedPreconditionError: Something cannot be sent to a worker.
        """
        return self._keeping.schedule(
            self._keeping.closure(fn, args, kwargs, timeout=timeout, retries=retries)
        )

    def join(self, timeout: float | None = None) -> None:
        """Wait until all functions that were scheduled have run.

        Args:
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            Exception: The first error of a function; the rest is cancelled, and the next call finds
                all in order.
            DeadlineExceededError: They have not run in that time.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._shell.join(timeout)

    def done(self) -> bool:
        """Return whether all functions that were scheduled have run.

        Raises:
            Exception: As `join`.
        """
        return self._shell.is_done()

    def fetch(self, structure: Any, timeout: float | None = None) -> Any:
        """Return a structure with the value of each `RemoteValue` in it, once all are here.

        Args:
            structure: Nested lists, tuples and dicts; what is no `RemoteValue` stays as it is.
            timeout: Seconds to wait for all; None: as long as it takes.

        Raises:
            Exception: The error of the first that has one.
            DeadlineExceededError: They are not here in that time.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        until = None if timeout is None else time.monotonic() + timeout
        return fetched(structure, until)

    def wait_for_any(self, values: Iterable[RemoteValue]) -> None:
        """Wait until at least one of several values, or its error, is here.

        Raises:
            ValueError: There are none.
            Exception: As `join`.
        """
        waited = list(values)
        if not waited:
            raise ValueError("`values` must be RemoteValues, at least one, but there is none")
        if any(each.is_ready for each in waited):
            return
        self._shell.wait(
            lambda: (
                self._shell.core.queue.failure is not None or any(each.is_ready for each in waited)
            ),
            f"one of {len(waited)} functions",
        )
        self._shell.raise_failure()

    @property
    def activity(self) -> tuple[int, int]:
        """Number of the function that was scheduled last, and of the first that has not ended."""
        with self._shell.lock:
            queue = self._shell.core.queue
            return queue.last, queue.first

    @property
    def capacity(self) -> int:
        """How many scheduled functions keep all workers busy, at the speed that they have now."""
        with self._shell.lock:
            return _AHEAD + _AHEAD * sum(load.window for load in self._shell.core.queue.loads)

    def evaluate(
        self,
        shard_fn: Callable[[Dataset], Any],
        dataset: Dataset,
        num_shards: int | Literal["auto"],
        merge: Callable[[list[Any]], Any],
    ) -> Any:
        """Evaluate a dataset on all workers, each element once.

        The dataset is cut into shards; a shard whose worker is lost is evaluated again, whole, and
        counts once.

        Args:
            shard_fn: Called on a worker with one shard, a Dataset; returns what `merge` needs.
            dataset: A finite one.
            num_shards: How many; some for each worker share the work evenly. "auto": four for each
                worker that there is now, and no more than elements, if their number is known.
            merge: Called here with the list of what was returned, in the order of the shards.
        """
        check_callable("merge", merge)
        check_instance("dataset", dataset, Dataset)
        if num_shards == "auto":
            count = self._shard_count(dataset)
        else:
            count = check_int("num_shards", num_shards, minimum=1)
        if dataset.cardinality() == INFINITE:
            raise ValueError(
                "`dataset` must be finite, but this one has no end; take(n) gives it one"
            )
        seed = dataset.options().seed
        # All shards are cut from one order.
        whole = dataset.with_options(Options(seed=draw_seed() if seed is None else seed))
        shards = [whole.shard(count, index) for index in range(count)]
        values = [self.schedule(shard_fn, args=(shard,)) for shard in shards]
        self.join()
        return merge([value.fetch() for value in values])

    def _shard_count(self, dataset: Dataset) -> int:
        count = _SHARDS_PER_WORKER * max(1, len(self.workers))
        size = dataset.cardinality()
        return count if size < 0 else max(1, min(count, size))

    # --- data -----------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_or_fn: Any) -> PerWorkerDataset:
        """Have each worker make a dataset of its own, and read it for itself.

        Args:
            dataset_or_fn: A dataset, a distributed dataset, or a function without arguments that
                returns one; it is called on each worker, where
                `hr.coordinator.get_current_worker_index()` says which one.
        """
        if isinstance(dataset_or_fn, PerWorkerInput):
            dataset_or_fn = dataset_or_fn.build  # on the worker, where it is read
        if not isinstance(dataset_or_fn, DATASETS) and not callable(dataset_or_fn):
            raise ValueError(
                "Unexpected dataset type! `dataset_or_fn` must be a Dataset, a distributed "
                f"dataset, or a function that returns one, but got {dataset_or_fn!r:.80} of type "
                f"{type(dataset_or_fn).__name__}"
            )
        return PerWorkerDataset(self._keeping, dataset_or_fn, build_dataset)

    def create_per_worker_values(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> PerWorkerResource:
        """Have each worker make a value with a function, and keep it.

        In functions that are scheduled the object that is returned is the worker's value. A worker
        that was lost makes it again.

        Args:
            fn: Called once on each worker.
            args: A tuple or list.
            kwargs: A dict.
        """
        check_callable("fn", fn)
        return PerWorkerResource(
            self._keeping,
            f"{getattr(fn, '__qualname__', fn)} for each worker",
            functools.partial(fn, *(args or ()), **(kwargs or {})),
            lambda number, state: (),
        )

    def create_shared_dataset(self, dataset: Dataset) -> SharedDataset:
        """Return a dataset that all workers share: see `run_epoch`. Its state can be saved."""
        return SharedDataset(dataset)

    def run_epoch(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> int:
        """Call a function on workers until a shared dataset ends; return how many calls returned.

        Each element goes to one call. One whose worker is lost is made again with the same
        elements. A call that meets the end and raises OutOfRangeError has ended well, and is not
        counted. An epoch that is interrupted by an error is gone on with where the dataset is
        given its state again: `dataset.set_state(dataset.get_state())`.

        Args:
            fn: Calls `next` on the shared dataset, as often as it likes.
            args: Among them, or in `fn`, is a shared dataset.
            kwargs: A dict.
        """
        closure = self._keeping.closure(fn, args, kwargs, shares=True)
        dataset = shared_by(closure)
        with dataset.reading() as (elements, progress):
            steps = Epoch(self._shell, closure, dataset, elements, progress).run()
            self.join()
        return steps

    # --- workers --------------------------------------------------------------------------------

    def add_worker(self, address: str) -> int:
        """Take another worker in; return its number.

        Args:
            address: Where it listens, as "host:port"; it may be there later.

        Raises:
            ValueError: It is not written so.
        """
        check_address(address, "`address`")
        with self._shell.lock:
            worker = self._shell.core.add_worker(address, time.monotonic())
        self._shell.wake()
        return worker

    def remove_worker(self, index: int) -> None:
        """Let a worker go: it ends what it runs, and what waits there runs elsewhere.

        Raises:
            ValueError: There is no such worker.
        """
        check_int("index", index, minimum=0)
        with self._shell.lock:
            if index not in self._shell.core.contacts:
                known = sorted(self._shell.core.contacts)
                raise ValueError(f"there is no worker {index}; there are {known}")
            self._reception.remove(self._shell.core.contacts[index].address)
            self._shell.core.remove_worker(index)
        self._shell.wake()

    def listen(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        security: Security | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> str:
        """Listen for workers that announce themselves; return the address, as "host:port".

        `ClosureWorker(..., coordinator=address)` is taken in wherever it was started, while
        functions run. `headrace status` and `headrace top` ask the same address.

        Args:
            host: A name or number of this machine.
            port: 0 takes one that is free.
            security: Keys of a server; required where `host` can be reached from another machine.
            metrics_port: Where `/metrics`, `/healthz` and `/readyz` are served; None: nowhere.
            metrics_host: Whom these are served for; the default is this machine alone.
        """
        self._shell.check_here()
        listening = self._reception.listen(host, port, security, metrics_host, metrics_port)
        self._running.keep(listening.close)
        return self._reception.address

    @property
    def metrics_address(self) -> str:
        """Where `/metrics` is, as "host:port"; empty: nowhere."""
        return self._reception.metrics_address

    def status(self) -> CoordinatorStatus:
        """Return how many functions wait, where which ones run for how long, and who is there."""
        return self._reception.status()

    @property
    def workers(self) -> dict[int, str]:
        """Addresses of the workers, by their numbers."""
        with self._shell.lock:
            return {number: each.address for number, each in self._shell.core.contacts.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        travels = isinstance(self._strategy, ParameterServerStrategy)
        return CoordinatorStub, (self._strategy if travels else None,)


def coordinator_of(strategy: Any) -> ClusterCoordinator | None:
    """Return the coordinator that a strategy has; None: it has none, or it is closed."""
    known = _known.get(strategy)
    found = None if known is None else known()
    return None if found is None or found._running.is_stopped else found


_known: weakref.WeakKeyDictionary[Any, weakref.ref[ClusterCoordinator]] = (
    weakref.WeakKeyDictionary()
)


# --- a coordinator as it arrives on workers, with the objects that hold it ------------------------


class CoordinatorStub:
    """Stands for a `ClusterCoordinator` that was pickled; any use raises an error.

    Methods of a class that holds its coordinator can be scheduled, since the object travels.

    Args:
        strategy: The strategy of the coordinator, if it travels; else None.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The strategy, as this worker has it."""
        if self._strategy is None:
            self._refuse("strategy")
        return self._strategy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols, such as that of copies
            raise AttributeError(name)
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise FailedPreconditionError(
            f"`{name}` of a ClusterCoordinator works in the coordinator's process alone, and this "
            "one is a copy that was pickled: functions that are scheduled may not schedule others. "
            "The number of a worker is hr.coordinator.get_current_worker_index()"
        )

    def __repr__(self) -> str:
        return "<a ClusterCoordinator of another process>"
