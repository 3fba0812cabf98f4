"""Ray actor that runs one worker of a data service.

Ray restarts its process if that dies. The actor asks the cluster's controller for the dispatcher's
address, so that it follows a dispatcher that moves to another node, and ends when the controller is
gone.
"""

from __future__ import annotations

import logging
import os
import threading

from headrace.errors import CancelledError, HeadraceError
from headrace.process.child import NO_ACCELERATORS
from headrace.process.parent_link import exit_when_hung
from headrace.ray.nodes import ClusterKeys, call_actor, find_actor, import_ray, node_address
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
        keys: Keys of the cluster.
        hides_accelerators: Whether user functions see no accelerators, because Ray has assigned
            none to this actor.
    """

    def __init__(
        self, name: str, controller: str, keys: ClusterKeys, hides_accelerators: bool
    ) -> None:
        if hides_accelerators:
            os.environ.update(NO_ACCELERATORS)
        self._name = name
        self._controller = controller
        self._keys = keys
        self._host = node_address()
        self._target = ""
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
        """Deliver what was computed, and stop. A second call waits for the first."""
        with self._lock:
            self._is_draining = True
            server = self._server
            if server is not None and server.address:
                server.drain()
            elif server is not None:
                server.stop()

    def _run(self) -> None:
        pause = threading.Event()
        while not self._is_draining:
            try:
                self._check_controller()
            except Exception as error:
                _log.warning("worker actor %s, trying again: %s", self._name, error)
            pause.wait(_POLL_SECONDS)

    def _check_controller(self) -> None:
        """Serve the dispatcher at its current address; end the actor if there is none any more."""
        controller = find_actor(self._controller)
        if controller is None:
            self._misses += 1
            if self._misses >= _MAX_MISSES:
                _log.warning("worker actor %s ends: its cluster has been closed", self._name)
                # Ray would restart an actor that ends by itself.
                import_ray().kill(find_actor(self._name), no_restart=True)
            return
        self._misses = 0
        target = call_actor(controller, "target", what=f"Ray actor {self._controller!r}")
        server = self._server
        if server is not None and not server.is_stopped and target == self._target:
            return
        if server is not None:
            _log.warning(
                "worker actor %s starts its server again: the dispatcher is at %s, was at %s",
                self._name,
                target,
                self._target,
            )
            server.stop()
        config = WorkerConfig(
            dispatcher_address=target,
            host=self._host,
            security=self._keys.server(),
        )
        with self._lock:
            if self._is_draining:
                return
            self._target = target
            self._server = server = WorkerServer(config, start=False)
        # Its start waits for the dispatcher, which may move meanwhile.
        threading.Thread(
            target=_start, args=(server, config), name="headrace-ray-start", daemon=True
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
