"""Rows of tables, pulled: each id once, of many tables in one request to each server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.pooling import pool_rows
from headrace.parameter_server.arrays import refuse_while_tracing
from headrace.parameter_server.asking import Ask
from headrace.parameter_server.current import Cluster
from headrace.parameter_server.dtypes import adding_dtype
from headrace.parameter_server.read_cache import ask_together
from headrace.parameter_server.sums import distinct_ids

__all__ = ["Pulled", "pull"]

Ids = NDArray[np.int64]


class _Table(Protocol):
    name: str
    dim: int
    dtype: np.dtype[Any]

    @property
    def cluster(self) -> Cluster: ...

    def checked_ids(self, ids: Any) -> Ids: ...

    def pulls(self, distinct: Ids, often: Ids | None) -> tuple[list[Ask], list[Ids]]: ...


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
    places: list[list[Ids]] = []
    asks: list[Ask] = []
    for table, wanted in zip(tables, ids, strict=True):
        distinct, inverse = distinct_ids(table.checked_ids(wanted))
        often = None
        if counts:
            often = np.bincount(inverse.reshape(-1), minlength=len(distinct))
            often = often.astype(np.int64, copy=False)
        asked, parts = table.pulls(distinct, often)
        found.append((distinct, inverse))
        places.append(parts)
        asks += asked
    answers = iter(ask_together(tables[0].cluster.servers, asks) if asks else ())
    pulled = []
    for table, (distinct, inverse), parts in zip(tables, found, places, strict=True):
        arrays = [next(answers)[1][0] for _ in parts]
        if len(parts) == 1:
            rows = arrays[0].astype(table.dtype, copy=False)
        else:
            rows = np.empty((len(distinct), table.dim), table.dtype)
            for part, array in zip(parts, arrays, strict=True):
                rows[part] = array
        pulled.append(Pulled(distinct, inverse, rows))
    return pulled
