"""Throughput of a data service in single elements per second.

range(n) is read through one worker process on the same host, with sharding policy OFF, one int64 at
a time. With no work and almost no bytes, this is the overhead per element. The second workload
reads batches of 1024, the better case for a service that sends elements individually.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tfdata_server import start_tf_data_service
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

N, BATCH = 1_000_000_000, 1024


def _check(elements: Elements) -> None:
    found = list(islice(elements, 3000))
    expect(all(isinstance(x, np.int64) for x in found), f"an element is a {type(found[0])}")
    expect(found == list(range(3000)), "the elements are not 0, 1, 2, ...")


def _check_batches(batches: Elements) -> None:
    found = list(islice(batches, 20))
    expect(
        all(b.dtype == np.int64 and b.shape == (BATCH,) for b in found),
        f"a batch is not int64 of shape ({BATCH},)",
    )
    expect(
        np.array_equal(np.concatenate(found), np.arange(20 * BATCH)),
        "the elements are not 0, 1, 2, ...",
    )


def _headrace(batch: int | None) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=1, processes=True))
        dataset = hr.Dataset.range(N)
        if batch is not None:
            dataset = dataset.batch(batch)
        remote = dataset.apply(
            hr.service.distribute(
                processing_mode=hr.service.ShardingPolicy.OFF, service=cluster.target
            )
        )
        return lambda: iter(remote)

    return build


def _tf_data(batch: int | None) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import tensorflow as tf

        target = start_tf_data_service(stack)
        dataset = tf.data.Dataset.range(N)
        if batch is not None:
            dataset = dataset.batch(batch)
        remote = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=tf.data.experimental.service.ShardingPolicy.OFF, service=target
            )
        )
        return lambda: remote.as_numpy_iterator()

    return build


def _numpy(_: Path, __: ExitStack) -> Pipeline:
    def scalars() -> Iterator[np.int64]:
        for start in range(0, N, 1 << 16):
            yield from np.arange(start, start + (1 << 16))

    return scalars


WORKLOADS = (
    Workload(
        name="service, scalars",
        unit="elements",
        check=_check,
        reopen=False,
        contenders=(
            Contender(name="headrace", build=_headrace(None), needs=("headrace",), role="headrace"),
            Contender(name="tf.data service", build=_tf_data(None), needs=("tensorflow",)),
            Contender(name="NumPy scalars, no service", build=_numpy, role="limit"),
        ),
        targets=(Target(of=("tf.data service",), at_least=100.0),),
    ),
    Workload(
        name="service, scalars in batches of 1024",
        unit="elements",
        check=_check_batches,
        consume=len,
        reopen=False,
        contenders=(
            Contender(
                name="headrace", build=_headrace(BATCH), needs=("headrace",), role="headrace"
            ),
            Contender(name="tf.data service", build=_tf_data(BATCH), needs=("tensorflow",)),
        ),
    ),
)
