"""Cost of exactly-once delivery, compared with at-most-once delivery.

The same dataset is read through one worker process on the same host, with dynamic sharding, in both
visitations. Exactly once needs element ids, by which undelivered elements of a lost worker are
identified. Rows cost almost nothing themselves. In an interleave, consecutive elements belong to
different splits. A shuffle needs one id per element; its cost is reported without a target.
`exactly_once_bytes` has larger elements.
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

__all__ = ["WORKLOADS", "compare_visitations"]

_ROWS, _FILES, _ROWS_PER_FILE = 1_000_000_000, 1_000, 20_000


def _rows(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.range(_ROWS).map(_parsed)


def _interleave(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.range(_FILES).interleave(
        lambda file: hr.Dataset.range(_ROWS_PER_FILE).map(_parsed),
        cycle_length=4,
    )


def _shuffle(inputs: Path) -> Any:
    return _interleave(inputs).shuffle(2_000, seed=1)


def _parsed(row: Any) -> Any:
    return np.int64(int(row))  # a call for each row


def _check(elements: Elements) -> None:
    found = list(islice(elements, 1000))
    expect(all(isinstance(x, np.int64) for x in found), f"an element is a {type(found[0])}")


def compare_visitations(
    name: str,
    dataset: Callable[[Path], Any],
    check: Check,
    *,
    unit: str = "elements",
    at_least: float | None = 0.90,
    consume: Consume | None = None,
    needs: tuple[str, ...] = ("headrace",),
) -> Workload:
    """Return a workload that compares both visitations for a dataset."""
    visitations = (("headrace", "exactly_once"), ("at most once", "at_most_once"))
    return Workload(
        name=f"exactly once, {name}",
        unit=unit,
        check=check,
        consume=consume,
        reopen=False,
        repeated=True,  # to tell 0.90 from 1
        contenders=tuple(
            Contender(
                name=contender,
                build=local_service(dataset, visitation=visitation),
                needs=needs,
                role="headrace" if contender == "headrace" else "peer",
            )
            for contender, visitation in visitations
        ),
        targets=() if at_least is None else (Target(of=("at most once",), at_least=at_least),),
    )


WORKLOADS = (
    compare_visitations("rows", _rows, _check),
    compare_visitations("interleave", _interleave, _check),
    compare_visitations("shuffle", _shuffle, _check, at_least=None),
)
