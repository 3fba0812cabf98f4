"""One task of a training cluster: the actor with its server, and the owner's view of it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.arguments import check_string
from headrace.deploy.server import Server
from headrace.ray.nodes import ClusterKeys, import_ray, node_address
from headrace.transport import address as addresses
from headrace.waiting import Backoff, WaitWarningLimiter

__all__ = ["ServerProcess", "TaskActor", "TrainingTask", "check_resources"]

_log = logging.getLogger(__name__)


class ServerProcess(NamedTuple):
    """Process of a task: address at which its server listens, process id, id of its Ray node."""

    address: str
    pid: int
    node: str


class TaskActor:
    """Actor with the server of a task.

    Args:
        job_name: "worker" or "ps".
        task_index: Number of the task.
        keys: Keys of the cluster.
        environment: Variables to set.
    """

    def __init__(
        self, job_name: str, task_index: int, keys: ClusterKeys, environment: Mapping[str, str]
    ) -> None:
        os.environ.update(environment)
        self._task = job_name, task_index
        self._keys = keys
        self._lock = threading.Lock()
        self._server: Server | None = None

    def start(self, previous_address: str) -> ServerProcess:
        """Start the server, and return its process. Idempotent.

        Args:
            previous_address: Address of the task before this process: kept on the same host.
        """
        with self._lock:
            if self._server is None:
                job_name, index = self._task
                address = _choose_address(node_address(), previous_address)
                self._server = Server(
                    {job_name: {index: address}}, job_name, index, security=self._keys.server()
                )
            node = import_ray().get_runtime_context().get_node_id()
            return ServerProcess(self._server.address, os.getpid(), node)

    def wait(self) -> None:
        """Wait until the server is stopped."""
        assert self._server is not None
        self._server.join()

    def stop(self) -> None:
        """Stop the server."""
        with self._lock:
            if self._server is not None:
                self._server.stop()


def _choose_address(host: str, previous: str) -> str:
    if previous and addresses.split(previous)[0] == host:
        return previous
    return addresses.join(host, addresses.find_stable_port(host))


def check_resources(name: str, value: object) -> dict[str, float]:
    """Return the resources of an argument, by name; None means one CPU.

    Raises:
        TypeError: If it is not a mapping from names to numbers.
        ValueError: If an amount is negative, or all are zero.
    """
    if value is None:
        return {"CPU": 1}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{name}` must be a dict such as {{'CPU': 1}} or None, but got {value!r} of type "
            f"{type(value).__name__}"
        )
    for key, amount in value.items():
        check_string(f"{name} key", key, empty=False)
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise TypeError(
                f"`{name}[{key!r}]` must be a number, but got {amount!r} of type "
                f"{type(amount).__name__}"
            )
        if not amount >= 0:
            raise ValueError(f"`{name}[{key!r}]` must be at least 0, but got {amount}")
    if not any(value.values()):
        raise ValueError(
            f"`{name}` must reserve something, such as {{'CPU': 0.5}}, but got {dict(value)}"
        )
    return {key: amount for key, amount in value.items() if amount}


class TrainingTask:
    """A task as the owner of its cluster sees it.

    The owner calls `advance` with the outcome of the pending call. Ray starts the actor's process
    again when it dies; a call of `start` then waits for the new process, and starts its server.

    Attributes:
        job_name: "worker" or "ps".
        index: Number of the task.
        actor: Handle of its actor.
        process: Its running process; None while it has none.
        address: Address at which it listens or listened; "" before its first start.
        pending: Reference of the call whose outcome is awaited; None until `retry_at`.
        retry_at: Time at which `start` is called again, if no call is pending.
        is_dead: Whether Ray will not restart the actor.
    """

    def __init__(self, job_name: str, index: int, actor: Any) -> None:
        self.job_name = job_name
        self.index = index
        self.actor = actor
        self.process: ServerProcess | None = None
        self.address: str = ""
        self.pending: Any = None
        self.retry_at: float = 0.0
        self.is_dead: bool = False
        self.last_error: str = ""
        self._ray = import_ray()
        self._deaths = 0
        self._missing_since = 0.0
        self._backoff = Backoff(0.1, longest=5.0)
        self._warnings = WaitWarningLimiter()

    def __str__(self) -> str:
        return f"{self.job_name} {self.index}" + (f" at {self.address}" if self.address else "")

    def start(self, now: float) -> None:
        """Start the server, once the actor has a process."""
        if self.process is not None or not self._missing_since:
            self._missing_since = now
        self.process = None
        self.pending = self.actor.start.remote(self.address)

    def advance(self, now: float) -> bool:
        """Handle the outcome of the pending call; return whether the address changed."""
        ray = self._ray
        call, self.pending = self.pending, None
        try:
            outcome = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            # For example the port is still in use.
            self.last_error = str(getattr(error, "cause", error))
            self.retry_at = now + next(self._backoff)
        except ray.exceptions.RayActorError as error:
            self._handle_lost_process(error, now)
        else:
            if outcome is not None:
                return self._handle_started(outcome, now)
            # `wait` returned: the server was stopped by someone else.
            self.start(now)
        return False

    def kill(self, now: float) -> None:
        """Kill the process; Ray starts another one."""
        self._ray.kill(self.actor, no_restart=False)
        self._missing_since = now
        self.process = None

    def warn_if_missing(self, now: float) -> None:
        """Log after ten seconds, then each minute, that the task has no process."""
        if self.process is not None or self.is_dead:
            return
        if self._warnings.should_warn(now - self._missing_since):
            reason = f": {self.last_error}" if self.last_error else ""
            _log.warning(
                "%s has not been running for %.0f s%s; see `ray list actors` and `ray status`",
                self,
                now - self._missing_since,
                reason,
            )

    def _handle_started(self, process: ServerProcess, now: float) -> bool:
        is_restart, old_address = bool(self.address), self.address
        self.process, self.address = process, process.address
        self.last_error, self._deaths = "", 0
        self._backoff.reset()
        self._warnings.reset()
        self.pending = self.actor.wait.remote()
        if is_restart:
            _log.info("%s restarted as process %d", self, process.pid)
        return is_restart and old_address != self.address

    def _handle_lost_process(self, error: Exception, now: float) -> None:
        if self.process is not None:
            _log.warning("%s: process %d was lost; Ray restarts it", self, self.process.pid)
        self.last_error = str(error).partition("\n")[0]
        # `ActorDiedError` may report the end of a process that Ray restarts. Twice in a row without
        # a process in between, it is final.
        died = getattr(self._ray.exceptions, "ActorDiedError", None)
        self._deaths = self._deaths + 1 if died and isinstance(error, died) else 0
        if self._deaths >= 2:
            self.process, self.is_dead = None, True
            _log.error("%s will not be restarted by Ray: %s", self, str(error).strip())
            return
        self.start(now)
