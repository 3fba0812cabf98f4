"""`Dataset.in_processes`: datasets that worker processes of this machine compute.

Datasets with the same number of processes share a pool: a `LocalCluster`. It starts when the first
of them is iterated over and stays between epochs. It stops when the last of them is garbage
collected, or with this process, however that ends.

A forked child has its parent's datasets, but not its pools: it starts its own. An unpickled dataset
uses the pool of its process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from headrace.arguments import check_int
from headrace.data.dataset import Dataset
from headrace.errors import FailedPreconditionError
from headrace.forks import call_in_children
from headrace.plan.node import AUTOTUNE, Node
from headrace.plan.serialize import dump_plan
from headrace.process.child import NO_ACCELERATORS, ChildCommand
from headrace.rewrites.process_pools import inline_pools
from headrace.rewrites.shard import has_hint
from headrace.service.client.options import ReadOptions
from headrace.service.client.process_source import ProcessSource
from headrace.service.config import ShardingPolicy
from headrace.service.dataset_registration import register_with_service
from headrace.service.local_cluster import LocalCluster
from headrace.threads import run_in_thread

__all__ = ["in_processes"]

_WAIT_TIMEOUT_SECONDS = 300.0
"""Seconds without a running process after which reading fails."""
_WORKER_MODULE = "headrace.service.worker.__main__"


def in_processes(dataset: Dataset[Any], num_processes: int) -> Dataset[Any]:
    """Return a dataset whose steps run in worker processes; see `Dataset.in_processes`."""
    if num_processes == AUTOTUNE:
        raise ValueError(
            "`num_processes` must be a number, but got AUTOTUNE; os.cpu_count() gives the cores"
        )
    check_int("num_processes", num_processes, minimum=1)
    if _is_worker_process():
        return dataset  # opened by a function that already runs in a worker process
    plan = inline_pools(dataset.plan)
    if has_hint(plan):
        raise FailedPreconditionError(
            "`shard(SHARD_HINT, ...)` must come after `in_processes`; or shard the data of each "
            "worker with shard(num_shards, index) before it"
        )
    options = ReadOptions(
        processing_mode=ShardingPolicy.DYNAMIC,
        service="",  # known when the pool runs
        job_name=None,
        max_outstanding_requests=None,
        data_transfer_protocol=None,
        target_workers="ANY",
        visitation="exactly_once",
        ordered=True,
        wait_timeout=_WAIT_TIMEOUT_SECONDS,
        security=None,
    )
    dump_plan(plan)  # rejects a dataset that cannot be sent where it is written
    source = ProcessSource.of_plan(plan, options, _PoolUser(num_processes))
    return Dataset.from_source(source)


def _is_worker_process() -> bool:
    """Return whether this process is a worker that a `LocalCluster` started."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == _WORKER_MODULE


class _PoolCluster(LocalCluster):
    """Dispatcher and worker processes of a pool; workers have this process's environment."""

    # Nobody could start others. A batch system may signal a whole job some time before its end.
    _restarts_signaled = True

    def _worker_command(self, options: Mapping[str, Any]) -> ChildCommand:
        command = super()._worker_command(options)
        inherited = {name: os.environ.get(name) for name in NO_ACCELERATORS}
        environment: dict[str, str | None] = {**command.environment, **inherited}
        return dataclasses.replace(
            command,
            environment={name: text for name, text in environment.items() if text is not None},
        )


class _Pool:
    """Worker processes that several datasets share.

    Args:
        num_processes: Number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._lock = threading.Lock()
        self._cluster: LocalCluster | None = None
        self._dataset_ids: dict[int, str] = {}
        #: Numbers of the datasets that use the pool; guarded by the lock of the registry.
        self.users: set[int] = set()

    def connect(self, user: int, plan: Node) -> tuple[str, str]:
        """Start the processes and register the dataset, unless that was done before."""
        with self._lock:
            if self._cluster is None:
                self._cluster = _PoolCluster(self._num_processes)
            target = self._cluster.target
            if user not in self._dataset_ids:
                self._dataset_ids[user] = register_with_service(
                    target, Dataset(plan), None, None, None, anonymous=True
                )
            return target.partition("://")[2], self._dataset_ids[user]

    def forget(self, user: int) -> None:
        """Forget a dataset."""
        with self._lock:
            self._dataset_ids.pop(user, None)

    def exit_reasons(self) -> list[str]:
        """Return a reason for each process that ended unexpectedly, the latest last."""
        workers = () if self._cluster is None else self._cluster.workers
        return [worker.exit_reason for worker in workers if worker.exit_reason is not None]

    def close(self) -> None:
        """Stop the processes. Idempotent."""
        with self._lock:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.close()


_pools: dict[int, _Pool] = {}
"""Pools of this process, by number of processes."""
_registry_lock = threading.Lock()
_user_numbers = itertools.count()
_pools_of_parents: list[dict[int, _Pool]] = []
"""Pools of the processes that this one was forked from; never released, since that might close
them."""


def _forget_pools() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    if _pools:
        _pools_of_parents.append(dict(_pools))
        _pools.clear()


call_in_children(_forget_pools)


class _PoolObserver:
    """Access to the pool's reports only (`PoolAccess`).

    Args:
        num_processes: Number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes

    def connect(self, plan: Node) -> tuple[str, str]:
        raise AssertionError("only the source of a plan connects")

    def for_derived_dataset(self) -> _PoolObserver:
        raise AssertionError("only the source of a plan is sharded")

    def is_first_warning(self) -> bool:
        return False

    def without_ownership(self) -> _PoolObserver:
        return self

    def exit_reasons(self) -> list[str]:
        pool = _pools.get(self.num_processes)
        return [] if pool is None else pool.exit_reasons()


class _PoolUser(_PoolObserver):
    """Access of one dataset to its pool (`PoolAccess`); the pool runs while a user exists.

    Args:
        num_processes: Number of processes.
        origin: Access of the dataset that this one was derived from; a user, too, from the first
            `connect` on, so that the processes stay between shards of the dataset.
    """

    def __init__(self, num_processes: int, origin: _PoolUser | None = None) -> None:
        super().__init__(num_processes)
        self._origin = origin
        self._number = next(_user_numbers)
        self._has_warned = False
        release = functools.partial(_release, num_processes, self._number)
        # On another thread, because a lock may be held wherever the garbage collector runs.
        finalizer = weakref.finalize(self, run_in_thread, release, 0.0)
        finalizer.atexit = False  # clusters close themselves

    def connect(self, plan: Node) -> tuple[str, str]:
        with _registry_lock:
            pool = _pools.setdefault(self.num_processes, _Pool(self.num_processes))
            pool.users.add(self._number)
            if self._origin is not None:
                pool.users.add(self._origin._number)
        return pool.connect(self._number, plan)

    def for_derived_dataset(self) -> _PoolUser:
        return _PoolUser(self.num_processes, self._origin or self)

    def is_first_warning(self) -> bool:
        is_first, self._has_warned = not self._has_warned, True
        return is_first

    def without_ownership(self) -> _PoolObserver:
        return _PoolObserver(self.num_processes)

    def __reduce__(self) -> tuple[Callable[[int], _PoolUser], tuple[int]]:
        return _PoolUser, (self.num_processes,)


def _release(num_processes: int, user: int) -> None:
    """Record that a dataset no longer exists; stop the pool if it was the last user."""
    with _registry_lock:
        pool = _pools.get(num_processes)
        if pool is None or user not in pool.users:
            return  # never iterated over in this process
        pool.users.discard(user)
        is_last = not pool.users
        if is_last:
            del _pools[num_processes]
    if is_last:
        pool.close()
    else:
        pool.forget(user)
