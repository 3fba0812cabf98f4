"""Overhead of the PyTorch loader over a loop that calls torch.from_numpy.

Batches of 64 x 224 x 224 x 3 uint8 (9.6 MB) are gathered from memory, or precomputed in one worker
process. The reader touches one byte of each 4 KiB page. Both contenders read two batches ahead.
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
        dataset = hr.Dataset.from_tensors(batch()).repeat()
        mode = hr.service.ShardingPolicy.OFF
        return read(dataset.apply(hr.service.distribute(mode, cluster.target)))

    return build


def _by_loader(dataset: Any) -> Pipeline:
    import headrace as hr

    loader = hr.torch.loader(dataset)
    return lambda: iter(loader)


def _by_hand(dataset: Any) -> Pipeline:
    import torch

    return lambda: map(torch.from_numpy, iter(dataset))


def _by_hand_with_prefetch(dataset: Any) -> Pipeline:
    return _by_hand(dataset.prefetch(2))


def _check(batches: Elements) -> None:
    import torch

    expected = torch.from_numpy(batch())
    received = list(islice(batches, 4))
    expect(all(each.dtype == torch.uint8 for each in received), "a batch is not uint8")
    expect(all(torch.equal(each, expected) for each in received), "a batch's bytes differ")
    received[0].zero_()
    expect(torch.equal(received[1], expected), "two batches share memory")


def _workload(origin: str, source: Callable[[Read], Any], by_hand: Read) -> Workload:
    needs = ("headrace", "torch")
    return Workload(
        name=f"torch, 9.6 MB batches, {origin}",
        unit="batches",
        item_bytes=BYTES,
        check=_check,
        consume=touch,
        reopen=False,
        repeated=True,
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
    _workload("from memory", _memory, _by_hand_with_prefetch),
    _workload("over the service", _service, _by_hand),
)
