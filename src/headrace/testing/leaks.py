"""What a process holds, and whether a piece of code gave back what it took.

Rule 1. What is counted is what the kernel or the interpreter counts: live threads, child processes,
        open file descriptors, mapped memory files, entries in /dev/shm. Nothing has to register.
Rule 2. Giving back may take a moment (a joined thread's descriptor, a reaped child), so a leak is
        what is still there after a grace period; what is clean is clean at once.
Rule 3. The period is counted in looks, a hundred a second where the machine is free. So a time in
        which this process did not run, or the collector alone did, takes nothing away from others.
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

__all__ = ["Resources", "assert_no_leaks"]

_MAPPED_MEMFD = re.compile(r"(/memfd:headrace\S*|/dev/shm/headrace\S*)")
_POLL_SECONDS = 0.01
_COLLECTIONS = frozenset((0, 10, 50, 100, 200, 400, 800))
"""Looks before which the collector runs: it may take a second where much is alive."""


@dataclass(frozen=True)
class Resources:
    """What this process holds at one moment.

    Each maps what tells one holding from another to the words that describe it to a reader.

    >>> before = hr.testing.Resources.held_now()
    >>> with open("kept.txt", "w") as file:
    ...     len(hr.testing.Resources.held_now().beyond(before))
    1
    """

    threads: dict[tuple[int | None, str], str]
    processes: dict[int, str]
    descriptors: dict[tuple[int, str], str]
    mappings: dict[str, str]
    shared_memory: dict[str, str]

    @classmethod
    def held_now(cls) -> Resources:
        """Return what this process holds now (on Linux; elsewhere threads alone)."""
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
            mappings={key: f"mapped memory {words}" for key, words in _mappings()},
            shared_memory={
                entry.name: f"shared memory /dev/shm/{entry.name}"
                for entry in Path("/dev/shm").glob("headrace*")
                if _made_by_this_process(entry)
            },
        )

    def beyond(self, before: Resources, allowed: Sequence[str] = ()) -> list[str]:
        """Return what is held here and was not held `before`, in words.

        Args:
            before: What was held earlier.
            allowed: Holdings whose words contain one of these do not count.
        """
        new = [
            words
            for held, had in (
                (self.threads, before.threads),
                (self.processes, before.processes),
                (self.descriptors, before.descriptors),
                (self.mappings, before.mappings),
                (self.shared_memory, before.shared_memory),
            )
            for key, words in held.items()
            if key not in had
        ]
        return [words for words in new if not any(part in words for part in allowed)]


@contextmanager
def assert_no_leaks(*, grace: float = 2.0, allowed: Sequence[str] = ()) -> Iterator[None]:
    """Raise at the end of the `with` block if it left something behind.

    >>> with hr.testing.assert_no_leaks():
    ...     numbers = list(hr.Dataset.range(3).prefetch(2))

    Args:
        grace: Seconds in which threads may end and children may be reaped; more where the machine
            is busy.
        allowed: Holdings whose description contains one of these do not count.

    Raises:
        AssertionError: Something is left; the message lists it. Not raised over an exception of
            the block itself.
    """
    before = Resources.held_now()
    yield
    left = Resources.held_now().beyond(before, allowed)
    looks = 0
    while left and looks < max(1, math.ceil(grace / _POLL_SECONDS)):
        if looks in _COLLECTIONS:
            # An iterator that only a reference cycle holds is closed by the collector, not by us. A
            # thread that has ended since the last time may have left another one.
            gc.collect()
        else:
            time.sleep(_POLL_SECONDS)
        looks += 1
        left = Resources.held_now().beyond(before, allowed)
    if left:
        # Descriptors do not say who opened them; the threads that are there often do.
        alive = ", ".join(thread.name for thread in threading.enumerate())
        raise AssertionError(
            "left behind:\n" + "\n".join(f"  {words}" for words in left) + f"\nthreads: {alive}"
        )


def _children() -> list[int]:
    children: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            children.extend(int(pid) for pid in task.read_text().split())
        except OSError:  # The thread ended while we looked.
            continue
    return children


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "ended"
    # An ended child that nobody has waited for has an empty command line.
    return words.decode(errors="replace").strip() or "ended, not waited for"


def _descriptors() -> Iterator[tuple[int, str]]:
    directory = Path("/proc/self/fd")
    for name in os.listdir(directory) if directory.is_dir() else []:
        try:
            target = os.readlink(directory / name)
        except OSError:  # The listing's own descriptor, closed by now.
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
    # Other test processes share /dev/shm with us; their entries are theirs to account for. An
    # entry carries its maker's process id as the first number in its name.
    number = re.search(r"\d+", entry.name)
    return number is None or int(number[0]) == os.getpid() or not _alive(int(number[0]))


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
