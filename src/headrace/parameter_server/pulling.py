"""Rows of tables, pulled: each id once, of many tables in one request to each server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.pooling import pool_rows
from headrace.parameter_server.arrays import refuse_while_tracing
from headrace.parameter_server.asking import Answered, Ask
from headrace.parameter_server.connection import Servers
from headrace.parameter_server.current import Cluster
from headrace.parameter_server.dtypes import adding_dtype
from headrace.parameter_server.read_cache import ask_together
from headrace.parameter_server.sums import distinct_ids

__all__ = ["Pulled", "TablePull", "pull"]

Ids = NDArray[np.int64]


class _Table(Protocol):
    name: str
    dim: int
    dtype: np.dtype[Any]

    @property
    def cluster(self) -> Cluster: ...

    def checked_ids(self, ids: Any) -> Ids: ...

    def pulls(
        self, distinct: Ids, often: Ids | None, *, initialize: bool = False
    ) -> tuple[list[Ask], list[Ids]]: ...


class Pulled(NamedTuple):
    """Rows of one table.

    Attributes:
        ids: Rising, and each once.
        inverse: Where each id that was asked for is among them; of the shape of what was asked.
        rows: One for each of `ids`.
    """

    ids: Ids
    inverse: Ids
    rows: NDArray[Any]

    def spread(self) -> NDArray[Any]:
        """Return a row for each id that was asked for, in its place."""
        is_plain = self.inverse.ndim == 1 and len(self.inverse) == len(self.ids)
        if is_plain and np.array_equal(self.inverse, np.arange(len(self.ids))):
            return self.rows
        return self.rows.take(self.inverse, axis=0)

    def pool(self, combiner: str) -> NDArray[Any]:
        """Return a row for each bag of ids, along their last axis (`distribute.pooling`)."""
        return pool_rows(self.rows, self.inverse, combiner, adding_dtype(self.rows.dtype))


class TablePull:
    """A request for rows of one table, to be sent together with other requests.

    Args:
        table: Whose rows.
        ids: Each once.
        often: How often each is looked up; None reads rows and changes nothing.
        initialize: Without `often`, return first values for rows that do not exist, not zeros.

    Attributes:
        asks: What to ask the servers of the table's cluster.
    """

    def __init__(
        self, table: _Table, ids: Ids, often: Ids | None, *, initialize: bool = False
    ) -> None:
        self.asks, self._parts = table.pulls(ids, often, initialize=initialize)
        self._table = table
        self._count = len(ids)

    @property
    def servers(self) -> Servers:
        """The servers to ask."""
        return self._table.cluster.servers

    def rows(self, answers: Sequence[Answered]) -> NDArray[Any]:
        """Return the rows in the order of the ids, from the answers to `asks`."""
        arrays = [arrays[0] for _, arrays in answers]
        if len(arrays) == 1:
            return arrays[0].astype(self._table.dtype, copy=False)
        rows = np.empty((self._count, self._table.dim), self._table.dtype)
        for part, array in zip(self._parts, arrays, strict=True):
            rows[part] = array
        return rows


def pull(tables: Sequence[_Table], ids: Sequence[Any], *, counts: bool) -> list[Pulled]:
    """Pull the rows of ids of several tables; each server is asked once.

    Args:
        tables: All in one cluster.
        ids: For each table, integers of any shape.
        counts: Whether ids are counted, and rows that are due are made: for training.

    Raises:
        FailedPreconditionError: JAX traces the code that reads.
        ValueError: The tables are of several clusters.
    """
    for table in tables:
        refuse_while_tracing(f"EmbeddingTable {table.name!r}")
    if len({id(table.cluster) for table in tables}) > 1:
        raise ValueError("the tables of one look-up must be in one cluster, and are in several")
    found: list[tuple[Ids, Ids]] = []
    pulls: list[TablePull] = []
    for table, wanted in zip(tables, ids, strict=True):
        distinct, inverse = distinct_ids(table.checked_ids(wanted))
        often = None
        if counts:
            often = np.bincount(inverse.reshape(-1), minlength=len(distinct))
            often = often.astype(np.int64, copy=False)
        found.append((distinct, inverse))
        pulls.append(TablePull(table, distinct, often))
    asks = [ask for each in pulls for ask in each.asks]
    answers = iter(ask_together(tables[0].cluster.servers, asks) if asks else ())
    return [
        Pulled(distinct, inverse, each.rows([next(answers) for _ in each.asks]))
        for each, (distinct, inverse) in zip(pulls, found, strict=True)
    ]
