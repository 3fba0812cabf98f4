"""`keras.callbacks.BackupAndRestore` for models on parameter servers.

The callback of Keras saves weights alone. In its place this saves all that training needs to go on
at the same batch: weights, what the optimizer keeps, metrics, the state of callbacks, and where
the data are. Training goes on bit for bit where steps run in a fixed order (`mode="sync"`, or
`staleness=0`). A backup is an `hr.Checkpoint`, so the number of servers may change.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from headrace.errors import FailedPreconditionError
from headrace.parameter_server.checkpoint_format import delete_checkpoint
from headrace.parameter_server.checkpoints import Checkpoint, CheckpointManager
from headrace.storage.files import open_folder

__all__ = ["TrainingBackup", "restore_callbacks", "state_of_callbacks", "take_backup_callback"]

_log = logging.getLogger(__name__)

_VERSION = 1


def take_backup_callback(
    callbacks: Any,
) -> tuple[list[Any], keras.callbacks.BackupAndRestore | None]:
    """Return a list of callbacks without the `BackupAndRestore` in it, and that one, if any.

    Raises:
        ValueError: If there are several.
    """
    flat = list(keras.tree.flatten(callbacks)) if callbacks else []
    found = [each for each in flat if isinstance(each, keras.callbacks.BackupAndRestore)]
    if len(found) > 1:
        raise ValueError("`callbacks` has several BackupAndRestore; one is enough")
    return [each for each in flat if each not in found], found[0] if found else None


class TrainingBackup:
    """Saves the state of training, and restores it.

    Args:
        callback: Says where, and how often.
        objects: Variables and optimizers on the servers, by name.
    """

    def __init__(self, callback: Any, objects: Mapping[str, Any]) -> None:
        #: Batches from one backup to the next; None: one at the end of each epoch.
        self.every: int | None = None if callback.save_freq == "epoch" else int(callback.save_freq)
        self._delete_checkpoint = bool(callback.delete_checkpoint)
        self._directory = os.fspath(callback.backup_dir)
        self._checkpoint = Checkpoint(**objects, training="")
        self._manager = CheckpointManager(
            self._checkpoint, self._directory, max_to_keep=2 if callback.double_checkpoint else 1
        )
        self._is_terminating = threading.Event()
        self.is_final_save_done = False
        self._batches = 0

    @property
    def is_due(self) -> bool:
        """Whether the next backup is due: enough batches came since the last one."""
        return self.every is not None and self._batches >= self.every

    def count(self, batches: int) -> None:
        """Count batches whose step is scheduled."""
        self._batches += batches

    @property
    def is_terminating(self) -> bool:
        """Whether the program received SIGTERM, and must save before it ends."""
        return self._is_terminating.is_set()

    def restore(self) -> dict[str, Any] | None:
        """Restore the newest backup; return what `save` was given, or None: there is none.

        Raises:
            FailedPreconditionError: It is of another version.
        """
        if self._manager.restore_or_initialize() is None:
            return None
        found: dict[str, Any] = json.loads(self._checkpoint.training, object_hook=_decode)
        self._batches = found.get("batches", 0)
        if found.get("version") != _VERSION:
            raise FailedPreconditionError(
                f"the backup in {self._directory} is of version {found.get('version')}, but this "
                f"version of Headrace reads version {_VERSION}"
            )
        return found

    def save(self, training: Mapping[str, Any]) -> None:
        """Save a backup. No step may be under way.

        Args:
            training: Values of JSON and arrays.
        """
        # A backup in between must not move those after it: they end a synchronous round early.
        batches = self._batches if self.is_terminating and not self.is_due else 0
        found = {**training, "version": _VERSION, "batches": batches}
        self._checkpoint.training = json.dumps(found, default=_encode)
        self._manager.save()
        self._batches = 0

    def delete(self) -> None:
        """Delete the backups, if the callback says so: training has ended."""
        if self._delete_checkpoint:
            folder = open_folder(self._directory)
            for path in self._manager.checkpoints:
                delete_checkpoint(folder, path.rpartition("/")[2])

    def close(self) -> None:
        """Save nothing more. May be called twice."""
        self._manager.close()

    @contextlib.contextmanager
    def handle_sigterm(self) -> Iterator[None]:
        """Record SIGTERM within the context, and end the program after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            yield
        except BaseException:
            signal.signal(signal.SIGTERM, before)
            if self.is_final_save_done:  # else the program ends with this error
                _log.warning("training is saved in %s", self._directory)
                os.kill(os.getpid(), signal.SIGTERM)
            raise
        signal.signal(signal.SIGTERM, before)
        if self.is_terminating:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_sigterm(self, *_: Any) -> None:
        _log.warning("received SIGTERM: fit saves a backup and ends when the steps that run end")
        self._is_terminating.set()


def state_of_callbacks(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what callbacks remember: their attributes that are numbers, strings and arrays."""
    return [
        {name: value for name, value in vars(each).items() if _is_plain(value)}
        for each in callbacks
    ]


def restore_callbacks(callbacks: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
    """Restore attributes that `state_of_callbacks` returned.

    Raises:
        FailedPreconditionError: If the callbacks are not those of the state.
    """
    if len(callbacks) != len(states):
        raise FailedPreconditionError(
            f"the backup is of a fit with {len(states)} callbacks, but this one has "
            f"{len(callbacks)}: pass the same callbacks, or another backup_dir"
        )
    for each, state in zip(callbacks, states, strict=True):
        vars(each).update(state)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _encode(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"a backup cannot contain a value of type {type(value).__name__}")
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        data = base64.b64encode(file.getvalue()).decode()
    return {"array": data, "scalar": not isinstance(value, np.ndarray)}


def _decode(found: dict[str, Any]) -> Any:
    if found.keys() != {"array", "scalar"}:
        return found
    with io.BytesIO(base64.b64decode(found["array"])) as file:
        array = np.load(file, allow_pickle=False)
    return array[()] if found["scalar"] else array
