"""Processor time of a contender: all of its threads, and all processes that it started.

Where others use the machine, a rate says how much of it was left, and this what the work costs.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

__all__ = ["cpu_seconds", "cpu_seconds_of"]


def cpu_seconds(processes: Path = Path("/proc")) -> float:
    """Return the seconds used so far, user and system, by this process and those that it started.

    Args:
        processes: Where the system describes running processes; where it does not, only those that
            have ended are counted.
    """
    used = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used + sum(_of_running(processes, os.getpid()))


def cpu_seconds_of(process: int) -> float:
    """Return the seconds that one running process and its threads have used, user and system."""
    return time.clock_gettime(_clock_of(process))


def _clock_of(process: int) -> int:
    # As clock_getcpuclockid(3) has it on Linux: exact, where /proc counts ticks of 10 ms.
    return (~process << 3) | 2


def _of_running(processes: Path, parent: int) -> list[float]:
    """Return the seconds of each process that descends from `parent` and still runs."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in processes.glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:  # it has ended
            continue
        # After the name, which may hold blanks: state, parent, ..., and the times from the 12th on,
        # of the process and of its children that have ended.
        fields = text.rpartition(")")[2].split()
        number = int(entry.name)
        children.setdefault(int(fields[1]), []).append(number)
        seconds[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found, pending = [], [parent]
    while pending:
        of_parent = children.get(pending.pop(), [])
        found += [seconds[number] for number in of_parent]
        pending += of_parent
    return found
