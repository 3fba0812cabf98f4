"""Throughput of a data service for elements of medium size, by shared memory and by TCP.

Sixteen different arrays of 64 KiB or of 1 MiB, repeated, are read one at a time through one worker
process on the same host. The reader touches one byte of each 4 KiB page.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.local_service import local_service
from benchmarks.tfdata_server import start_tf_data_service
from benchmarks.workload import Check, Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

NUM_ARRAYS = 16
_PAGE = 4096


def _rows(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (NUM_ARRAYS, size), dtype=np.uint8)


def _touch(element: Any) -> int:
    np.asarray(element)[::_PAGE].sum()
    return 1


def _check(size: int) -> Check:
    def check(elements: Elements) -> None:
        # All are kept: an element must not change when later ones arrive.
        received = [np.asarray(element) for element in islice(elements, 2 * NUM_ARRAYS)]
        expect(len(received) == 2 * NUM_ARRAYS, "the stream ended")
        for number, (element, row) in enumerate(zip(received, [*_rows(size)] * 2, strict=True)):
            expect(np.array_equal(element, row), f"element {number} differs from the sent element")

    return check


def _headrace(size: int, protocol: str) -> Any:
    def dataset(_: Path) -> Any:
        import headrace as hr

        return hr.Dataset.from_tensor_slices(_rows(size)).repeat()

    return local_service(dataset, mode="OFF", data_transfer_protocol=protocol)


def _tf_data(size: int) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import tensorflow as tf

        service = tf.data.experimental.service
        remote = (
            tf.data.Dataset.from_tensor_slices(_rows(size))
            .repeat()
            .apply(service.distribute(service.ShardingPolicy.OFF, start_tf_data_service(stack)))
        )
        return lambda: remote.as_numpy_iterator()

    return build


def _workload(name: str, size: int) -> Workload:
    return Workload(
        name=f"service, {name} elements",
        unit="elements",
        item_bytes=size,
        check=_check(size),
        consume=_touch,
        reopen=False,
        contenders=(
            Contender(
                name="headrace, shared memory",
                build=_headrace(size, "shm"),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, tcp",
                build=_headrace(size, "tcp"),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(name="tf.data service", build=_tf_data(size), needs=("tensorflow",)),
        ),
        targets=(
            Target(by="headrace, shared memory", of=("tf.data service",), at_least=5.0),
            Target(by="headrace, tcp", of=("tf.data service",), at_least=2.0),
        ),
    )


WORKLOADS = (_workload("64 KiB", 1 << 16), _workload("1 MiB", 1 << 20))
