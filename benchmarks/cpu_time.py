"""Processor time of a contender: of all its threads and of all its descendant processes.

On a shared machine a rate depends on the load of others; processor time measures the cost of the
work itself.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

__all__ = ["cpu_seconds", "cpu_seconds_of"]


def cpu_seconds(processes: Path = Path("/proc")) -> float:
    """Return the user and system seconds used so far by this process and its descendants.

    Args:
        processes: The proc file system. Without one, only descendants that have ended are counted.
    """
    used = 0.0
    for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(scope)
        used += usage.ru_utime + usage.ru_stime
    return used + sum(_of_running(processes, os.getpid()))


def cpu_seconds_of(process: int) -> float:
    """Return the user and system seconds used by all threads of one running process."""
    return time.clock_gettime(_clock_of(process))


def _clock_of(process: int) -> int:
    # The value of clock_getcpuclockid(3) on Linux: exact, while /proc counts ticks of 10 ms.
    return (~process << 3) | 2


def _of_running(processes: Path, parent: int) -> list[float]:
    """Return the seconds of each running descendant of `parent`."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in processes.glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:  # it has ended
            continue
        # Fields after the name, which may contain blanks: state, parent, ..., and from the 12th the
        # times of the process and of its ended children.
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
