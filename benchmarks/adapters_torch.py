"""What does a loader for PyTorch cost over a loop that calls torch.from_numpy by hand?

Batches of 64 x 224 x 224 x 3 uint8 (9.6 MB), gathered from memory, or ready in one worker process.
Whoever reads a batch touches one byte of each of its 4 KiB pages. Both read two batches ahead.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.service_batches import BYTES, SHAPE, batch, touch
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

_ROWS = 512
Read = Callable[[Any], Pipeline]


def _memory(read: Read) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, __: ExitStack) -> Pipeline:
        import headrace as hr

        rows = np.concatenate([batch()] * (_ROWS // SHAPE[0]))
        return read(hr.Dataset.from_tensor_slices(rows).repeat().batch(SHAPE[0]))

    return build


def _service(read: Read) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=1, processes=True))
        one = hr.Dataset.from_tensors(batch()).repeat()
        mode = hr.service.ShardingPolicy.OFF
        return read(one.apply(hr.service.distribute(mode, cluster.target)))

    return build


def _by_loader(dataset: Any) -> Pipeline:
    import headrace as hr

    loader = hr.torch.loader(dataset)
    return lambda: iter(loader)


def _by_hand(dataset: Any) -> Pipeline:
    import torch

    return lambda: map(torch.from_numpy, iter(dataset))


def _by_hand_ahead(dataset: Any) -> Pipeline:
    return _by_hand(dataset.prefetch(2))


def _check(batches: Elements) -> None:
    import torch

    expected = torch.from_numpy(batch())
    held = list(islice(batches, 4))
    expect(all(each.dtype == torch.uint8 for each in held), "a batch is not of uint8")
    expect(all(torch.equal(each, expected) for each in held), "a batch's bytes differ")
    held[0].zero_()
    expect(torch.equal(held[1], expected), "two batches share memory")


def _workload(where: str, source: Callable[[Read], Any], by_hand: Read) -> Workload:
    needs = ("headrace", "torch")
    return Workload(
        name=f"torch, 9.6 MB batches, {where}",
        unit="batches",
        item_bytes=BYTES,
        check=_check,
        consume=touch,
        reopen=False,
        times_rounds=4,
        stretch=0.5,
        contenders=(
            Contender(name="headrace", build=source(_by_loader), needs=needs, role="headrace"),
            Contender(
                name="torch.from_numpy by hand",
                build=source(by_hand),
                needs=needs,
                role="limit",
            ),
        ),
        targets=(Target(of=("torch.from_numpy by hand",), at_least=0.95),),
    )


WORKLOADS = (
    _workload("from memory", _memory, _by_hand_ahead),
    _workload("over the service", _service, _by_hand),
)
