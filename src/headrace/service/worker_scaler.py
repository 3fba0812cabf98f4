"""Adds and removes the workers of a data service as its dispatcher asks for.

    dispatcher (DispatcherStatus.wanted_workers) -> WorkerScaler -> WorkerLauncher

`WorkerScaler` is a thread that asks for the status; `LauncherControl` decides what to do.

Rule 1. Each time, the wanted number, within the limits, is compared with the number of workers that
        run or start. No decision is remembered, so a scaler may end and another continue.
Rule 2. While the dispatcher does not answer, the number of workers stays.
Rule 3. After a failed start, and after workers that it started ended by themselves, the next start
        waits: 1 s, 2 s, 4 s, at most 30 s. A number that holds for a minute resets the wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Protocol, Self

from headrace.arguments import check_int
from headrace.errors import HeadraceError
from headrace.service.config import parse_service
from headrace.service.messages import DispatcherStatus, GetStatus
from headrace.service.stub import DispatcherStub
from headrace.transport.security import Security
from headrace.waiting import Backoff, WaitWarningLimiter

__all__ = ["LauncherControl", "WorkerLauncher", "WorkerScaler"]

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
_CALL_SECONDS = 5.0
_MAX_PAUSE_SECONDS = 30.0
_STABLE_SECONDS = 60.0


class WorkerLauncher(Protocol):
    """Starts and stops workers on some cluster: local processes, Ray actors, Slurm tasks."""

    def num_workers(self) -> int:
        """Return the number of workers that run or start, without those that drain."""

    def start_workers(self, count: int) -> None:
        """Start workers; does not wait until they have registered."""

    def stop_workers(self, count: int) -> None:
        """Drain workers, which stop when all that they computed is delivered; does not wait."""


class LauncherControl:
    """Calls a launcher so that the number of workers follows the dispatcher's status.

    It has no thread and no clock: times are in seconds of any monotonic clock.

    Args:
        launcher: Starts and stops workers.
        min_workers: Minimum number of workers.
        max_workers: Maximum number of workers.
        now: Current time.
    """

    def __init__(
        self, launcher: WorkerLauncher, min_workers: int, max_workers: int, now: float
    ) -> None:
        self._launcher = launcher
        self._min_workers, self._max_workers = min_workers, max_workers
        self._start_backoff = Backoff(1.0, longest=_MAX_PAUSE_SECONDS)
        self._stop_backoff = Backoff(1.0, longest=_MAX_PAUSE_SECONDS)
        #: Number of workers after the last action; None if unknown.
        self._expected: int | None = None
        self._expected_since = self._start_after = self._stop_after = now

    def follow(self, status: DispatcherStatus, now: float) -> None:
        """Start or stop workers, if the wanted number differs from that of the launcher.

        Raises:
            Exception: If the launcher cannot tell the number of its workers.
        """
        current = self._launcher.num_workers()
        self._compare_with_expected(current, now)
        wanted = min(max(status.wanted_workers, self._min_workers), self._max_workers)
        if wanted > current and now >= self._start_after:
            self._log_decision(current, wanted, status)
            try:
                self._launcher.start_workers(wanted - current)
            except Exception as error:
                self._start_after = now + self._report("starting", self._start_backoff, error)
            else:
                self._expect(wanted, now)
        elif wanted < current and now >= self._stop_after:
            self._log_decision(current, wanted, status)
            try:
                self._launcher.stop_workers(current - wanted)
            except Exception as error:
                self._stop_after = now + self._report("stopping", self._stop_backoff, error)
            else:
                self._stop_backoff.reset()
                self._expect(wanted, now)

    def _compare_with_expected(self, current: int, now: float) -> None:
        """Delay the next start if workers ended by themselves."""
        if self._expected is not None and current < self._expected:
            pause = next(self._start_backoff)
            self._start_after = now + pause
            _log.warning(
                "%d of %d workers ended by themselves; others start in %.0f s at the earliest",
                self._expected - current,
                self._expected,
                pause,
            )
        if current != self._expected:
            self._expect(current, now)
        elif now - self._expected_since >= _STABLE_SECONDS:
            self._start_backoff.reset()

    def _expect(self, count: int, now: float) -> None:
        self._expected, self._expected_since = count, now

    def _report(self, action: str, backoff: Backoff, error: Exception) -> float:
        """Log a failure of the launcher; return the seconds until the next try."""
        self._expected = None
        pause = next(backoff)
        _log.warning(
            "%s workers failed, next try in %.0f s: %s: %s",
            action,
            pause,
            type(error).__name__,
            error,
        )
        return pause

    def _log_decision(self, current: int, wanted: int, status: DispatcherStatus) -> None:
        ratios = [
            client.wait_ratio
            for job in status.jobs
            for iteration in job.iterations
            if not iteration.finished
            for client in iteration.clients
        ]
        load = (
            f"clients wait {sum(ratios) / len(ratios):.0%} of the time" if ratios else "no clients"
        )
        _log.info(
            "scaling from %d to %d workers: the dispatcher wants %d (limits: %d to %d); %s",
            current,
            wanted,
            status.wanted_workers,
            self._min_workers,
            self._max_workers,
            load,
        )


class WorkerScaler:
    """Thread that keeps the number of workers at what the dispatcher wants; a context manager.

    >>> from headrace.service.worker_scaler import WorkerScaler
    >>> class Launcher:
    ...     count = 0
    ...     def num_workers(self):
    ...         return self.count
    ...     def start_workers(self, count):
    ...         self.count += count
    ...     def stop_workers(self, count):
    ...         self.count -= count
    >>> with hr.service.DispatchServer() as dispatcher:
    ...     scaler = WorkerScaler(dispatcher.target, Launcher(), min_workers=1, max_workers=4)
    ...     with scaler:
    ...         pass  # the service is used here

    Args:
        target: Address of the dispatcher, as in `distribute(service=...)`.
        launcher: Starts and stops workers. Its methods are called by this thread only.
        min_workers: Minimum number of workers, also without any job.
        max_workers: Maximum number of workers. Draining workers may exceed it for a while.
        security: Keys, if the dispatcher requires them.

    Raises:
        ValueError: If `max_workers` is less than `min_workers`.
    """

    def __init__(
        self,
        target: str,
        launcher: WorkerLauncher,
        min_workers: int,
        max_workers: int,
        security: Security | None = None,
    ) -> None:
        check_int("min_workers", min_workers, minimum=0)
        check_int("max_workers", max_workers, minimum=1)
        if max_workers < min_workers:
            raise ValueError(
                f"max_workers={max_workers} must not be less than min_workers={min_workers}"
            )
        self._address = parse_service(target)
        self._control = LauncherControl(launcher, min_workers, max_workers, time.monotonic())
        self._security = security
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-scaler", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: If it was started before.
        """
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for its end; the workers stay as they are. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        with DispatcherStub(self._address, security=self._security) as stub:
            for status in self._poll(stub):
                try:
                    self._control.follow(status, time.monotonic())
                except Exception as error:
                    _log.warning(
                        "counting the workers failed, trying again: %s: %s",
                        type(error).__name__,
                        error,
                    )

    def _poll(self, stub: DispatcherStub) -> Iterator[DispatcherStatus]:
        """Yield the dispatcher's status about every second until `stop` is called."""
        backoff = Backoff(_INTERVAL_SECONDS, longest=_CALL_SECONDS)
        answered_at, warnings = time.monotonic(), WaitWarningLimiter()
        while not self._stopping.is_set():
            pause = _INTERVAL_SECONDS
            try:
                status = stub.call(GetStatus(), timeout=_CALL_SECONDS)
            except HeadraceError as error:
                pause = next(backoff)
                waited = time.monotonic() - answered_at
                if warnings.should_warn(waited):
                    _log.warning(
                        "no status from dispatcher %s for %.0f s, so the number of workers stays: "
                        "%s; trying again",
                        self._address,
                        waited,
                        error,
                    )
            else:
                backoff.reset()
                warnings.reset()
                answered_at = time.monotonic()
                yield status
            self._stopping.wait(pause)
