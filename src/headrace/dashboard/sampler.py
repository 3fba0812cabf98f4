"""Thread that requests the status of a server about once a second."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.status_client import StatusClient, StatusSnapshot
from headrace.dashboard.history import History, Point
from headrace.dashboard.view import describe_snapshot, measure_snapshot
from headrace.errors import HeadraceError
from headrace.service.messages import DispatcherStatus, PlanStep

__all__ = ["Sample", "StatusSampler"]

_INTERVAL = 1.0
_MAX_INTERVAL = 5.0
_BUSY_FACTOR = 10.0
"""Seconds to wait per second that a sample took, so that a large service spends little on it."""
_TIMEOUT = 2.0
_MAX_NEW_PLANS = 4
"""Maximum number of plans that are requested with one sample."""


@dataclass(frozen=True)
class Sample:
    """Latest state of the server, as far as it is known.

    Attributes:
        number: Number of the sample, from 1.
        point: Measurements for the history.
        status: What the page shows, as JSON.
        plans_version: Number that changes with the plans.
    """

    number: int
    point: Point
    status: bytes
    plans_version: int


class StatusSampler:
    """Requests the status until it is stopped, and keeps the measurements of the last hour.

    Args:
        address: Address of the server, as the user wrote it.
        keys: Directory of keys; None without keys.

    Raises:
        typer.BadParameter: If an argument is invalid.
    """

    def __init__(self, address: str, keys: Path | None = None) -> None:
        self._client = StatusClient(address, keys, _TIMEOUT)
        self.address: str = self._client.address
        self._lock = threading.Lock()
        self._history = History()
        self._sample: Sample | None = None
        self._plans: dict[str, tuple[PlanStep, ...]] = {}
        self._plans_version = 0
        self._previous: StatusSnapshot | None = None
        self._view: dict[str, Any] | None = None
        self._unreachable_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread; the first sample may take some seconds."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close the connection. Idempotent, and allowed before `start`."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()

    @property
    def latest(self) -> Sample | None:
        """The latest sample; None before the first one."""
        with self._lock:
            return self._sample

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def history(self) -> bytes:
        """Return the measurements of the last hour as JSON, oldest first."""
        with self._lock:
            points = self._history.points()
        return msgspec.json.encode([(point.time, point.values) for point in points])

    def plans(self) -> bytes:
        """Return the steps of the known plans by dataset id, as JSON."""
        with self._lock:
            return msgspec.json.encode(self._plans)

    def sample_once(self) -> Sample:
        """Request the status, and record it or the failure; `start` does so repeatedly."""
        now = time.time()
        problem = ""
        view = self._view
        plans = self._plans
        values: dict[str, float] = {}
        try:
            snapshot = self._client.fetch()
            plans = self._fetch_plans(snapshot)
            view = describe_snapshot(snapshot, self._previous)
            values = measure_snapshot(view)
        except Exception as error:
            # Also errors in a status of another release: without this thread, the page would wait
            # forever, and not say why.
            known = isinstance(error, HeadraceError)
            problem = str(error) if known else f"its status cannot be shown: {error!r}"
            if self._unreachable_since is None:
                self._unreachable_since = now
        else:
            self._previous, self._unreachable_since = snapshot, None
        status = msgspec.json.encode(
            {
                "time": now,
                "address": self.address,
                "problem": problem,
                "unreachable_since": self._unreachable_since,
                "view": view,
                "values": values,
            }
        )
        with self._lock:
            self._history.add(now, values)
            if plans != self._plans:
                self._plans, self._plans_version = plans, self._plans_version + 1
            self._view = view
            number = 1 if self._sample is None else self._sample.number + 1
            sample = Sample(number, Point(now, values), status, self._plans_version)
            self._sample = sample
        return sample

    def _fetch_plans(self, snapshot: StatusSnapshot) -> dict[str, tuple[PlanStep, ...]]:
        """Return the plans of the current jobs, of which a few new ones are requested."""
        if not isinstance(snapshot.status, DispatcherStatus):
            return {}
        wanted = dict.fromkeys(job.dataset_id for job in snapshot.status.jobs)
        plans = {name: self._plans[name] for name in wanted if name in self._plans}
        for name in [name for name in wanted if name not in plans][:_MAX_NEW_PLANS]:
            try:
                plans[name] = self._client.fetch_plan_steps(name)
            except HeadraceError:  # removed just now, or an earlier release
                plans[name] = ()
        return plans

    def _run(self) -> None:
        wait = 0.0
        while not self._stop.wait(wait):
            started = time.monotonic()
            self.sample_once()
            seconds = time.monotonic() - started
            wait = min(_MAX_INTERVAL, max(_INTERVAL - seconds, _BUSY_FACTOR * seconds))
            if self._unreachable_since is not None:
                wait = _INTERVAL
