"""Finds the checkpoints in a directory that another program writes to.

    listed      .weights.h5 and .keras files, manifests of hr.Checkpoint
    due         the file has not changed for `_SETTLE_SECONDS`; after a load that failed, for twice
                as long as before
    loaded      by the caller, the newest one first; then it and all that are older are done with

A file that is overwritten is a new checkpoint.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.parameter_server.checkpoint_format import checkpoint_names, place_of

__all__ = ["KERAS_SUFFIXES", "CheckpointWatch", "FoundCheckpoint", "version_of"]

KERAS_SUFFIXES = (".weights.h5", ".keras")
_MANIFEST = ".json"
_SETTLE_SECONDS = 0.5
_FRACTION = re.compile(r"\d+\.\d+")
#: Not "50" of "resnet50".
_NUMBER = re.compile(r"(?:^|[-_. ]|epoch)(\d+)(?=$|[-_. ])")

#: Time of the last change in nanoseconds, size in bytes, and inode of a file.
Version = tuple[int, int, int]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint as it was when the directory was listed.

    Attributes:
        path: Path of the file, or of the `hr.Checkpoint`.
        version: Changes when the file is written again.
        unchanged: Seconds since a change of the file was last seen.
    """

    path: str
    version: Version
    unchanged: float

    @property
    def is_keras_file(self) -> bool:
        """Whether Keras wrote it."""
        return self.path.endswith(KERAS_SUFFIXES)

    @property
    def number(self) -> int | None:
        """The last whole number in its name, such as an epoch; None: there is none.

        Examples: 3 in "ckpt-3" and "weights.03-0.91", none in "resnet50".
        """
        name = os.path.basename(self.path)
        for suffix in KERAS_SUFFIXES:
            name = name.removesuffix(suffix)
        found = _NUMBER.findall(_FRACTION.sub(" ", name))
        return int(found[-1]) if found else None


class CheckpointWatch:
    """The checkpoints of a directory, each given until it is done with.

    Args:
        directory: A local directory, which need not exist yet.
        clock: Seconds since some moment.
    """

    def __init__(self, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        #: When each version of a file was seen first.
        self._first_seen: dict[tuple[str, Version], float] = {}
        #: For how long a version must not have changed before it is tried again.
        self._due_after: dict[tuple[str, Version], float] = {}
        self._done: set[tuple[str, Version]] = set()

    def candidates(self) -> list[FoundCheckpoint]:
        """Return the checkpoints that are not done with, the newest one first."""
        now = self._clock()
        listed = dict(self._listed())
        keys = set(listed.items())
        self._first_seen = {key: self._first_seen.get(key, now) for key in keys}
        self._due_after = {key: self._due_after[key] for key in keys & self._due_after.keys()}
        self._done &= keys
        found = [
            FoundCheckpoint(path, version, now - self._first_seen[path, version])
            for path, version in keys - self._done
        ]
        return sorted(found, key=_age, reverse=True)

    def is_due(self, found: FoundCheckpoint) -> bool:
        """Return whether to load it now. Manifests are written in one step."""
        first = _SETTLE_SECONDS if found.is_keras_file else 0.0
        return found.unchanged >= self._due_after.get((found.path, found.version), first)

    def postpone(self, found: FoundCheckpoint) -> None:
        """Record that the checkpoint could not be loaded, and double the time to the next try."""
        wait = 2 * max(found.unchanged, _SETTLE_SECONDS)
        self._due_after[found.path, found.version] = wait

    def finish(self, found: FoundCheckpoint) -> None:
        """Do not give this checkpoint again, or older ones."""
        self._done.update(
            (path, version)
            for path, version in self._first_seen
            if version[0] <= found.version[0] or (path, version) == (found.path, found.version)
        )

    def _listed(self) -> Iterator[tuple[str, Version]]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return
        files = {name: name for name in names if name.endswith(KERAS_SUFFIXES)}
        folder, _ = place_of(os.path.join(self._directory, "any"))
        files |= {f"{name}{_MANIFEST}": name for name in checkpoint_names(folder)}
        for file, name in files.items():
            version = version_of(os.path.join(self._directory, file))
            if version is not None and not name.startswith("."):
                yield os.path.join(self._directory, name), version


def _age(found: FoundCheckpoint) -> tuple[int, int, str]:
    return found.version[0], found.number or 0, found.path


def version_of(path: str) -> Version | None:
    """Return the version of a file; None: there is none, or it is a directory."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not os.path.isfile(path):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
