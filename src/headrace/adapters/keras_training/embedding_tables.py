"""The table behind an embedding layer: made when it is first needed, and saved with the model.

The layer has a variable without a value (`embedding_internals.table_variable`), which stands for
all rows. Nothing in this process, and nothing in a worker, has the size of the table.

Servers write the tables of a model to a directory beside its file:

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
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from headrace.adapters.keras_training.embedding_internals import table_of_variable
from headrace.adapters.keras_training.keras_internals import all_layers
from headrace.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from headrace.parameter_server.checkpoint_format import (
    delete_checkpoint,
    read_checkpoint,
    split_path,
)
from headrace.parameter_server.checkpoints import Checkpoint, CheckpointStatus
from headrace.parameter_server.table import EmbeddingTable

__all__ = [
    "ServerTable",
    "check_trains_tables",
    "load_table",
    "loading_tables",
    "save_table",
    "saving_tables",
    "table_layers",
]

_ROWS_PER_WRITE = 65_536


class ServerTable:
    """Makes the table of a layer on the servers of its strategy, and refuses what needs all rows.

    Args:
        layer: Name of the layer, which the table is named after.
        dim: Elements in a row.
        settings: Other arguments of `hr.EmbeddingTable`.
        strategy: A `ParameterServerStrategy`; None: the one of the first model that is trained.
    """

    def __init__(self, layer: str, dim: int, settings: Mapping[str, Any], strategy: Any) -> None:
        self._layer = layer
        self._dim = dim
        self._settings = dict(settings)
        self._strategy = strategy
        self._table: EmbeddingTable | None = None
        self._lock = threading.Lock()

    def table_in(self, strategy: Any) -> EmbeddingTable:
        """Return the table on the servers of a strategy.

        Raises:
            FailedPreconditionError: It is on those of another one.
        """
        if self._strategy is None:
            self._strategy = strategy
        if self._strategy is not strategy:
            raise FailedPreconditionError(
                f"the table of the layer {self._layer!r} belongs to {self._strategy!r}: make "
                "another layer for a model of another strategy"
            )
        return self.table

    @property
    def table(self) -> EmbeddingTable:
        """The table; it is made where there is none yet.

        Raises:
            FailedPreconditionError: The layer belongs to no strategy.
        """
        if self._strategy is None:
            raise FailedPreconditionError(
                f"the layer {self._layer!r} has its rows on parameter servers but belongs to no "
                "strategy: create it, or its model, in the scope of a ParameterServerStrategy"
            )
        with self._lock:
            if self._table is None:
                with self._strategy.scope():
                    name = self._strategy.unused_name(self._layer)
                    self._table = EmbeddingTable(self._dim, name=name, **self._settings)
            return self._table

    def refuse_call(self) -> NoReturn:
        """Raise an error: the layer is called where no rows can be looked up."""
        raise FailedPreconditionError(
            f"the layer {self._layer!r} looks up rows on parameter servers, which is possible only "
            "in fit, evaluate and predict of a model of a ParameterServerStrategy: create the "
            "model in strategy.scope() and call one of these, or read rows with "
            "layer.embeddings.table.gather(ids)"
        )

    def note_read(self) -> NoReturn:
        """Raise an error: something asks for all rows."""
        raise FailedPreconditionError(
            f"the rows of the layer {self._layer!r} are in a table on parameter servers, and no "
            "process holds all of them: read some with layer.embeddings.table.gather(ids), or all "
            "part by part with layer.embeddings.table.export()"
        )

    def assign(self, values: Any, rows: int) -> None:
        """Write all rows, from an array or another sequence of rows.

        Raises:
            ValueError: If their number differs from that of the layer.
        """
        shape = tuple(values.shape)
        if not rows or shape != (rows, self._dim):
            known = f"({rows}, {self._dim})" if rows else "one for each id, which are not counted"
            raise ValueError(
                f"values of shape {shape} cannot be assigned to the rows of the layer "
                f"{self._layer!r}, {known}: write rows with layer.embeddings.table.assign(ids, "
                "values)"
            )
        table = self.table
        for start in range(0, rows, _ROWS_PER_WRITE):
            part = np.asarray(values[start : start + _ROWS_PER_WRITE])
            table.assign(np.arange(start, start + len(part)), part.astype(table.dtype, copy=False))


def check_trains_tables(model: Any, optimizer: Any) -> None:
    """Check that an optimizer of Keras trains the tables of a model.

    Raises:
        FailedPreconditionError: If it averages all rows in each step.
    """
    if optimizer.use_ema and (layers := table_layers(model)):
        names = ", ".join(repr(layer.name) for layer in layers.values())
        raise FailedPreconditionError(
            f"the optimizer {optimizer.name!r} has use_ema=True, which averages whole weights, but "
            f"no step reads all rows of {names}, which are in tables: use an optimizer without "
            "use_ema"
        )


def table_layers(model: Any) -> dict[int, Any]:
    """Return the layers of a model whose rows are in tables, by the id of their variable."""
    return {
        id(layer._embeddings): layer
        for layer in all_layers(model)
        if table_of_variable(getattr(layer, "_embeddings", None)) is not None
    }


_TABLE = "table"
"""Under which a layer has the name of its table in the Keras file, as bytes."""


class _TableReference(NamedTuple):
    """Where a table is saved: the checkpoint, and its key there."""

    checkpoint: str
    key: str


_saved: ContextVar[dict[int, _TableReference] | None] = ContextVar("headrace_saved", default=None)
"""While a model is saved: by variable, where its table is."""

_loaded: ContextVar[list[tuple[_TableReference, Any]] | None] = ContextVar(
    "headrace_loaded", default=None
)
"""While a model is loaded: the variables whose tables must be restored."""


@contextlib.contextmanager
def saving_tables(model: Any, file: Any) -> Iterator[None]:
    """Save the tables of a model beside a file, which is written in this context.

    Raises:
        InvalidArgumentError: If the file is not a path.
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
    folder, _ = split_path(path)
    token = _saved.set({each: _TableReference(name, table.name) for each, table in tables.items()})
    try:
        yield
    except BaseException:
        delete_checkpoint(folder, name)
        raise
    finally:
        _saved.reset(token)
    for each in folder.list_published():
        other = each.removesuffix(".json")
        if other not in (each, name) and other.startswith("tables-"):
            delete_checkpoint(folder, other)


@contextlib.contextmanager
def loading_tables(file: Any) -> Iterator[None]:
    """Restore the tables of a file after it was loaded in this context.

    Raises:
        NotFoundError: If the files of the tables are missing.
    """
    references: list[tuple[_TableReference, Any]] = []
    token = _loaded.set(references)
    try:
        yield
    finally:
        _loaded.reset(token)
    by_checkpoint: dict[str, dict[str, Any]] = {}
    for reference, variable in references:
        by_checkpoint.setdefault(reference.checkpoint, {})[reference.key] = variable.table
    for name, tables in by_checkpoint.items():
        path = f"{_directory(file)}/{name}"
        try:
            read = read_checkpoint(*split_path(path))
        except NotFoundError as error:
            raise NotFoundError(
                f"the rows of {', '.join(sorted(tables))} are not in {os.fspath(file)}, but in a "
                f"directory beside it, and {path} is not there: keep the file and "
                f"{os.path.basename(str(_directory(file)))} together"
            ) from error
        # Optimizers begin with the rows, as with the other weights.
        read.pieces = tuple(
            msgspec.structs.replace(each, slot_initial_values={}) for each in read.pieces
        )
        CheckpointStatus(Checkpoint(tables=tables), read).restore_new()


def save_table(layer: Any, store: Any) -> None:
    """Write to a layer's part of a Keras file where its table is saved.

    Raises:
        FailedPreconditionError: If the format of the file does not support tables.
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
        FailedPreconditionError: If the layer's part of the Keras file has neither.
    """
    variable, references = layer._embeddings, _loaded.get()
    names = list(store.keys())
    if _TABLE in names and references is not None:
        checkpoint, _, key = np.asarray(store[_TABLE]).tobytes().decode().partition("/")
        references.append((_TableReference(checkpoint, key), variable))
    elif names == ["0"]:
        table_of_variable(variable).assign(store["0"], variable.shape[0])
    else:
        raise FailedPreconditionError(
            f"the file has no table and no matrix for the layer {layer.name!r}: load one that "
            "model.save or model.save_weights wrote"
        )


def _directory(file: Any) -> str | None:
    return f"{os.fspath(file)}.tables" if isinstance(file, str | os.PathLike) else None
