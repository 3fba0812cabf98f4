"""Processor cores and processor time of the worker process, for its heartbeats."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

from headrace.service.worker.registration import ProcessorUse

__all__ = ["count_cores", "measure_processor_use"]

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def measure_processor_use() -> ProcessorUse:
    """Return the processor use of this process."""
    return ProcessorUse(count_cores(), time.process_time())


@cache
def count_cores(limit: Path = _CGROUP_LIMIT) -> float:
    """Return the number of cores that this process may use: those of its affinity and quota.

    Args:
        limit: File with the quota of the container (cgroup v2).
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    try:
        quota, period = limit.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))
