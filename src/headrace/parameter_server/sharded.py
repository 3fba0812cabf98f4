"""The shards of one variable: what of an operation on all of it each of them is asked.

Everything here takes arrays of the right shape and dtype; what users may pass, `variable` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.parameter_server.asking import Answered, Ask
from headrace.parameter_server.connection import Servers
from headrace.parameter_server.creation import PlacedShard, VariableRecord
from headrace.parameter_server.dtypes import dtype_named
from headrace.parameter_server.operations import (
    Apply,
    Assign,
    Gather,
    OptimizerRule,
    Read,
    Scatter,
    Step,
)
from headrace.parameter_server.origin import next_key
from headrace.parameter_server.pushing import Gradient
from headrace.parameter_server.read_cache import ask_together
from headrace.parameter_server.sums import Batch, split_by_rows

__all__ = ["Sharded", "add_together"]

Rows = NDArray[np.int64]


class Sharded:
    """The shards of a variable, and the servers that have them.

    Args:
        servers: Those of the cluster.
        record: Of the variable.
    """

    def __init__(self, servers: Servers, record: VariableRecord) -> None:
        self.servers = servers
        self._row_shape = record.shape[1:]
        self._dtype = dtype_named(record.dtype)
        #: In which rows are sent: half of an int64, for most variables.
        self._row_dtype = np.min_scalar_type(max(record.shape[:1], default=0))
        self._shards: Sequence[PlacedShard] = record.shards
        self._ranges = [range(each.rows.start, each.rows.stop) for each in record.shards]

    @property
    def is_whole(self) -> bool:
        """Whether there is one shard alone."""
        return len(self._shards) == 1

    def read(self) -> NDArray[Any]:
        """Return the value."""
        return self.joined(self.servers.ask_all(self.reads()))

    def read_slot(self, name: str) -> NDArray[Any]:
        """Return a slot, by "optimizer/name"."""
        asks = [Ask(each.server, Read(each.spec.name, name)) for each in self._shards]
        return self.joined(self.servers.ask_all(asks))

    def reads(self) -> list[Ask]:
        """Return what asks for the value."""
        return [Ask(each.server, Read(each.spec.name)) for each in self._shards]

    def joined(self, answers: Sequence[Answered]) -> NDArray[Any]:
        """Return the value; in one copy where it has several parts, and in none else."""
        parts = [arrays[0] for _, arrays in answers]
        return parts[0] if self.is_whole else np.concatenate(parts)

    def rows(self, batch: Batch, combiner: str | None = None) -> NDArray[Any]:
        """Return the rows of a batch, or of each of its bags one."""
        asks = self.row_reads(batch.distinct)
        answers = ask_together(self.servers, asks) if asks else []
        parts = [arrays[0] for _, arrays in answers]
        if combiner is None:
            return batch.spread(parts, self._row_shape, self._dtype)
        return batch.pool(parts, self._row_shape, self._dtype, combiner)

    def row_reads(self, rows: Rows) -> list[Ask]:
        """Return what asks for rows, which rise and of which each is there once."""
        sent = rows.astype(self._row_dtype)
        return [
            Ask(shard.server, Gather(shard.spec.name), [sent[part]])
            for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True)
            if part.stop > part.start
        ]

    def joined_rows(self, answers: Sequence[Answered]) -> NDArray[Any]:
        """Return the rows that `row_reads` asked for."""
        parts = [arrays[0] for _, arrays in answers]
        if not parts:
            return np.empty((0, *self._row_shape), self._dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def assign(self, how: str, value: NDArray[Any], slot: str = "", first: float = 0.0) -> None:
        """Change the whole value; or set a slot, which begins with `first`."""
        self.servers.ask_all(self.assigns(how, value, slot, first))

    def assigns(
        self, how: str, value: NDArray[Any], slot: str = "", first: float = 0.0
    ) -> list[Ask]:
        """Return what asks for a change of the whole value, or of a slot."""
        return [
            Ask(
                shard.server,
                Assign(shard.spec.name, how, next_key(shard.spec.name), slot, first),
                [value if self.is_whole else value[shard.rows]],
            )
            for shard in self._shards
        ]

    def scatter(self, how: str, rows: Rows, values: NDArray[Any]) -> None:
        """Change rows, in any order; one that is named twice is changed twice."""
        parts = [slice(0, len(rows))]
        if not self.is_whole:  # stable: of a row that is named twice the last stays the last
            order = np.argsort(rows, kind="stable")
            rows, values = rows[order], values[order]
            parts = split_by_rows(rows, self._ranges)
        asks = []
        for shard, part in zip(self._shards, parts, strict=True):
            if part.stop > part.start:
                operation = Scatter(shard.spec.name, how, next_key(shard.spec.name))
                asks.append(Ask(shard.server, operation, [rows[part], values[part]]))
        self.servers.ask_all(asks)

    def pushes(
        self, optimizer: str, rule: OptimizerRule, step: Step, gradient: Gradient
    ) -> list[Ask]:
        """Return what one step of an optimizer asks of which server."""
        rows, values, _ = gradient
        asks = []
        if rows is None:
            for shard in self._shards:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                asks.append(
                    Ask(shard.server, operation, [values if self.is_whole else values[shard.rows]])
                )
            return asks
        for shard, part in zip(self._shards, split_by_rows(rows, self._ranges), strict=True):
            if part.stop > part.start:
                name = shard.spec.name
                operation = Apply(name, optimizer, rule, step, next_key(name))
                sent = gradient.arrays(part)
                sent[0] = sent[0].astype(self._row_dtype)
                asks.append(Ask(shard.server, operation, sent))
        return asks


def add_together(pairs: Sequence[tuple[Any, NDArray[Any]]]) -> None:
    """Add to several variables, for which each of their servers is asked once.

    Args:
        pairs: A variable on parameter servers of one cluster, and what is added, of its shape and
            dtype.
    """
    wholes: list[tuple[Sharded, NDArray[Any]]] = [(each.sharded, value) for each, value in pairs]
    asks = [ask for whole, value in wholes for ask in whole.assigns("add", value)]
    if asks:
        wholes[0][0].servers.ask_all(asks)
