"""Cost of reading a large variable from a parameter server and of pushing a step to it.

One server, a process of this machine, holds 64 MB of float32 for one client. A read is compared
with one copy of the same size; a push, with a copy and the same arithmetic in place, in blocks. The
last workload is a sparse step of Adam on 16,384 rows of a table of a million on two servers,
compared with torch.optim.SparseAdam, which has the table in its own process.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

_ELEMENTS, _BLOCK, _RATE = 16 << 20, 32_768, 0.01
_ROWS, _DIM, _STEP_ROWS, _BATCHES = 1_000_000, 32, 16_384, 12


def _strategy(stack: ExitStack, servers: int) -> Any:
    import headrace as hr

    cluster = stack.enter_context(hr.distribute.LocalCluster(1, servers))
    strategy = hr.distribute.ParameterServerStrategy(
        cluster.cluster_resolver, hr.distribute.partitioners.FixedShardsPartitioner(servers)
    )
    stack.callback(strategy.close)
    return strategy


def _repeat(step: Any) -> Pipeline:
    def results() -> Iterator[Any]:
        while True:
            yield step()

    return results


# --- dense ---------------------------------------------------------------------------------------


def _variable(stack: ExitStack) -> Any:
    import headrace as hr

    with _strategy(stack, servers=1).scope():
        return hr.Variable(np.zeros(_ELEMENTS, np.float32), name="v")


def _pull(_: Path, stack: ExitStack) -> Pipeline:
    return _repeat(_variable(stack).read)


def _copy(_: Path, __: ExitStack) -> Pipeline:
    # Filled explicitly: untouched zeros would all map to one cached page.
    value, copy = np.full(_ELEMENTS, 0, np.float32), np.ones(_ELEMENTS, np.float32)

    def step() -> NDArray[np.float32]:
        np.copyto(copy, value)
        return copy

    return _repeat(step)


def _check_pull(elements: Elements) -> None:
    for value in islice(elements, 2):
        expect(
            value.shape == (_ELEMENTS,) and not value[::4096].any(),
            "a value differs from zero, or has another shape",
        )


def _push(_: Path, stack: ExitStack) -> Pipeline:
    import headrace as hr

    variable, sgd = _variable(stack), hr.optimizers.SGD(_RATE, non_finite="apply")
    gradient = np.ones(_ELEMENTS, np.float32)
    return _repeat(lambda: sgd.apply_gradients([(gradient, variable)]))


def _copy_and_step(_: Path, __: ExitStack) -> Pipeline:
    value, gradient = np.zeros(_ELEMENTS, np.float32), np.ones(_ELEMENTS, np.float32)
    copy, change = np.empty_like(gradient), np.empty(_BLOCK, np.float32)
    steps = iter(range(1, 1 << 62))

    def step() -> int:
        np.copyto(copy, gradient)
        for start in range(0, _ELEMENTS, _BLOCK):
            np.multiply(copy[start : start + _BLOCK], _RATE, out=change)
            value[start : start + _BLOCK] -= change
        return next(steps)

    return _repeat(step)


def _check_push(elements: Elements) -> None:
    expect(list(islice(elements, 3)) == [1, 2, 3], "steps are not numbered 1, 2, 3")


# --- sparse --------------------------------------------------------------------------------------


def _batches() -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.choice(_ROWS, _STEP_ROWS, replace=False) for _ in range(_BATCHES)]


def _sparse_adam(_: Path, stack: ExitStack) -> Pipeline:
    import headrace as hr

    with _strategy(stack, servers=2).scope():
        zeros = hr.initializers.Zeros()
        table: Any = hr.Variable(zeros, shape=(_ROWS, _DIM), dtype="float32", name="table")
        adam = hr.optimizers.Adam(_RATE)
    gradient = np.full((_STEP_ROWS, _DIM), 0.5, np.float32)

    def results() -> Iterator[Any]:
        while True:
            for rows in _batches():
                adam.apply_gradients([(hr.IndexedSlices(gradient, rows), table)])
                yield table.gather(rows[:1])[0, 0]

    return results


def _torch_sparse_adam(_: Path, __: ExitStack) -> Pipeline:
    import torch

    table = torch.nn.Parameter(torch.zeros(_ROWS, _DIM))
    adam = torch.optim.SparseAdam([table], lr=_RATE, eps=1e-7)
    gradient = torch.full((_STEP_ROWS, _DIM), 0.5)

    def results() -> Iterator[Any]:
        while True:
            for rows in _batches():
                # Not coalesced: torch has to sum duplicate ids itself, as the server does.
                table.grad = torch.sparse_coo_tensor(
                    torch.from_numpy(rows)[None], gradient, table.shape
                )
                adam.step()
                yield table[rows[0], 0].item()

    return results


def _check_adam(elements: Elements) -> None:
    # The first step of Adam equals the learning rate.
    expect(abs(float(next(elements)) + _RATE) < 1e-5, "the first step is not one learning rate")


def _dense(name: str, check: Any, build: Any, limit: str, build_limit: Any) -> Workload:
    return Workload(
        name=name,
        unit="bytes",
        item_bytes=1,
        check=check,
        consume=lambda _: 4 * _ELEMENTS,
        contenders=(
            Contender(name="headrace", build=build, needs=("headrace",), role="headrace"),
            # A peer, not a limit: Headrace makes a large copy with two threads.
            Contender(name=limit, build=build_limit),
        ),
        targets=(Target(of=(limit,), at_least=0.8),),
        reopen=False,
    )


WORKLOADS = (
    _dense("64 MB pulled", _check_pull, _pull, "one copy", _copy),
    _dense("64 MB pushed, SGD", _check_push, _push, "one copy and blocked SGD", _copy_and_step),
    Workload(
        name="sparse Adam on two servers",
        unit="rows",
        check=_check_adam,
        consume=lambda _: _STEP_ROWS,
        contenders=(
            Contender(name="headrace", build=_sparse_adam, needs=("headrace",), role="headrace"),
            Contender(name="torch SparseAdam", build=_torch_sparse_adam, needs=("torch",)),
        ),
        targets=(Target(of=("torch SparseAdam",), at_least=0.4),),
        reopen=False,
    ),
)
