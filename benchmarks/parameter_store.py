"""Overhead of a parameter server's store over its arithmetic.

Operations are passed to a store in this process, without a network. Rows have 32 floats, and a
step updates 16,384 rows. `dense_variable` measures steps through servers.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

_ROWS, _DIM, _STEP_ROWS, _BATCHES = 1_000_000, 32, 16_384, 12
_FEW_IDS, _MANY_IDS = 100_000, 3_000_000

Build = Callable[[Path, ExitStack], Pipeline]
Step = Callable[[NDArray[np.int64]], Any]


def _batches(ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [np.sort(rng.choice(ids, _STEP_ROWS, replace=False)) for _ in range(_BATCHES)]


def _steps(batches: list[NDArray[np.int64]], step: Step) -> Pipeline:
    """Return a pipeline that performs a step per batch, repeatedly, and yields its result."""

    def results() -> Iterator[Any]:
        for batch in cycle(batches):
            yield step(batch)

    return results


def _gradient() -> NDArray[np.float32]:
    return np.full((_STEP_ROWS, _DIM), 0.5, np.float32)


# --- gather --------------------------------------------------------------------------------------


def _store_of(value: NDArray[Any]) -> Any:
    from headrace.parameter_server.operations import Create
    from headrace.parameter_server.specs import ShardSpec
    from headrace.parameter_server.store import ShardStore

    store = ShardStore()
    spec = ShardSpec(
        name="v", variable="v", shape=value.shape, dtype="float32", variable_shape=value.shape
    )
    store.execute(Create(shard=spec), [value])
    return store


def _gather(_: Path, __: ExitStack) -> Pipeline:
    from headrace.parameter_server.operations import GatherRows

    value = np.arange(_ROWS * _DIM, dtype=np.float32).reshape(_ROWS, _DIM)
    store = _store_of(value)
    gather = GatherRows(shard="v")
    return _steps(_batches(np.arange(_ROWS)), lambda rows: store.execute(gather, [rows])[1][0])


def _take(_: Path, __: ExitStack) -> Pipeline:
    value = np.arange(_ROWS * _DIM, dtype=np.float32).reshape(_ROWS, _DIM)

    def step(rows: NDArray[np.int64]) -> Any:
        out = np.empty((len(rows), _DIM), np.float32)
        return np.take(value, rows, axis=0, out=out, mode="clip")

    return _steps(_batches(np.arange(_ROWS)), step)


def _check_gather(elements: Elements) -> None:
    for rows, found in zip(_batches(np.arange(_ROWS)), islice(elements, 3), strict=False):
        expect(bool((found[:, 0] == np.float32(rows * _DIM)).all()), "wrong rows")


# --- rows of a table -----------------------------------------------------------------------------


def _table(rows: int) -> Build:
    def build(_: Path, __: ExitStack) -> Pipeline:
        from headrace.parameter_server import operations as ops
        from headrace.parameter_server import specs
        from headrace.parameter_server.store import ShardStore

        store, gradient, numbers = ShardStore(), _gradient(), count()
        store.execute(ops.CreateTable(table=specs.TableSpec(name="t", table="t", dim=_DIM)))
        rng = np.random.default_rng(1)
        ids = np.unique(rng.integers(-(2**63), 2**63 - 1, rows))
        mixed = rng.permutation(ids)
        for start in range(0, rows, _STEP_ROWS):
            store.execute(ops.LookupIds(table="t"), [np.sort(mixed[start : start + _STEP_ROWS])])

        def step(batch: NDArray[np.int64]) -> Any:
            _, (found,) = store.execute(ops.LookupIds(table="t"), [batch])
            store.execute(
                ops.ApplyIds(
                    table="t", optimizer="Adam", rule=specs.AdamRule(),
                    step=specs.StepParameters(iteration=next(numbers), learning_rate=0.01),
                ),
                [batch, gradient],
            )  # fmt: skip
            return found

        return _steps(_batches(ids), step)

    return build


def _check_table(elements: Elements) -> None:
    for found in islice(elements, 3):
        expect(bool((np.abs(found) < 0.2).all() and found.any(axis=1).all()), "rows are missing")


def _rows(_: Any) -> int:
    return _STEP_ROWS


WORKLOADS = (
    Workload(
        name="store, gather",
        unit="rows",
        check=_check_gather,
        consume=_rows,
        contenders=(
            Contender(name="headrace", build=_gather, needs=("headrace",), role="headrace"),
            Contender(name="np.take", build=_take, role="limit"),
        ),
        targets=(Target(of=("np.take",), at_least=0.8),),
    ),
    Workload(
        name="store, a table of 3 million ids",
        unit="rows",
        check=_check_table,
        consume=_rows,
        contenders=(
            Contender(
                name="headrace", build=_table(_MANY_IDS), needs=("headrace",), role="headrace"
            ),
            Contender(name="headrace, 100,000 ids", build=_table(_FEW_IDS), needs=("headrace",)),
        ),
        targets=(Target(of=("headrace, 100,000 ids",), at_least=1 / 3),),
    ),
)
