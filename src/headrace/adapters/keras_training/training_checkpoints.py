"""Checkpoints in a directory that another program writes to: finds complete ones, and loads them.

    listed      .weights.h5 and .keras files, manifests of hr.Checkpoint
    due         the file has not changed for `_UNCHANGED_SECONDS`; after a load that failed, for
                twice as long as before
    loaded      by the caller, the newest one first; then it and all that are older are done with

A file that is overwritten is a new checkpoint. Keras writes files in place, so a file may be
incomplete, or be overwritten while it is read. It is copied first, and the copy is used if it is
complete and the file did not change. HDF5 must not open the file itself: it would lock the file,
and the program that writes it would fail.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError, describe_error
from headrace.parameter_server.checkpoint_format import (
    ArrayEntry,
    OptimizerEntry,
    list_checkpoints,
    read_checkpoint,
    split_path,
)
from headrace.parameter_server.checkpoints import Checkpoint

__all__ = [
    "KERAS_SUFFIXES",
    "CheckpointWatch",
    "FoundCheckpoint",
    "IncompleteError",
    "load",
    "version_of",
]

KERAS_SUFFIXES = (".weights.h5", ".keras")
_MANIFEST = ".json"
_UNCHANGED_SECONDS = 0.5
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
        return sorted(found, key=_seconds_unchanged, reverse=True)

    def is_due(self, found: FoundCheckpoint) -> bool:
        """Return whether to load it now. Manifests are written in one step."""
        first = _UNCHANGED_SECONDS if found.is_keras_file else 0.0
        return found.unchanged >= self._due_after.get((found.path, found.version), first)

    def postpone(self, found: FoundCheckpoint) -> None:
        """Record that the checkpoint could not be loaded, and double the time to the next try."""
        wait = 2 * max(found.unchanged, _UNCHANGED_SECONDS)
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
        folder, _ = split_path(os.path.join(self._directory, "any"))
        files |= {f"{name}{_MANIFEST}": name for name in list_checkpoints(folder)}
        for file, name in files.items():
            version = version_of(os.path.join(self._directory, file))
            if version is not None and not name.startswith("."):
                yield os.path.join(self._directory, name), version


def _seconds_unchanged(found: FoundCheckpoint) -> tuple[int, int, str]:
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


_ITERATIONS = ("optimizer/vars/0", "optimizer/inner_optimizer/vars/0")
_WEIGHTS_IN_ARCHIVE = "model.weights.h5"


class IncompleteError(Exception):
    """A checkpoint is incomplete, or was deleted."""


def load(model: Any, found: FoundCheckpoint, folder: str) -> int | None:
    """Load a checkpoint into a model.

    Args:
        model: A Keras model, built.
        found: The checkpoint.
        folder: Where a copy may be left until the next call.

    Returns:
        The optimizer's iterations; None: the checkpoint has none.

    Raises:
        IncompleteError: If it is incomplete.
        Exception: If it is complete but does not fit the model.
    """
    if found.is_keras_file:
        return _load_file(model, found, folder)
    return _load_objects(model, found.path)


def _load_file(model: Any, found: FoundCheckpoint, folder: str) -> int | None:
    copy = os.path.join(folder, os.path.basename(found.path))
    try:
        try:
            shutil.copyfile(found.path, copy)
            iterations = _iterations_in(copy)
        except Exception as error:  # whatever readers raise for a part of a file
            raise IncompleteError(f"it cannot be read: {describe_error(error)}") from error
        if version_of(found.path) != found.version:
            raise IncompleteError("it changed while it was read")
        with warnings.catch_warnings():
            # An optimizer that never trained has no slots; evaluation needs none.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            model.load_weights(copy)
        return iterations
    finally:
        if os.path.exists(copy):
            os.remove(copy)


def _iterations_in(path: str) -> int | None:
    """Check that a file is whole; return the optimizer's iterations in it, or None."""
    if not path.endswith(".keras"):
        with h5py.File(path, "r") as file:
            return _iterations_of(file)
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged!r} is damaged")
        if _WEIGHTS_IN_ARCHIVE not in archive.namelist():
            return None
        with archive.open(_WEIGHTS_IN_ARCHIVE) as weights, h5py.File(weights, "r") as file:
            return _iterations_of(file)


def _iterations_of(file: Any) -> int | None:
    file.visititems(lambda name, value: None)  # raises where a part is missing
    found = [int(file[name][()]) for name in _ITERATIONS if name in file and not file[name].shape]
    return max(found, default=None)


def _load_objects(model: Any, path: str) -> int | None:
    """Load an `hr.Checkpoint` that has the model as `model`, or its weights as `weights`."""
    try:
        entries = read_checkpoint(*split_path(path)).manifest.entries
        names = {each.partition("/")[0] for each in entries}
        objects: dict[str, Any]
        if "model" in names:
            objects = {"model": model}
        elif "weights" in names:
            objects = {"weights": list(model.weights)}
        else:
            raise InvalidArgumentError(
                f"the checkpoint {path!r} has no object `model` or `weights`, but "
                f"{', '.join(sorted(names)) or 'none'}"
            )
        counter = entries.get("optimizer/0")
        if isinstance(counter, ArrayEntry) and not counter.shape:
            objects["optimizer"] = [np.zeros((), counter.dtype)]
        Checkpoint(**objects).restore(path)
    except (NotFoundError, DataLossError) as error:
        raise IncompleteError(f"it cannot be restored: {describe_error(error)}") from error
    if "optimizer" in objects:
        return int(objects["optimizer"][0])
    optimizer = entries.get("optimizer")
    return optimizer.iterations if isinstance(optimizer, OptimizerEntry) else None
