"""Files of Keras models with tables: servers write the tables to a directory beside the file.

    model.keras                     what Keras writes; each layer with a table names its table
    model.keras.tables/NAME.json    an `hr.Checkpoint` of the tables, without slots of optimizers

The tables are written first, under a name that is new each time, and those of the file before are
deleted last: a file and its tables always belong together. Rows go from the servers to the files
and back, and never through this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.adapters.keras_training.embedding_tables import table_layers
from headrace.adapters.keras_training.keras_internals import table_of_variable
from headrace.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from headrace.parameter_server.checkpoint_format import delete, place_of, read_checkpoint
from headrace.parameter_server.checkpoints import Checkpoint, CheckpointStatus

__all__ = ["load_table", "loading_tables", "save_table", "saving_tables"]

_TABLE = "table"
"""Under which a layer has the name of its table in the Keras file, as bytes."""


class _Reference(NamedTuple):
    """Where a table is saved: the checkpoint, and its key there."""

    checkpoint: str
    key: str


_saved: ContextVar[dict[int, _Reference] | None] = ContextVar("headrace_saved", default=None)
"""While a model is saved: by variable, where its table is."""

_loaded: ContextVar[list[tuple[_Reference, Any]] | None] = ContextVar(
    "headrace_loaded", default=None
)
"""While a model is loaded: the variables whose tables must be restored."""


@contextlib.contextmanager
def saving_tables(model: Any, file: Any) -> Iterator[None]:
    """Save the tables of a model beside a file, which is written in this context.

    Raises:
        InvalidArgumentError: The file is no path.
    """
    layers = table_layers(model)
    if not layers:
        yield
        return
    directory = _directory(file)
    if directory is None:
        raise InvalidArgumentError(
            f"the model {model.name!r} has tables on parameter servers, which are saved beside its "
            f"file, so the file must be a path, but got a {type(file).__name__}"
        )
    name = f"tables-{secrets.token_hex(4)}"
    tables = {variable: layer._embeddings.table for variable, layer in layers.items()}
    path = Checkpoint(tables={each.name: each for each in tables.values()}).save(
        f"{directory}/{name}"
    )
    folder, _ = place_of(path)
    token = _saved.set({each: _Reference(name, table.name) for each, table in tables.items()})
    try:
        yield
    except BaseException:
        delete(folder, name)
        raise
    finally:
        _saved.reset(token)
    for each in folder.names():
        other = each.removesuffix(".json")
        if other not in (each, name) and other.startswith("tables-"):
            delete(folder, other)


@contextlib.contextmanager
def loading_tables(file: Any) -> Iterator[None]:
    """Restore the tables of a file after it was loaded in this context.

    Raises:
        NotFoundError: The tables are not beside the file.
    """
    wanted: list[tuple[_Reference, Any]] = []
    token = _loaded.set(wanted)
    try:
        yield
    finally:
        _loaded.reset(token)
    by_checkpoint: dict[str, dict[str, Any]] = {}
    for reference, variable in wanted:
        by_checkpoint.setdefault(reference.checkpoint, {})[reference.key] = variable.table
    for name, tables in by_checkpoint.items():
        path = f"{_directory(file)}/{name}"
        try:
            read = read_checkpoint(*place_of(path))
        except NotFoundError as error:
            raise NotFoundError(
                f"the rows of {', '.join(sorted(tables))} are not in {os.fspath(file)}, but in a "
                f"directory beside it, and {path} is not there: keep the file and "
                f"{os.path.basename(str(_directory(file)))} together"
            ) from error
        # Optimizers begin with the rows, as with the other weights.
        read.pieces = tuple(msgspec.structs.replace(each, slot_firsts={}) for each in read.pieces)
        CheckpointStatus(Checkpoint(tables=tables), read).restore_new()


def save_table(layer: Any, store: Any) -> None:
    """Write to a layer's part of a Keras file where its table is saved.

    Raises:
        FailedPreconditionError: The file is of a kind that has no tables.
    """
    reference = (_saved.get() or {}).get(id(layer._embeddings))
    if reference is None:
        raise FailedPreconditionError(
            f"the rows of the layer {layer.name!r} are in a table on parameter servers, which this "
            "way of saving does not write: use model.save(FILE.keras), "
            "model.save_weights(FILE.weights.h5) or hr.Checkpoint(table=layer.embeddings.table)"
        )
    store[_TABLE] = np.frombuffer("/".join(reference).encode(), np.uint8)


def load_table(layer: Any, store: Any) -> None:
    """Record that a layer's table must be restored, or write a plain matrix to it.

    Raises:
        FailedPreconditionError: The layer's part of the Keras file has neither.
    """
    variable, wanted = layer._embeddings, _loaded.get()
    names = list(store.keys())
    if _TABLE in names and wanted is not None:
        checkpoint, _, key = np.asarray(store[_TABLE]).tobytes().decode().partition("/")
        wanted.append((_Reference(checkpoint, key), variable))
    elif names == ["0"]:
        table_of_variable(variable).assign(store["0"], variable.shape[0])
    else:
        raise FailedPreconditionError(
            f"the file has no table and no matrix for the layer {layer.name!r}: load one that "
            "model.save or model.save_weights wrote"
        )


def _directory(file: Any) -> str | None:
    return f"{os.fspath(file)}.tables" if isinstance(file, str | os.PathLike) else None
