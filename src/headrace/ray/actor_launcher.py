"""Starts and drains the worker actors of one cluster, and finds those of an earlier process."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.ray.nodes import NAMESPACE, find_actor, import_ray
from headrace.waiting import WaitWarningLimiter

__all__ = ["ActorLauncher", "describe_shortage", "list_actors", "resource_options"]

_log = logging.getLogger(__name__)

_ADOPT_SECONDS = 5.0


class ActorLauncher:
    """A `WorkerLauncher` whose workers are named Ray actors.

    Ray knows which actors exist, so nothing is lost if the process of the launcher restarts.

    Args:
        prefix: Prefix of the names of the workers.
        create: Creates the worker actor of a name; returns its handle.
        resources: Resources that each worker needs, for messages.
    """

    def __init__(
        self, prefix: str, create: Callable[[str], Any], resources: Mapping[str, float]
    ) -> None:
        self._ray = import_ray()
        self._prefix = prefix
        self._create = create
        self._resources = dict(resources)
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._warnings = WaitWarningLimiter()
        #: Calls that drain a worker, by its name, until its actor is gone.
        self._draining: dict[str, Any] = {}
        #: First calls of workers that have not answered one, with the time of the call.
        self._starting: dict[str, tuple[Any, float]] = {}

    def adopt(self) -> None:
        """Take over the workers of an earlier process, including those that drain."""
        with self._lock:
            calls = {
                handle.is_draining.remote(): (name, handle)
                for name, handle in self._handles().items()
            }
            if not calls:
                return
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=_ADOPT_SECONDS)
            for call, (name, handle) in calls.items():
                if call not in done:
                    self._starting[name] = call, time.monotonic()
                elif self._is_true(call):
                    self._draining[name] = handle.drain.remote()

    def num_workers(self) -> int:
        """Return the number of workers that run or start, without those that drain."""
        with self._lock:
            self._update()
            return len(self._active())

    def start_workers(self, count: int) -> None:
        """Create actors; Ray starts them when it has the resources."""
        with self._lock:
            for _ in range(count):
                name = f"{self._prefix}{time.time_ns():x}-{next(self._numbers)}"
                handle = self._create(name)
                self._starting[name] = handle.is_draining.remote(), time.monotonic()

    def stop_workers(self, count: int) -> None:
        """Drain workers, those first that have not started, then the youngest."""
        with self._lock:
            self._update()
            names = sorted(self._active(), reverse=True)
            names.sort(key=lambda name: name not in self._starting)
            for name in names[:count]:
                handle = find_actor(name)
                if handle is None:
                    continue
                if self._starting.pop(name, None) is not None:
                    self._ray.kill(handle, no_restart=True)
                    self._draining[name] = None
                else:
                    self._draining[name] = handle.drain.remote()

    def kill_all(self) -> None:
        """Kill all workers, including those that drain."""
        with self._lock:
            for handle in self._handles().values():
                self._ray.kill(handle, no_restart=True)

    def process_ids(self) -> list[int]:
        """Return the process IDs of the workers that have started."""
        with self._lock:
            self._update()
            names = sorted(set(self._active()) - set(self._starting))
            handles = [handle for name in names if (handle := find_actor(name)) is not None]
        return list(self._ray.get([each.process_id.remote() for each in handles], timeout=30))

    def shortage(self) -> str:
        """Return why workers have not started yet; "" if all have."""
        with self._lock:
            self._update()
            if not self._starting:
                return ""
            count = len(self._starting)
        return describe_shortage(count, self._resources, self._ray.nodes(), self._available())

    def supervise(self) -> None:
        """End drained workers; log if some have waited for resources for ten seconds."""
        with self._lock:
            self._update()
            since = min((began for _, began in self._starting.values()), default=None)
        if since is None:
            self._warnings.reset()
        elif self._warnings.should_warn(waited := time.monotonic() - since):
            _log.warning("%s (for %.0f s)", self.shortage(), waited)

    def _active(self) -> list[str]:
        return [name for name in list_actors(self._prefix) if name not in self._draining]

    def _handles(self) -> dict[str, Any]:
        found = {name: find_actor(name) for name in list_actors(self._prefix)}
        return {name: handle for name, handle in found.items() if handle is not None}

    def _available(self) -> dict[str, float]:
        return dict(self._ray.available_resources())

    def _update(self) -> None:
        """Forget workers that have started or gone; end those that have drained."""
        existing = set(list_actors(self._prefix))
        self._starting = {
            name: (call, began)
            for name, (call, began) in self._starting.items()
            if name in existing and not self._is_done(call)
        }
        self._draining = {name: call for name, call in self._draining.items() if name in existing}
        for name, call in self._draining.items():
            # A failed call, too: if its process died, Ray has restarted the worker.
            if call is not None and self._is_done(call):
                handle = find_actor(name)
                if handle is not None:
                    self._ray.kill(handle, no_restart=True)
                self._draining[name] = None

    def _is_done(self, call: Any) -> bool:
        return bool(self._ray.wait([call], timeout=0)[0])

    def _is_true(self, call: Any) -> bool:
        try:
            return bool(self._ray.get(call, timeout=0))
        except self._ray.exceptions.RayError:
            return False


def list_actors(prefix: str) -> list[str]:
    """Return the names of all actors in `NAMESPACE` that begin with `prefix`, in order."""
    return sorted(
        each["name"]
        for each in import_ray().util.list_named_actors(all_namespaces=True)
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
    )


def resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that needs these resources."""
    rest = dict(resources)
    options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0)}
    if gpus := rest.pop("GPU", 0):
        options["num_gpus"] = gpus
    if memory := rest.pop("memory", 0):
        options["memory"] = memory
    if rest:
        options["resources"] = rest
    return options


def describe_shortage(
    count: int,
    needed: Mapping[str, float],
    nodes: list[Mapping[str, Any]],
    available: Mapping[str, float],
) -> str:
    """Return what Ray lacks to start workers.

    Args:
        count: Number of workers that have not started.
        needed: Resources of one worker.
        nodes: Ray's nodes, as `ray.nodes()` returns them.
        available: Unused resources of all nodes.
    """
    totals = [node["Resources"] for node in nodes if node["Alive"]]
    unused = {name: available.get(name, 0.0) for name in needed}
    if all(unused[name] >= amount for name, amount in needed.items()):
        return f"{count} worker processes are starting (Ray has the resources)"
    text = f"{count} workers wait for resources of Ray: each needs {_format(needed)}"
    impossible = {
        name: amount
        for name, amount in needed.items()
        if not any(total.get(name, 0) >= amount for total in totals)
    }
    if impossible:
        return (
            f"{text}, but no node of the cluster has {_format(impossible)}; add such nodes, or "
            "change resources_per_worker"
        )
    return (
        f"{text}, and {_format(unused)} are unused; add nodes, stop other work, or change "
        "resources_per_worker"
    )


def _format(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
