"""What does it cost that each element comes exactly once, whichever worker dies?

The same dataset through one worker process on the same host, dealt by the dispatcher, in both
visitations: with origins, by which what is missing is known, and without. Rows cost next to nothing
themselves, one by one or in batches; in an interleave of single elements each is of another unit
than the one before, in one of blocks every sixteenth; and what a shuffle mixes is told element by
element, which is reported and has no target. Larger elements are in `exactly_once_bytes`.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.local_service import local_service
from benchmarks.workload import Check, Consume, Contender, Elements, Target, Workload, expect

__all__ = ["WORKLOADS", "in_both_visitations"]

_ROWS, _FILES, _ROWS_A_FILE = 1_000_000_000, 1_000, 20_000
_BATCH = 256


def _rows(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.range(_ROWS).map(_parsed)


def _batches(inputs: Path) -> Any:
    return _rows(inputs).batch(_BATCH)


def _interleave(_: Path, block_length: int = 1) -> Any:
    import headrace as hr

    return hr.Dataset.range(_FILES).interleave(
        lambda file: hr.Dataset.range(_ROWS_A_FILE).map(_parsed),
        cycle_length=4,
        block_length=block_length,
    )


def _blocks(inputs: Path) -> Any:
    return _interleave(inputs, block_length=16)


def _shuffle(inputs: Path) -> Any:
    return _interleave(inputs).shuffle(2_000, seed=1)


def _parsed(row: Any) -> Any:
    return np.int64(int(row))  # a call for each


def _check(elements: Elements) -> None:
    found = list(islice(elements, 1000))
    expect(all(isinstance(x, np.int64) for x in found), f"an element is a {type(found[0])}")


def _check_batches(batches: Elements) -> None:
    for batch in islice(batches, 10):
        expect(batch.shape == (_BATCH,), f"a batch is {batch.shape}")


def in_both_visitations(
    name: str,
    dataset: Callable[[Path], Any],
    check: Check,
    *,
    unit: str = "elements",
    at_least: float | None = 0.90,
    consume: Consume | None = None,
    needs: tuple[str, ...] = ("headrace",),
) -> Workload:
    """Return the workload that compares exactly once with at most once for a dataset."""
    both = (("headrace", "exactly_once"), ("at most once", "at_most_once"))
    return Workload(
        name=f"exactly once, {name}",
        unit=unit,
        check=check,
        consume=consume,
        reopen=False,
        stretch=0.4,
        times_rounds=4,  # 0.90 or 1
        renew_after=2,
        contenders=tuple(
            Contender(
                name=contender,
                build=local_service(dataset, visitation=visitation),
                needs=needs,
                role="headrace" if contender == "headrace" else "peer",
            )
            for contender, visitation in both
        ),
        targets=() if at_least is None else (Target(of=("at most once",), at_least=at_least),),
    )


WORKLOADS = (
    in_both_visitations("rows", _rows, _check),
    in_both_visitations("batches of rows", _batches, _check_batches, unit="rows", consume=len),
    in_both_visitations("interleave", _interleave, _check),
    in_both_visitations("interleave by blocks", _blocks, _check),
    in_both_visitations("shuffle of values", _shuffle, _check, at_least=None),
)
