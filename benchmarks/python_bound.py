"""Scaling of a Python-bound function from one worker process to two, and `in_processes`.

The function holds the interpreter lock for about half a millisecond: more threads do not help, a
second process on another core does. Elements are small and cheap to read. The same loop in one and
in two plain processes shows how far the machine itself scales.
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
_BATCH = 32


def _compute(number: Any) -> Any:
    total = int(number)
    for step in range(_STEPS):
        total ^= step
    return np.int64(total)


def _dataset(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.range(_ELEMENTS).map(_compute)


def _in_processes(processes: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(inputs: Path, _: ExitStack) -> Pipeline:
        dataset = _dataset(inputs).batch(_BATCH)
        pooled = dataset.in_processes(processes) if processes else dataset
        return lambda: iter(pooled)

    return build


def _torch(processes: int) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset[Any]):
            def __len__(self) -> int:
                return _ELEMENTS // 1000  # a sampler of more takes long to start

            def __getitem__(self, index: int) -> Any:
                return _compute(index)

        def collate(values: list[Any]) -> torch.Tensor:
            return torch.as_tensor(values)

        loader = DataLoader(Numbers(), batch_size=_BATCH, num_workers=processes, collate_fn=collate)
        return lambda: iter(loader)

    return build


def _plain_processes(processes: int) -> Callable[[Path, ExitStack], Pipeline]:
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
                        # One byte per completed element.
                        waiting.extend(os.read(pipe.fileno(), 1024))
                yield waiting.popleft()

        return results

    return build


def _check(elements: Elements) -> None:
    found = [int(element) for element in islice(elements, 200)]
    expect(len(set(found)) == 200, "an element is duplicated")


def _check_batches(elements: Elements) -> None:
    batches = list(islice(elements, 10))
    expected = [int(_compute(number)) for number in range(10 * _BATCH)]
    found = [int(element) for batch in batches for element in batch]
    expect(found == expected, "the elements differ from those of one process")


def _check_plain(elements: Elements) -> None:
    expect(len(list(islice(elements, 20))) == 20, "the loop ended")


def _run_forever() -> None:
    for number in count():
        _compute(number)
        os.write(1, b".")


WORKLOADS = (
    Workload(
        name="service, a Python-bound function",
        unit="elements",
        check=_check,
        reopen=False,
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
            Contender(name="2 plain processes", build=_plain_processes(2), check=_check_plain),
            Contender(name="1 plain process", build=_plain_processes(1), check=_check_plain),
        ),
        targets=(Target(of=("headrace, 1 worker",), at_least=1.8),),
    ),
    Workload(
        name="in_processes, a Python-bound function",
        unit="elements",
        check=_check_batches,
        consume=len,
        reopen=False,
        contenders=(
            Contender(
                name="headrace", build=_in_processes(2), needs=("headrace",), role="headrace"
            ),
            Contender(name="headrace, 1 process", build=_in_processes(0), needs=("headrace",)),
            Contender(name="torch DataLoader, 2 processes", build=_torch(2), needs=("torch",)),
        ),
        targets=(
            Target(of=("headrace, 1 process",), at_least=1.6),
            Target(of=("torch DataLoader, 2 processes",), at_least=1.0),
        ),
    ),
)

if __name__ == "__main__":
    _run_forever()
