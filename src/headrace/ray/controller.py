"""Ray actor that runs the dispatcher of a data service and supervises its workers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.ray.actor_launcher import ActorLauncher, resource_options
from headrace.ray.nodes import NAMESPACE, ClusterKeys, StoredNumber, import_ray, node_address
from headrace.ray.service_addresses import service_address
from headrace.ray.worker_actor import WorkerActor
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.server import DispatchServer
from headrace.service.worker_scaler import WorkerScaler

__all__ = ["ClusterOptions", "Controller"]

_log = logging.getLogger(__name__)

_SUPERVISE_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_SAME_PORT_SECONDS = 15.0
"""Seconds for which a restarted dispatcher waits for its port, and for its journal."""
_CONCURRENT_CALLS = 8


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of a cluster, which its controller keeps over restarts.

    Attributes:
        actor: Name of the controller's actor; names of workers begin with it.
        ports: Ports to try for the dispatcher, in order.
        min_workers: Minimum number of workers.
        max_workers: Maximum number; None for a fixed number.
        resources: Resources of each worker.
        placement: Scheduling strategy of the workers.
        work_dir: Directory of the dispatcher's journal.
        runtime_env: Runtime environment of the workers.
    """

    actor: str
    ports: tuple[int, ...]
    min_workers: int
    max_workers: int | None
    resources: Mapping[str, float]
    placement: Any
    work_dir: str | None
    runtime_env: Mapping[str, Any] | None

    def config(self, port: int, host: str, keys: ClusterKeys) -> DispatcherConfig:
        """Return the configuration of the dispatcher."""
        return DispatcherConfig(
            port=port,
            host=host,
            work_dir=self.work_dir,
            fault_tolerant_mode=self.work_dir is not None,
            security=keys.server(),
        )


class Controller:
    """The dispatcher and its workers.

    The actor's methods may be repeated, since Ray retries calls after a restart.

    Args:
        options: Options of the cluster.
        keys: Keys of the cluster.
    """

    def __init__(self, options: ClusterOptions, keys: ClusterKeys) -> None:
        self._options = options
        self._keys = keys
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._dispatcher: DispatchServer | None = None
        self._scaler: WorkerScaler | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this property uses a deprecated one
            is_restarted = bool(import_ray().get_runtime_context().was_current_actor_reconstructed)
        self._launcher = ActorLauncher(f"{options.actor}/", self._create_worker, options.resources)
        try:
            self._dispatcher = self._start_dispatcher(is_restarted)
        except Exception as error:
            # Raised by each method: Ray reports an error of a constructor as a dead actor.
            self._failure = error
            _log.error("the dispatcher did not start: %s", error)
            return
        self._wanted = StoredNumber(f"{options.actor}/{keys.server_public}")
        if is_restarted:
            _log.warning("the dispatcher was restarted at %s", self._dispatcher.target)
            self._launcher.adopt()
        self._set_limits(self._wanted.load(options.min_workers), options.max_workers)
        threading.Thread(
            target=self._supervise, name="headrace-ray-supervisor", daemon=True
        ).start()

    # --- methods of the actor -----------------------------------------------------------------

    def target(self) -> str:
        """Return the address of the dispatcher."""
        return self._running().target

    def client_keys(self) -> tuple[str, str, str]:
        """Return the keys for `nodes.fetch_security`."""
        return self._keys.client_part()

    def num_workers(self) -> int:
        """Return the number of workers that are registered with the dispatcher."""
        return self._running().num_workers()

    def shortage(self) -> str:
        """Return what Ray lacks to start the workers; "" if all have started."""
        return self._launcher.shortage()

    def process_ids(self) -> tuple[int, list[int]]:
        """Return the process IDs of this actor and of the workers."""
        return os.getpid(), self._launcher.process_ids()

    def scale(self, count: int) -> None:
        """Set the number of workers.

        Raises:
            FailedPreconditionError: If the number follows the load.
        """
        self._running()
        options = self._options
        if options.max_workers is not None:
            raise FailedPreconditionError(
                f"the number of workers follows the load, from {options.min_workers} to "
                f"{options.max_workers}; to set it, create the cluster without `max_workers`"
            )
        self._wanted.store(count)
        self._set_limits(count, None)

    def close(self) -> None:
        """Kill the workers and stop the dispatcher."""
        self._closed.set()
        with self._lock:
            if self._scaler is not None:
                self._scaler.stop()
        self._launcher.kill_all()
        if self._dispatcher is not None:
            self._wanted.delete()
            self._dispatcher.stop()

    # --- internals --------------------------------------------------------------------------------

    def _running(self) -> DispatchServer:
        if self._failure is not None:
            raise self._failure
        if self._dispatcher is None or self._closed.is_set():
            raise UnavailableError(f"the cluster of Ray actor {self._options.actor!r} is closed")
        return self._dispatcher

    def _set_limits(self, count: int, maximum: int | None) -> None:
        """Keep the number of workers at `count`, or between `count` and `maximum`."""
        with self._lock:
            if self._scaler is not None:
                self._scaler.stop()
                self._scaler = None
            if count == 0 and maximum is None:
                self._launcher.stop_workers(self._launcher.num_workers())
                return
            self._scaler = WorkerScaler(
                self._running().target,
                self._launcher,
                min_workers=count,
                max_workers=count if maximum is None else maximum,
                security=self._keys.server().as_client(),
            )
            self._scaler.start()

    def _supervise(self) -> None:
        while not self._closed.wait(_SUPERVISE_SECONDS):
            try:
                self._launcher.supervise()
            except Exception as error:
                _log.warning("supervising the workers failed, trying again: %s", error)

    def _start_dispatcher(self, is_restarted: bool) -> DispatchServer:
        """Start the dispatcher; after a restart, at the same port if that is possible.

        Raises:
            OSError: If no port is free.
            FailedPreconditionError: If another dispatcher uses the work directory.
        """
        host = node_address()
        patient_until = time.monotonic() + (_SAME_PORT_SECONDS if is_restarted else 0.0)
        # The previous process may still be ending.
        while time.monotonic() < patient_until:
            with contextlib.suppress(OSError, FailedPreconditionError):
                return DispatchServer(
                    self._options.config(self._options.ports[0], host, self._keys)
                )
            time.sleep(_RETRY_SECONDS)
        for port in self._options.ports[:-1]:
            with contextlib.suppress(OSError):
                return DispatchServer(self._options.config(port, host, self._keys))
        return DispatchServer(self._options.config(self._options.ports[-1], host, self._keys))

    def _create_worker(self, name: str) -> Any:
        options = self._options
        settings: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            # Not owned by this process: a restart of the dispatcher must not end the workers.
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": _CONCURRENT_CALLS,
            "scheduling_strategy": options.placement,
            **resource_options(options.resources),
        }
        if options.runtime_env is not None:
            settings["runtime_env"] = dict(options.runtime_env)
        return (
            import_ray()
            .remote(WorkerActor)
            .options(**settings)
            .remote(
                name,
                options.actor,
                service_address(options.actor, options.ports[0]),
                self._keys,
                "GPU" not in options.resources,
            )
        )
