"""What does it cost that each element comes exactly once, whichever worker dies?

The same dataset through one worker process on the same host, dealt by the dispatcher, in both
visitations: with origins, by which what is missing is known, and without. Rows cost next to nothing
themselves; in an interleave of single elements each is of another unit than the one before; and
what a shuffle mixes is told element by element.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

_ROWS, _FILES, _ROWS_A_FILE = 1_000_000_000, 1_000, 20_000


def _rows() -> Any:
    import headrace as hr

    return hr.Dataset.range(_ROWS).map(_parsed)


def _interleave() -> Any:
    import headrace as hr

    return hr.Dataset.range(_FILES).interleave(
        lambda file: hr.Dataset.range(_ROWS_A_FILE).map(_parsed), cycle_length=4
    )


def _shuffle() -> Any:
    return _interleave().shuffle(2_000, seed=1)


def _parsed(row: Any) -> Any:
    return np.int64(int(row))  # a call for each


def _check(elements: Elements) -> None:
    found = list(islice(elements, 1000))
    expect(all(isinstance(x, np.int64) for x in found), f"an element is a {type(found[0])}")


def _remote(dataset: Callable[[], Any], visitation: str) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=1, processes=True))
        remote = dataset().apply(
            hr.service.distribute(
                processing_mode=hr.service.ShardingPolicy.DYNAMIC,
                service=cluster.target,
                visitation=visitation,
            )
        )
        return lambda: iter(remote)

    return build


def _workload(name: str, dataset: Callable[[], Any], at_least: float) -> Workload:
    return Workload(
        name=f"exactly once, {name}",
        unit="elements",
        check=_check,
        reopen=False,
        contenders=(
            Contender(
                name="headrace",
                build=_remote(dataset, "exactly_once"),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="at most once", build=_remote(dataset, "at_most_once"), needs=("headrace",)
            ),
        ),
        targets=(Target(of=("at most once",), at_least=at_least),),
    )


WORKLOADS = (
    _workload("rows", _rows, 0.97),
    _workload("interleave", _interleave, 0.9),
    _workload("shuffle of values", _shuffle, 0.8),
)
