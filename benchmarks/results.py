"""Results of the benchmarks: the record of a workload, the machine, and results.json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import headrace
from benchmarks.measure import Measurement
from benchmarks.targets import outcomes
from benchmarks.workload import Workload

__all__ = ["Result", "Results", "code", "machine", "thread_round_trip"]

_PACKAGES = (
    "headrace",
    "numpy",
    "pyzmq",
    "google-crc32c",
    "opencv-python-headless",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
    "grain",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a workload.

    Attributes:
        workload: Name of the workload.
        unit: Plural noun of the counted items.
        date: Date of the run.
        measurements: Measurements of each contender.
        item_bytes: Bytes per item; if given, rates are shown in GB/s.
        self_timed: Whether seconds per item are shown instead of rates; see `Workload`.
        code: State of the library that was measured; see `code`.
        machine: Machine that was used; see `machine`.
        targets: Outcomes of the targets of development; not stored.
    """

    workload: str
    unit: str
    date: str
    measurements: list[Measurement]
    item_bytes: int | None = None
    self_timed: bool = False
    code: str = ""
    machine: dict[str, str] = field(default_factory=lambda: machine())
    targets: dict[str, bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload, measurements: list[Measurement]) -> Result:
        """Return the result of a workload, with targets evaluated."""
        return cls(
            workload=workload.name,
            unit=workload.unit,
            date=datetime.now(UTC).date().isoformat(),
            measurements=measurements,
            item_bytes=workload.item_bytes,
            self_timed=workload.self_timed,
            code=code(Path(headrace.__file__).parent),
            targets=outcomes(workload, measurements),
        )

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Result:
        """Return the result that `to_json` has converted."""
        names = {each.name for each in fields(Measurement)}
        measurements = [
            Measurement(**{name: value for name, value in stored.items() if name in names})
            for stored in entry["measurements"]
        ]
        return cls(**entry | {"measurements": measurements})

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values; measurements include the medians, for other readers."""
        entry = asdict(self)
        del entry["targets"]
        entry["measurements"] = [
            {"rate": m.rate, "first": m.first, "cpu": m.cpu, **asdict(m)} for m in self.measurements
        ]
        return entry


@dataclass(frozen=True, kw_only=True)
class Results:
    """Content of results.json.

    Attributes:
        method: Description of the rounds.
        thread_round_trip_us: See `thread_round_trip`.
        results: Results in the order of the workloads.
    """

    method: str
    thread_round_trip_us: int
    results: list[Result]

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file; results in another format than the current one are dropped."""
        content = json.loads(path.read_text())
        known = {each.name for each in fields(Result)}
        content["results"] = [
            Result.from_json(entry)
            for entry in content["results"]
            if entry.keys() <= known and "unit" in entry
        ]
        return cls(**content)

    @classmethod
    def merged(
        cls, path: Path, results: Iterable[Result], order: list[str], method: str
    ) -> Results:
        """Return the results of a file and those of this run, which replace older ones."""
        stored = cls.load(path).results if path.exists() else []
        by_name = {result.workload: result for result in (*stored, *results)}
        return cls(
            method=method,
            thread_round_trip_us=round(thread_round_trip()),
            results=[by_name[name] for name in order if name in by_name],
        )

    def save(self, path: Path) -> None:
        """Write a file."""
        content = {
            "thread_round_trip_us": self.thread_round_trip_us,
            "method": self.method,
            "results": [result.to_json() for result in self.results],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def code(library: Path) -> str:
    """Return the short git hash of a directory's tree, with "+" appended if files have changed.

    The hash covers the sources only, so commits of results or documents do not change it. Without
    git the result is "".
    """
    tree = _git(library, "rev-parse", "--short=10", "HEAD:./")
    return tree + "+" if tree and _git(library, "status", "--porcelain", "--", ".") else tree


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def machine() -> dict[str, str]:
    """Return cores, memory and versions, which figures depend on; nothing identifies the host."""
    properties = {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.system(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            properties[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return properties


def thread_round_trip(times: int = 2000) -> float:
    """Measure a round trip between two threads, in microseconds.

    It differs tenfold between machines; so does the ratio of contenders that pass each element
    between threads to contenders that do not.
    """
    request, reply = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(times):
            request.acquire()
            reply.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    began = time.perf_counter()
    for _ in range(times):
        request.release()
        reply.acquire()
    took = time.perf_counter() - began
    thread.join()
    return took / times * 1e6


def _first_value(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return platform.machine()
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, platform.machine())
