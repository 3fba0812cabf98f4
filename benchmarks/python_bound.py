"""Do two worker processes do twice as much where the work is Python's?

A function that holds the interpreter's lock for about half a millisecond: threads would not help,
a second process on a core of its own does. Elements are small, so that reading them costs little.
The same loop in two bare processes and in one says what the machine has to give.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.local_service import local_service
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

_ELEMENTS, _STEPS = 1_000_000_000, 10_000


def _worked(number: Any) -> Any:
    total = int(number)
    for step in range(_STEPS):
        total ^= step
    return np.int64(total)


def _dataset(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.range(_ELEMENTS).map(_worked)


def _bare(processes: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        command = [sys.executable, "-m", "benchmarks.python_bound"]
        pipes = []
        for _number in range(processes):
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            pipes.append(stack.enter_context(process.stdout))
        waiting: deque[int] = deque()

        def results() -> Iterator[int]:
            while True:
                while not waiting:
                    for pipe in select.select(pipes, [], [])[0]:
                        # A byte for each element that is done.
                        waiting.extend(os.read(pipe.fileno(), 1024))
                yield waiting.popleft()

        return results

    return build


def _check(elements: Elements) -> None:
    found = [int(element) for element in islice(elements, 200)]
    expect(len(set(found)) == 200, "an element came twice")


def _check_bare(elements: Elements) -> None:
    expect(len(list(islice(elements, 20))) == 20, "the loop ended")


def _work_for_ever() -> None:
    for number in count():
        _worked(number)
        os.write(1, b".")


WORKLOADS = (
    Workload(
        name="service, a Python-bound function",
        unit="elements",
        check=_check,
        reopen=False,
        stretch=0.6,
        contenders=(
            Contender(
                name="headrace",
                build=local_service(_dataset, workers=2),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, 1 worker", build=local_service(_dataset), needs=("headrace",)
            ),
            Contender(name="2 bare processes", build=_bare(2), check=_check_bare),
            Contender(name="1 bare process", build=_bare(1), check=_check_bare),
        ),
        targets=(Target(of=("headrace, 1 worker",), at_least=1.8),),
    ),
)

if __name__ == "__main__":
    _work_for_ever()
