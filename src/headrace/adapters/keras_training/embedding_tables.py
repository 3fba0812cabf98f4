"""The table behind an embedding layer: made on the servers of a strategy when it is first needed.

The layer has a variable without a value (`keras_internals.table_variable`), which stands for all
rows. Nothing in this process, and nothing in a worker, has the size of the table.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from headrace.adapters.keras_training.keras_internals import all_layers, table_of_variable
from headrace.errors import FailedPreconditionError
from headrace.parameter_server.table import EmbeddingTable

__all__ = ["ServerTable", "check_optimizer", "table_layers"]

_ROWS_AT_A_TIME = 65_536


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

    def use_in(self, strategy: Any) -> EmbeddingTable:
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
                f"the layer {self._layer!r} keeps its rows on parameter servers and belongs to no "
                "strategy: make it, or its model, in the scope of a ParameterServerStrategy"
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
            f"the layer {self._layer!r} looks up rows on parameter servers, which happens in fit, "
            "evaluate and predict of a model of a ParameterServerStrategy: make the model in "
            "strategy.scope() and call one of these, or read rows with "
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
            ValueError: They are not as many as the layer has.
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
        for start in range(0, rows, _ROWS_AT_A_TIME):
            part = np.asarray(values[start : start + _ROWS_AT_A_TIME])
            table.assign(np.arange(start, start + len(part)), part.astype(table.dtype, copy=False))


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Check that an optimizer of Keras trains the tables of a model.

    Raises:
        FailedPreconditionError: It averages all rows in each step.
    """
    if optimizer.use_ema and (layers := table_layers(model)):
        names = ", ".join(repr(layer.name) for layer in layers.values())
        raise FailedPreconditionError(
            f"the optimizer {optimizer.name!r} has use_ema=True and averages whole weights, and "
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
