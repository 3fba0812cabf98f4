"""AUTOTUNE of a parallel map and its prefetch, compared with fixed settings.

Four functions of about a millisecond: one waits, one runs Python code and holds the interpreter
lock, one sorts in NumPy, which releases it, and one does these by turns. Each round opens the
dataset again, so AUTOTUNE has only the warm-up of a round to choose.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

_ELEMENTS = 1_000_000_000
_THREADS, _PREFETCH = (1, 2, 8), 16
_VALUES = np.random.default_rng(0).random(30_000)


def _wait(number: Any) -> Any:
    time.sleep(0.002)
    return number


def _run_python(number: Any) -> Any:
    total = int(number)
    for step in range(15_000):
        total ^= step & 1
    return number


def _sort(number: Any) -> Any:
    np.sort(_VALUES)
    return number


def _mix(number: Any) -> Any:
    return (_wait, _run_python, _sort)[int(number) % 3](number)


def _headrace(
    function: Callable[[Any], Any], threads: int | None
) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        calls = hr.AUTOTUNE if threads is None else threads
        size = hr.AUTOTUNE if threads is None else _PREFETCH
        dataset = hr.Dataset.range(_ELEMENTS).map(function, calls).prefetch(size)
        return lambda: iter(dataset)

    return build


def _check(elements: Elements) -> None:
    found = [int(number) for number in islice(elements, 200)]
    expect(found == list(range(200)), f"the elements are {found[:10]}...")


def _workload(name: str, function: Callable[[Any], Any], *targets: Target) -> Workload:
    fixed = {f"{count} threads, prefetch({_PREFETCH})": count for count in _THREADS}
    return Workload(
        name=f"AUTOTUNE, {name}",
        unit="elements",
        check=_check,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(function, None),
                needs=("headrace",),
                role="headrace",
            ),
            *(
                Contender(name=n, build=_headrace(function, threads), needs=("headrace",))
                for n, threads in fixed.items()
            ),
        ),
        targets=(Target(of=tuple(fixed), at_least=0.9, of_best_median=True), *targets),
    )


WORKLOADS = (
    _workload("waits", _wait),
    _workload("Python", _run_python),
    _workload("NumPy", _sort),
    _workload("by turns", _mix),
)
