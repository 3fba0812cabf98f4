"""Detection of leaked resources of a process.

Rule 1. Resources are counted by the kernel or the interpreter: live threads, child processes, open
        file descriptors, mapped memory files, entries in /dev/shm. Nothing has to register.
Rule 2. A release may take a moment (a joined thread's descriptor, a reaped child), so only what
        remains after a grace period is a leak; without leaks the check returns at once.
Rule 3. The grace period is counted in checks, a hundred per second on an idle machine. So time in
        which this process was paused, or only the garbage collector ran, does not count.
"""

from __future__ import annotations

import gc
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HeldResources", "assert_no_leaks"]

_MAPPED_MEMFD = re.compile(r"(/memfd:headrace\S*|/dev/shm/headrace\S*)")
_POLL_SECONDS = 0.01
_COLLECTIONS = frozenset((0, 10, 50, 100, 200, 400, 800))
"""Checks before which the garbage collector runs: it may take a second with many objects."""


@dataclass(frozen=True)
class HeldResources:
    """Resources of this process at one moment.

    Each field maps the identity of a resource to a description.

    >>> before = hr.testing.HeldResources.capture()
    >>> with open("kept.txt", "w") as file:
    ...     len(hr.testing.HeldResources.capture().describe_leaks(before))
    1
    """

    threads: dict[tuple[int | None, str], str]
    processes: dict[int, str]
    descriptors: dict[tuple[int, str], str]
    mappings: dict[str, str]
    shared_memory: dict[str, str]

    @classmethod
    def capture(cls) -> HeldResources:
        """Return the current resources of this process (on Linux; elsewhere threads only)."""
        return cls(
            threads={
                (thread.ident, thread.name): f"thread {thread.name!r}"
                for thread in threading.enumerate()
            },
            processes={pid: f"child process {pid}: {_command(pid)}" for pid in _children()},
            descriptors={
                (number, target): f"file descriptor {number} -> {target}"
                for number, target in _descriptors()
            },
            mappings={key: f"mapped memory {description}" for key, description in _mappings()},
            shared_memory={
                entry.name: f"shared memory /dev/shm/{entry.name}"
                for entry in Path("/dev/shm").glob("headrace*")
                if _made_by_this_process(entry)
            },
        )

    def describe_leaks(self, before: HeldResources, allowed: Sequence[str] = ()) -> list[str]:
        """Return descriptions of resources held here but not `before`.

        Args:
            before: Resources held earlier.
            allowed: Resources whose description contains one of these do not count.
        """
        new = [
            description
            for held, had in (
                (self.threads, before.threads),
                (self.processes, before.processes),
                (self.descriptors, before.descriptors),
                (self.mappings, before.mappings),
                (self.shared_memory, before.shared_memory),
            )
            for key, description in held.items()
            if key not in had
        ]
        return [
            description for description in new if not any(part in description for part in allowed)
        ]


@contextmanager
def assert_no_leaks(*, grace: float = 2.0, allowed: Sequence[str] = ()) -> Iterator[None]:
    """Raise at the end of the `with` block if it leaked resources.

    >>> with hr.testing.assert_no_leaks():
    ...     numbers = list(hr.Dataset.range(3).prefetch(2))

    Args:
        grace: Seconds in which threads may end and children may be reaped; more on a busy
            machine.
        allowed: Resources whose description contains one of these do not count.

    Raises:
        AssertionError: If resources are leaked; the message lists them. Not raised over an
            exception of the block.
    """
    before = HeldResources.capture()
    yield
    leaks = HeldResources.capture().describe_leaks(before, allowed)
    checks = 0
    while leaks and checks < max(1, math.ceil(grace / _POLL_SECONDS)):
        if checks in _COLLECTIONS:
            # Iterators in reference cycles are closed by the garbage collector. A thread that has
            # ended since the last check may have leaked another one.
            gc.collect()
        else:
            time.sleep(_POLL_SECONDS)
        checks += 1
        leaks = HeldResources.capture().describe_leaks(before, allowed)
    if leaks:
        # Descriptors do not show who opened them; the live threads often do.
        alive = ", ".join(thread.name for thread in threading.enumerate())
        raise AssertionError(
            "leaked resources:\n" + "\n".join(f"  {leak}" for leak in leaks) + f"\nthreads: {alive}"
        )


def _children() -> list[int]:
    children: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            children.extend(int(pid) for pid in task.read_text().split())
        except OSError:  # The thread has ended in the meantime.
            continue
    return children


def _command(pid: int) -> str:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "ended"
    # A child that has ended but was not reaped has an empty command line.
    return arguments.decode(errors="replace").strip() or "ended, but not reaped"


def _descriptors() -> Iterator[tuple[int, str]]:
    directory = Path("/proc/self/fd")
    for name in os.listdir(directory) if directory.is_dir() else []:
        try:
            target = os.readlink(directory / name)
        except OSError:  # The listing's own descriptor, already closed.
            continue
        yield int(name), target


def _mappings() -> Iterator[tuple[str, str]]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        found = _MAPPED_MEMFD.search(line)
        if found:
            addresses = line.split(maxsplit=1)[0]
            yield f"{addresses} {found[1]}", f"{found[1]} at {addresses}"


def _made_by_this_process(entry: Path) -> bool:
    # Other test processes share /dev/shm; their entries do not count. The first number in the
    # name of an entry is the process id of its creator.
    number = re.search(r"\d+", entry.name)
    return number is None or int(number[0]) == os.getpid() or not _alive(int(number[0]))


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
