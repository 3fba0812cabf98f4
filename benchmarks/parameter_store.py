"""Overhead of a parameter server's store over its arithmetic.

Operations are passed to a store in this process, without a network. Rows have 32 floats (4 in the
largest table), and a step updates 16,384 rows.
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
_DENSE = 16 << 20
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


# --- sparse Adam ---------------------------------------------------------------------------------


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


def _sparse_adam(_: Path, __: ExitStack) -> Pipeline:
    from headrace.parameter_server import operations as ops
    from headrace.parameter_server import specs

    store, gradient, numbers = _store_of(np.zeros((_ROWS, _DIM), np.float32)), _gradient(), count()

    def step(rows: NDArray[np.int64]) -> Any:
        store.execute(
            ops.Apply(
                shard="v", optimizer="Adam", rule=specs.AdamRule(),
                step=specs.StepParameters(iteration=next(numbers), learning_rate=0.01),
            ),
            [rows, gradient],
        )  # fmt: skip
        return store.shards["v"].value[rows[0], 0]

    return _steps(_batches(np.arange(_ROWS)), step)


def _torch_sparse_adam(_: Path, __: ExitStack) -> Pipeline:
    import torch

    variable = torch.nn.Parameter(torch.zeros(_ROWS, _DIM))
    optimizer = torch.optim.SparseAdam([variable], lr=0.01, eps=1e-7)
    gradient = torch.from_numpy(_gradient())

    def step(rows: NDArray[np.int64]) -> Any:
        variable.grad = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None], gradient, variable.shape, is_coalesced=True
        )
        optimizer.step()
        return variable[rows[0], 0].item()

    return _steps(_batches(np.arange(_ROWS)), step)


def _check_adam(elements: Elements) -> None:
    # The first step of Adam equals the learning rate.
    expect(abs(float(next(elements)) + 0.01) < 1e-5, "the first step is not one learning rate")


# --- a dense step, and a gather ------------------------------------------------------------------


def _dense_sgd(_: Path, __: ExitStack) -> Pipeline:
    from headrace.parameter_server import operations as ops
    from headrace.parameter_server import specs

    store, gradient = _store_of(np.zeros(_DENSE, np.float32)), np.ones(_DENSE, np.float32)
    sgd = ops.Apply(
        shard="v", optimizer="SGD", rule=specs.SgdRule(),
        step=specs.StepParameters(iteration=0, learning_rate=0.01),
    )  # fmt: skip

    def results() -> Iterator[Any]:
        while True:
            store.execute(sgd, [gradient])
            yield store.shards["v"].value[-1]

    return results


def _blocked_sgd(_: Path, __: ExitStack) -> Pipeline:
    value, gradient = np.zeros(_DENSE, np.float32), np.ones(_DENSE, np.float32)
    block = 32_768
    change = np.empty(block, np.float32)

    def results() -> Iterator[Any]:
        while True:
            for start in range(0, _DENSE, block):
                np.multiply(gradient[start : start + block], 0.01, out=change)
                value[start : start + block] -= change
            yield value[-1]

    return results


def _check_sgd(elements: Elements) -> None:
    expect(abs(float(next(elements)) + 0.01) < 1e-6, "the first step is not one learning rate")


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
        name="store, sparse Adam",
        unit="rows",
        check=_check_adam,
        consume=_rows,
        contenders=(
            Contender(name="headrace", build=_sparse_adam, needs=("headrace",), role="headrace"),
            Contender(name="torch SparseAdam", build=_torch_sparse_adam, needs=("torch",)),
        ),
        targets=(Target(of=("torch SparseAdam",), at_least=0.8),),
    ),
    Workload(
        name="store, dense SGD of 64 MB",
        unit="elements",
        check=_check_sgd,
        consume=lambda _: _DENSE,
        contenders=(
            Contender(name="headrace", build=_dense_sgd, needs=("headrace",), role="headrace"),
            Contender(name="blocked NumPy", build=_blocked_sgd, role="limit"),
        ),
        targets=(Target(of=("blocked NumPy",), at_least=0.8),),
    ),
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
