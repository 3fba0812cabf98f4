"""Loads complete checkpoints of another program into a Keras model.

Keras writes files in place, so a file may be incomplete, or be overwritten while it is read. It is
copied first, and the copy is used if it is complete and the file did not change. HDF5 must not open
the file itself: it would lock the file, and the program that writes it would fail.
"""

from __future__ import annotations

import os
import shutil
import warnings
import zipfile
from typing import Any

import h5py
import numpy as np

from headrace.adapters.keras_training.checkpoint_watch import FoundCheckpoint, version_of
from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError, describe_error
from headrace.parameter_server.checkpoint_format import (
    ArrayEntry,
    OptimizerEntry,
    place_of,
    read_checkpoint,
)
from headrace.parameter_server.checkpoints import Checkpoint

__all__ = ["IncompleteError", "load"]

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
        IncompleteError: It is not complete.
        Exception: It is complete, and does not fit the model.
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
        entries = read_checkpoint(*place_of(path)).manifest.entries
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
