"""Look-up of embedding table rows for JAX, whose functions take the rows as arguments.

rows, inverse, push = hr.jax.lookup(table, ids)
loss, gradient = jax.value_and_grad(loss_of)(rows, inverse)     # uses rows[inverse]
push(gradient, optimizer)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_instance, check_int
from headrace.errors import InvalidArgumentError
from headrace.parameter_server.arrays import IndexedSlices, as_array, raise_if_tracing
from headrace.parameter_server.cluster_registry import BackgroundTask
from headrace.parameter_server.optimizer import InBackground, Optimizer, can_write_in_background
from headrace.parameter_server.table import EmbeddingTable, PulledRows, pull

__all__ = ["GradientPush", "lookup", "prefetch"]


class GradientPush:
    """Pushes the gradients of rows that were looked up.

    Args:
        tables: Tables of the rows.
        ids: Ids of the rows of each table, without duplicates.
        counts: Number of rows that the look-up returned for each table, including padding.
        structure: JAX tree structure of the tables.
        optimizer: Default optimizer.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        ids: Sequence[NDArray[np.int64]],
        counts: Sequence[int],
        structure: Any,
        optimizer: Any,
    ) -> None:
        self._tables = tables
        self._ids = ids
        self._counts = counts
        self._structure = structure
        self._optimizer = optimizer

    def gradient_pairs(self, gradients: Any) -> list[tuple[IndexedSlices, EmbeddingTable]]:
        """Return gradients as pairs for `apply_gradients`, to push them together with others.

        A table that occurs several times in the look-up has one pair.

        Raises:
            InvalidArgumentError: If they do not match the rows of the look-up.
        """
        found: dict[int, tuple[EmbeddingTable, list[NDArray[Any]], list[NDArray[np.int64]]]] = {}
        parts = self._structure.flatten_up_to(gradients)
        for table, ids, count, part in zip(
            self._tables, self._ids, self._counts, parts, strict=True
        ):
            values = as_array(part)
            if values.ndim != 2 or len(values) not in (len(ids), count):
                raise InvalidArgumentError(
                    f"the gradient of the rows of EmbeddingTable {table.name!r} must have a row "
                    f"for each of {len(ids)} ids, or for each of the {count} rows of the look-up, "
                    f"but has shape {values.shape}; pass the gradient of `rows`, not of "
                    "`rows[inverse]`"
                )
            _, rows, row_ids = found.setdefault(id(table), (table, [], []))
            rows.append(values[: len(ids)])
            row_ids.append(ids)
        return [
            (IndexedSlices(np.concatenate(rows), np.concatenate(row_ids)), table)
            for table, rows, row_ids in found.values()
        ]

    def __call__(self, gradients: Any, optimizer: Any = None) -> Any:
        """Take one step of an optimizer, with the gradients of `rows`.

        Args:
            gradients: Gradients of all rows, nested like `rows`.
            optimizer: One of `hr.optimizers`; with `hr.optimizers.InBackground` the call returns at
                once. None uses the optimizer of the look-up.

        Raises:
            ValueError: If neither this call nor the look-up has an optimizer.
        """
        chosen = self._optimizer if optimizer is None else optimizer
        if chosen is None:
            raise ValueError(
                "`optimizer` is missing: pass one of hr.optimizers to push(gradients, optimizer) "
                "or to lookup(table, ids, optimizer)"
            )
        if not isinstance(chosen, Optimizer | InBackground):
            raise TypeError(
                f"`optimizer` must be one of hr.optimizers, but got a {type(chosen).__name__}"
            )
        return chosen.apply_gradients(self.gradient_pairs(gradients))


class PendingLookup:
    """Result of `prefetch`: rows that are being pulled."""

    def __init__(self, finish: Callable[[], tuple[Any, Any, GradientPush]]) -> None:
        self._finish = finish

    def result(self) -> tuple[Any, Any, GradientPush]:
        """Wait if necessary, and return what `lookup` returns."""
        return self._finish()


def lookup(
    table: Any,
    ids: Any,
    optimizer: Any = None,
    *,
    size: int | None = None,
    training: bool = True,
) -> tuple[Any, Any, GradientPush]:
    """Pull the rows of ids from one table, or from several in one call.

    Not allowed in functions that JAX traces (`jax.jit` and similar): call it outside, and pass the
    rows.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         table = hr.EmbeddingTable(4, name="words", initializer="zeros")
    ...     rows, inverse, push = hr.jax.lookup(table, np.array([7, 9, 7]))
    ...     strategy.close()
    >>> rows[inverse].shape
    (3, 4)

    Args:
        table: An `hr.EmbeddingTable`, or several in a list, tuple or dict.
        ids: Integers of any shape; for several tables, nested like the tables.
        optimizer: Default optimizer of `push`.
        size: Minimum number of rows in `rows`; zeros are appended, so that compiled functions see
            one shape. None returns one row for each distinct id.
        training: Whether ids are counted, and new ids get rows.

    Returns:
        `rows`, one for each distinct id; `inverse`, of the shape of `ids`, so that `rows[inverse]`
        has a row for each id; and `push(gradients_of_rows, optimizer)`. For several tables the
        first two are nested like the tables.

    Raises:
        FailedPreconditionError: If JAX is tracing.
    """
    return _prepare_lookup(table, ids, optimizer, size, training)()()


def prefetch(
    table: Any,
    ids: Any,
    optimizer: Any = None,
    *,
    size: int | None = None,
    training: bool = True,
) -> PendingLookup:
    """Start pulling embedding rows; for batches see `device_iterator(prefetch=)`.

    `result()` of the returned object waits, and returns what `lookup` does for a later step. The
    rows include the updates of all steps that began before this call (also with `InBackground`)
    and not of steps that begin later. See `lookup` for the arguments.

    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         table = hr.EmbeddingTable(4, name="words", initializer="zeros")
    ...     coming = hr.jax.prefetch(table, np.array([7, 9, 7]))  # while a step is computed
    ...     rows, inverse, push = coming.result()
    ...     strategy.close()
    >>> rows[inverse].shape
    (3, 4)
    """
    work = _prepare_lookup(table, ids, optimizer, size, training)
    tables = jax.tree.leaves(table)
    if not tables or not can_write_in_background():
        return PendingLookup(lambda: work()())
    task: BackgroundTask[Callable[[], tuple[Any, Any, GradientPush]]] = tables[
        0
    ].cluster.background.submit(work)
    return PendingLookup(lambda: task.result()())


def _prepare_lookup(
    table: Any, ids: Any, optimizer: Any, size: int | None, training: bool
) -> Callable[[], Callable[[], tuple[Any, Any, GradientPush]]]:
    """Check the arguments; return a function that pulls, and returns one that makes JAX arrays."""
    if size is not None:
        check_int("size", size, minimum=0)
    tables, structure = jax.tree.flatten(table)
    for each in tables:
        check_instance("table", each, EmbeddingTable)
        raise_if_tracing(f"EmbeddingTable {each.name!r}")
    ids_to_pull = [
        each.check_ids(part)
        for each, part in zip(tables, structure.flatten_up_to(ids), strict=True)
    ]

    def work() -> Callable[[], tuple[Any, Any, GradientPush]]:
        pulled = pull(tables, ids_to_pull, counts=training) if tables else []
        return functools.partial(_make_arrays, tables, pulled, structure, optimizer, size)

    return work


def _make_arrays(
    tables: Sequence[EmbeddingTable],
    pulled: Sequence[PulledRows],
    structure: Any,
    optimizer: Any,
    size: int | None,
) -> tuple[Any, Any, GradientPush]:
    padded = [_pad_rows(each.rows, size) for each in pulled]
    rows = structure.unflatten([jnp.asarray(each) for each in padded])
    inverse = structure.unflatten([jnp.asarray(each.inverse.astype(np.int32)) for each in pulled])
    ids, counts = [each.ids for each in pulled], [len(each) for each in padded]
    return rows, inverse, GradientPush(tables, ids, counts, structure, optimizer)


def _pad_rows(rows: NDArray[Any], size: int | None) -> NDArray[Any]:
    if size is None or len(rows) >= size:
        return rows
    whole = np.zeros((size, rows.shape[1]), rows.dtype)
    whole[: len(rows)] = rows
    return whole
