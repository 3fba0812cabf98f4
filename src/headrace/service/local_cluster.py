"""A whole data service on this machine: a dispatcher in this process, workers beside it.

Workers are fresh interpreters, not forks: a fork would copy locks that other threads hold. Each
watches a pipe from this process and ends with it, however this process ends.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.service.config import DispatcherConfig, WorkerConfig
from headrace.service.dispatcher.server import DispatchServer
from headrace.service.worker.server import WorkerServer

__all__ = ["LocalCluster", "LocalWorker"]

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


@dataclass
class LocalWorker:
    """One worker of a `LocalCluster`.

    Attributes:
        address: Where it listens.
        pid: Its process; this process's own for a worker that runs here.
    """

    address: str
    pid: int
    _process: subprocess.Popen[bytes] | None = None
    _server: WorkerServer | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was neither stopped nor killed."""
        if self._process is not None:
            return self._process.poll() is None
        return self._server is not None

    def stop(self) -> None:
        """Stop it as one does on purpose."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._process is not None:
            _release(self._process)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def kill(self) -> None:
        """Kill its process (SIGKILL), as a crash does."""
        if self._process is None:
            raise FailedPreconditionError(
                f"the worker at {self.address} runs in this process and cannot be killed alone; "
                "use LocalCluster(processes=True), or stop_worker()"
            )
        self._process.kill()
        self._process.wait()
        _release(self._process)


class LocalCluster:
    """A dispatcher and workers on this machine; a context manager.

    Args:
        num_workers: Workers to start.
        processes: Whether each worker is a process of its own; else all run in this one, which
            suits tests and pipelines that do not hold the interpreter's lock.
        work_dir: Where the dispatcher keeps its journal; with it, it survives restarts.
        worker_timeout_ms: Silence after which a worker counts as lost; None: the default.
        heartbeat_interval_ms: Milliseconds between the workers' heartbeats; None: the default.
        preload: Modules that each worker process imports at its start.

    Raises:
        UnavailableError: A worker did not start; the message holds what it wrote.
    """

    def __init__(
        self,
        num_workers: int = 2,
        processes: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
        *,
        worker_timeout_ms: int | None = None,
        heartbeat_interval_ms: int | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"`num_workers` must be an integer, but got {num_workers!r}")
        if num_workers < 0:
            raise ValueError(f"`num_workers` must be at least 0, but got {num_workers}")
        self._processes = processes
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._preload = tuple(preload)
        self._config = DispatcherConfig(
            port=0 if work_dir is None else _lasting_port(),
            work_dir=work_dir,
            fault_tolerant_mode=work_dir is not None,
            worker_timeout_ms=worker_timeout_ms,
        )
        self._workers: list[LocalWorker] = []
        self._dispatcher = DispatchServer(self._config)
        try:
            self._add(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """The service's address, for `distribute(service=...)`."""
        return self._dispatcher.target

    @property
    def dispatcher(self) -> DispatchServer:
        """The dispatcher."""
        return self._dispatcher

    @property
    def workers(self) -> tuple[LocalWorker, ...]:
        """All workers ever started, in order; stopped and killed ones included."""
        return tuple(self._workers)

    def add_worker(self) -> LocalWorker:
        """Start another worker; return when it has registered."""
        return self._add(1)[0]

    def kill_worker(self, index: int) -> None:
        """Kill the process of worker `index` (SIGKILL)."""
        self._workers[index].kill()

    def stop_worker(self, index: int) -> None:
        """Stop worker `index`."""
        self._workers[index].stop()

    def restart_dispatcher(self) -> None:
        """Stop the dispatcher, and start another from its journal, at the same address.

        Raises:
            FailedPreconditionError: The cluster has no `work_dir`.
        """
        if self._config.work_dir is None:
            raise FailedPreconditionError(
                "the dispatcher cannot be restarted: it keeps no journal. "
                "Use LocalCluster(work_dir=...)"
            )
        self._dispatcher.stop()
        self._dispatcher = DispatchServer(self._config)

    def close(self) -> None:
        """Stop all workers, then the dispatcher. May be called twice."""
        for worker in self._workers:
            if worker._process is not None:
                _release(worker._process)
        for worker in self._workers:
            worker.stop()
        self._dispatcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add(self, count: int) -> list[LocalWorker]:
        address = self.target.partition("://")[2]
        if not self._processes:
            for _ in range(count):
                server = WorkerServer(
                    WorkerConfig(
                        dispatcher_address=address,
                        heartbeat_interval_ms=self._heartbeat_interval_ms,
                    )
                )
                self._workers.append(LocalWorker(server.address, os.getpid(), _server=server))
            return self._workers[len(self._workers) - count :]
        started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        added: list[LocalWorker] = []
        try:
            started.extend(self._spawn(address) for _ in range(count))
            until = time.monotonic() + _START_SECONDS
            for process, words in started:
                ready = _read_line(process, words, until)
                added.append(LocalWorker(json.loads(ready)["address"], process.pid, process))
        except BaseException:
            for process, _ in started:
                process.kill()
                process.wait()
                _release(process)
            raise
        finally:
            for process, words in started:
                words.close()
                if process.stdout is not None:
                    process.stdout.close()
        self._workers.extend(added)
        return added

    def _spawn(self, dispatcher_address: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        log_to = _duplicate_of_stderr()
        # What it writes until it is ready; an unnamed file, so that nothing is left behind.
        words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
        options = {
            "dispatcher_address": dispatcher_address,
            "heartbeat_interval_ms": self._heartbeat_interval_ms,
            "preload": self._preload,
            "log_to": log_to,
        }
        # Functions of the user's modules travel by name: workers must find the same modules.
        paths = [path or os.getcwd() for path in sys.path]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace.service.worker", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                pass_fds=(log_to,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                # Ctrl-C is for this process; the worker ends with its pipe.
                process_group=0,
            )
        except BaseException:
            words.close()
            raise
        finally:
            os.close(log_to)
        return process, words


def _release(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _lasting_port() -> int:
    """Return a free port that will be free again after the dispatcher was stopped.

    Not one of those that the system gives to whoever connects: a client that tries to reach the
    dispatcher while it is away may be given the very port, and be connected with itself.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    return 0


def _duplicate_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _read_line(process: subprocess.Popen[bytes], words: IO[bytes], until: float) -> bytes:
    """Return the line by which a worker says that it is ready."""
    assert process.stdout is not None
    line = b""
    descriptor = process.stdout.fileno()
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        ready, _, _ = select.select([descriptor], [], [], max(0.0, left))
        piece = os.read(descriptor, 4096) if ready else b""
        if not piece:
            state = "ended" if ready else f"is not ready after {_START_SECONDS:.0f} s"
            code = process.wait() if ready else None
            words.seek(0)
            raise UnavailableError(
                f"worker process {process.pid} {state}"
                f"{'' if code is None else _describe_code(code)}. It wrote:\n"
                f"{words.read().decode(errors='replace').strip() or '(nothing)'}"
            )
        line += piece
    return line


def _describe_code(code: int) -> str:
    return f" with code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
