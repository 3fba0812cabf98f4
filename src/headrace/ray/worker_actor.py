"""Ray actor that runs one worker of a data service.

Ray restarts its process if that dies. The actor ends when the controller of its cluster is gone.
"""

from __future__ import annotations

import logging
import math
import os
import threading

from headrace.errors import CancelledError, HeadraceError
from headrace.process.child import NO_ACCELERATORS
from headrace.process.parent_link import exit_when_hung
from headrace.ray.nodes import ClusterKeys, find_actor, import_ray, node_address
from headrace.service.config import WorkerConfig
from headrace.service.worker.server import WorkerServer

__all__ = ["WorkerActor"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 5.0
_MAX_MISSES = 2
"""Number of successive lookups without a controller after which the worker ends."""


class WorkerActor:
    """One worker.

    Args:
        name: Name of this actor.
        controller: Name of the controller's actor.
        dispatcher: Address of the dispatcher, which follows it (`service_addresses`).
        keys: Keys of the cluster.
        hides_accelerators: Whether user functions see no accelerators, because Ray has assigned
            none to this actor.
    """

    def __init__(
        self,
        name: str,
        controller: str,
        dispatcher: str,
        keys: ClusterKeys,
        hides_accelerators: bool,
    ) -> None:
        if hides_accelerators:
            os.environ.update(NO_ACCELERATORS)
        self._name = name
        self._controller = controller
        self._config = WorkerConfig(
            dispatcher_address=dispatcher,
            host=node_address(),
            security=keys.server(),
        )
        self._server: WorkerServer | None = None
        self._lock = threading.Lock()
        self._is_draining = False
        self._misses = 0
        threading.Thread(target=self._run, name="headrace-ray-worker", daemon=True).start()

    def is_draining(self) -> bool:
        """Return whether the worker drains."""
        return self._is_draining

    def process_id(self) -> int:
        """Return the ID of this process."""
        return os.getpid()

    def drain(self) -> None:
        """Deliver what was computed, and stop. A second call waits for the first.

        It may take long, because a consumer may pause, but nothing hurries the end of a worker.
        """
        with self._lock:
            self._is_draining = True
            server = self._server
        # Without the lock, so that the other thread notices the end of the cluster meanwhile.
        if server is not None and server.address:
            server.drain(math.inf)
        elif server is not None:
            server.stop()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                if self._is_cluster_closed():
                    _log.warning("worker actor %s ends: its cluster was closed", self._name)
                    # Ray would restart an actor that ends by itself.
                    import_ray().kill(find_actor(self._name), no_restart=True)
                    return
                self._serve()
            except Exception as error:
                _log.warning("worker actor %s, trying again: %s", self._name, error)
            pause.wait(_POLL_SECONDS)

    def _is_cluster_closed(self) -> bool:
        self._misses = 0 if find_actor(self._controller) is not None else self._misses + 1
        return self._misses >= _MAX_MISSES

    def _serve(self) -> None:
        """Start a server, unless one is running or starting."""
        with self._lock:
            if self._is_draining or not (self._server is None or self._server.is_stopped):
                return
            self._server = server = WorkerServer(self._config, start=False)
        # In another thread, since it waits for the dispatcher.
        threading.Thread(
            target=_start, args=(server, self._config), name="headrace-ray-start", daemon=True
        ).start()


def _start(server: WorkerServer, config: WorkerConfig) -> None:
    try:
        server.start()
    except CancelledError:
        pass
    except (HeadraceError, OSError) as error:
        _log.warning("starting a worker failed, trying again: %s", error)
    else:
        if config.hang_timeout:
            exit_when_hung(config.hang_timeout)
