"""Processor cores and processor time of the worker process and of its machine, for heartbeats."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

from headrace.service.worker.registration import ProcessorUse

__all__ = ["count_cores", "machine_cpu_seconds", "measure_processor_use"]

_CGROUP = Path("/sys/fs/cgroup")
_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)
"""Numbers of the times in a line of /proc/stat in which a core is idle, or waits for a disk."""
_NUM_FIELDS = 8
"""Number of times in a line that do not include each other."""


def measure_processor_use() -> ProcessorUse:
    """Return the processor use of this process and its machine."""
    return ProcessorUse(count_cores(), time.process_time(), machine_cpu_seconds())


@cache
def count_cores(cgroup: Path = _CGROUP) -> float:
    """Return the number of cores that this process may use: those of its affinity and quota.

    Args:
        cgroup: Directory of the container (cgroup v2).
    """
    quota = _read_quota(cgroup)
    cores = float(len(_affinity()))
    return cores if quota is None else min(cores, quota)


def machine_cpu_seconds(cgroup: Path = _CGROUP, stat: Path = _STAT) -> float:
    """Return the processor time of all programs on the cores that `count_cores` counts.

    With a quota, the programs of the container compete for it. Otherwise all programs of the
    machine compete for the cores of this process.

    Args:
        cgroup: Directory of the container (cgroup v2).
        stat: File with the times of each core.

    Returns:
        Seconds since some moment; 0.0 if unknown.
    """
    try:
        if count_cores(cgroup) < len(_affinity()):
            fields = dict(line.split() for line in (cgroup / "cpu.stat").read_text().splitlines())
            return int(fields["usage_usec"]) / 1e6
        cores = {f"cpu{number}" for number in _affinity()}
        busy = 0
        for line in stat.read_text().splitlines():
            name, *times = line.split()
            if name in cores:
                busy += sum(
                    int(ticks)
                    for number, ticks in enumerate(times[:_NUM_FIELDS])
                    if number not in _IDLE_FIELDS
                )
        return busy / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, KeyError):
        return 0.0


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read_quota(cgroup: Path) -> float | None:
    """Return the cores that the container may use; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
