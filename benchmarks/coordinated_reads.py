"""Speed-up of synchronous steps by coordinated reads of batches of one length bucket.

Sentences of log-normal length are batched by length, for four consumers in synchronous training. A
step takes as long as its most expensive batch needs on the device, which a sleep in proportion to
the padded tokens simulates, so that the number of cores does not matter. With coordinated reads all
batches of a step are of one bucket; without, each consumer takes the next batch of the job. The
limit is a step of the same number of tokens without padding.

The second workload has no device. It compares the rate of rounds of small batches with FIFO
delivery of the same batches, and so shows the cost of a round.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

CONSUMERS, BATCH, SENTENCES = 4, 16, 20_000
BOUNDARIES = [32, 64, 128, 256, 512]
_SECONDS_PER_TOKEN = 2e-6


def _lengths() -> np.ndarray[Any, np.dtype[np.int64]]:
    drawn = np.random.default_rng(0).lognormal(4.5, 1.0, SENTENCES)
    return np.clip(drawn, 1, 1000).astype(np.int64)


def _bucketed(*, coordinated: bool) -> Any:
    import headrace as hr

    batches = (
        hr.Dataset.from_tensor_slices(_lengths())
        .shuffle(SENTENCES, seed=1)
        .map(lambda length: np.ones(length, np.uint16))
        .bucket_by_sequence_length(
            len, BOUNDARIES, [BATCH] * (len(BOUNDARIES) + 1), drop_remainder=True
        )
    )
    if coordinated:
        batches = batches.group_by_window(
            key_func=lambda batch: np.searchsorted(BOUNDARIES, batch.shape[1], "right"),
            reduce_func=lambda key, window: window,
            window_size=CONSUMERS,
        )
    return batches.repeat()


def _small(**_: Any) -> Any:
    import headrace as hr

    return hr.Dataset.range(1 << 40).batch(64)


def _step(batches: list[Any]) -> list[Any]:
    time.sleep(max(batch.size for batch in batches) * _SECONDS_PER_TOKEN)
    return batches


def _headrace(dataset: Any, *, coordinated: bool, steps: bool) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=1, processes=True))
        pool = stack.enter_context(ThreadPoolExecutor(CONSUMERS))
        batches = dataset(coordinated=coordinated)

        def read() -> Iterator[Any]:
            readers = []
            for index in range(CONSUMERS):
                consumer = {"consumer_index": index, "num_consumers": CONSUMERS}
                distribute = hr.service.distribute(
                    hr.service.ShardingPolicy.OFF,
                    service=cluster.target,
                    job_name="training",
                    **(consumer if coordinated else {}),
                )
                readers.append(stack.enter_context(iter(batches.apply(distribute))))
            while True:
                found = list(pool.map(next, readers))
                yield _step(found) if steps else found

        return read

    return build


def _unpadded(_: Path, __: ExitStack) -> Pipeline:
    mean = float(_lengths().mean()) * BATCH

    def read() -> Iterator[Any]:
        while True:
            time.sleep(mean * _SECONDS_PER_TOKEN)
            yield None

    return read


def _check_buckets(steps: Elements) -> None:
    for batches in islice(steps, 20):
        expect(len(batches) == CONSUMERS, "a consumer received no batch")
        buckets = {int(np.searchsorted(BOUNDARIES, each.shape[1], "right")) for each in batches}
        expect(len(buckets) == 1, f"a round has batches of buckets {buckets}")


def _check_any(steps: Elements) -> None:
    for batches in islice(steps, 20):
        expect(len(batches) == CONSUMERS, "a consumer received no batch")


WORKLOADS = (
    Workload(
        name="coordinated reads, log-normal lengths",
        unit="steps",
        check=_check_any,
        reopen=False,
        long_rounds=True,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(_bucketed, coordinated=True, steps=True),
                needs=("headrace",),
                role="headrace",
                check=_check_buckets,
            ),
            Contender(
                name="headrace, uncoordinated",
                build=_headrace(_bucketed, coordinated=False, steps=True),
                needs=("headrace",),
            ),
            Contender(
                name="no padding, equal lengths",
                build=_unpadded,
                role="limit",
                check=lambda steps: None,
            ),
        ),
        targets=(Target(of=("headrace, uncoordinated",), at_least=1.3),),
    ),
    Workload(
        name="coordinated reads, rounds of small batches",
        unit="rounds",
        check=_check_any,
        reopen=False,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(_small, coordinated=True, steps=False),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, uncoordinated",
                build=_headrace(_small, coordinated=False, steps=False),
                needs=("headrace",),
            ),
        ),
    ),
)
