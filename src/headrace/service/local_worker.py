"""One worker of a local cluster: a process of its own, or a server in this one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from headrace.errors import CancelledError, FailedPreconditionError, UnavailableError
from headrace.service.worker.server import LEFT_CODE, WorkerServer

__all__ = ["STOP_SECONDS", "WORKER_ENVIRONMENT", "LocalWorker", "restart_delay", "start_processes"]

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0

STOP_SECONDS = 4.0
"""How long a process may take to end; it hands back what it holds in the first second."""

WORKER_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators belong to the process that trains; a worker would take memory on them."""


def restart_delay(deaths: int) -> float:
    """Return the seconds to wait before a worker is replaced, after so many deaths in a row."""
    doublings = min(max(0, deaths - 1), 10)
    return min(_FIRST_DELAY * float(2**doublings), _LONGEST_DELAY)


@dataclass
class LocalWorker:
    """One worker of a `LocalCluster`.

    Attributes:
        address: Where it listens.
        pid: Its process; this process's own for a worker that runs here.
        death: How its process died by itself, in words; None: it did not.
        is_dismissed: It was stopped or killed on purpose.
        process: Its process, where it has one of its own.
        server: The worker, where it runs in this process.
    """

    address: str
    pid: int
    death: str | None = None
    is_dismissed: bool = False
    process: subprocess.Popen[bytes] | None = None
    server: WorkerServer | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was neither stopped nor killed."""
        if self.process is not None:
            return self.process.poll() is None
        return self.server is not None

    def release(self) -> None:
        """Close its process's pipe, with which it ends; do not wait."""
        self.is_dismissed = True
        if self.process is not None:
            _release(self.process)

    def stop(self, until: float | None = None) -> None:
        """Stop it as one does on purpose: it hands back what it has not delivered.

        Args:
            until: When, on the monotonic clock, a process that has not ended is killed; None: some
                seconds from now.
        """
        until = time.monotonic() + STOP_SECONDS if until is None else until
        self.is_dismissed = True
        if self.server is not None:
            self.server.stop()
            self.server = None
        if self.process is not None:
            _release(self.process)
            try:
                self.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def kill(self) -> None:
        """Kill its process (SIGKILL), as a crash does."""
        if self.process is None:
            raise FailedPreconditionError(
                f"the worker at {self.address} runs in this process and cannot be killed alone; "
                "use LocalCluster(processes=True), or stop_worker()"
            )
        self.is_dismissed = True
        self.process.kill()
        self.process.wait()
        _release(self.process)

    def has_died(self) -> bool:
        """Return whether it died by itself since the last look."""
        if self.process is None or self.is_dismissed or self.death is not None:
            return False
        code = self.process.poll()
        if code is None:
            return False
        if code == LEFT_CODE:
            # Somebody sent it SIGTERM.
            self.is_dismissed = True
            _release(self.process)
            return False
        self.death = f"ended{_describe_code(code)}"
        _release(self.process)
        return True


def start_processes(
    count: int,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    is_called_off: Callable[[], bool],
) -> list[LocalWorker]:
    """Start worker processes; return when all have registered.

    Args:
        count: How many.
        options: Arguments of `WorkerConfig`.
        environment: Variables that they get besides those of this process.
        is_called_off: Whether to give up.

    Raises:
        UnavailableError: One did not start; the message holds what it wrote.
        CancelledError: `is_called_off` said so.
    """
    started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    added: list[LocalWorker] = []
    try:
        started.extend(_spawn(options, environment) for _ in range(count))
        until = time.monotonic() + _START_SECONDS
        for process, words in started:
            ready = json.loads(_read_line(process, words, until, is_called_off))
            added.append(LocalWorker(ready["address"], process.pid, process=process))
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
    return added


def _spawn(
    options: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    log_to = _duplicate_of_stderr()
    # What it writes until it is ready; an unnamed file, so that nothing is left behind.
    words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
    # Functions of the user's modules travel by name: workers must find the same modules.
    paths = [path or os.getcwd() for path in sys.path]
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headrace.service.worker",
                json.dumps({**options, "log_to": log_to}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            pass_fds=(log_to,),
            env={
                **os.environ,
                **WORKER_ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(paths),
                **environment,
            },
            # Ctrl-C is for this process; the worker ends with its pipe.
            process_group=0,
        )
    except BaseException:
        words.close()
        raise
    finally:
        os.close(log_to)
    _started.add(process)
    return process, words


def _release(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


#: Worker processes of this process, whose pipes a fork would keep open.
_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _leave_workers_to_the_parent() -> None:
    # They end when their pipe closes: a forked child that outlives its parent must not hold it.
    for process in list(_started):
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_workers_to_the_parent)


def _duplicate_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _read_line(
    process: subprocess.Popen[bytes],
    words: IO[bytes],
    until: float,
    is_called_off: Callable[[], bool],
) -> bytes:
    """Return the line by which a worker says that it is ready."""
    assert process.stdout is not None
    line = b""
    descriptor = process.stdout.fileno()
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        ready, _, _ = select.select([descriptor], [], [], max(0.0, min(left, _LOOK_SECONDS)))
        if is_called_off():
            raise CancelledError("the cluster is closed")
        if not ready and left > 0:
            continue
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
