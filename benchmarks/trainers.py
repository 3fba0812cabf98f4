"""Processor time that the cross-trainer cache saves in a worker of four trainers.

One worker process decodes, resizes and batches photographs by 16 for four trainers, each of which
reads all of them, through the cross-trainer cache or with one job per trainer. The figure is the
worker's processor time, to compute and to send, per batch that a trainer receives. With the cache a
batch is computed once and sent four times, so the ideal ratio is a quarter.

The cache window is small, so that it is full when the clock starts, as it soon is in training:
until then each batch is written to fresh memory, at the additional cost of page faults.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.cpu_time import cpu_seconds_of
from benchmarks.dispatcher_process import start_worker
from benchmarks.inputs import write_tfrecord
from benchmarks.jpeg import SIDE, decode, one_threaded_cv2, photographs
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS", "write_inputs"]

TRAINERS, IMAGES, BATCH = 4, 128, 16
_BATCHES_PER_MEASUREMENT = 8
"""Batches for each trainer between two readings of the worker's processor time."""
_WINDOW_BYTES = 64 << 20
"""Size of 27 batches, which are computed during the check and the warm-up."""


def write_inputs(directory: Path) -> None:
    """Write one file of photographs."""
    write_tfrecord(directory / "0.tfrecord", photographs(IMAGES))


def _decoded(inputs: Path) -> Any:
    import headrace as hr

    def load(record: bytes) -> Any:
        return decode(one_threaded_cv2(), record)

    records = hr.TFRecordDataset([str(inputs / "0.tfrecord")]).repeat()
    return records.map(load).batch(BATCH)


def _headrace(*, shared: bool) -> Callable[[Path, ExitStack], Pipeline]:
    def build(inputs: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        service = hr.service
        cluster = stack.enter_context(service.LocalCluster(num_workers=0))
        dispatcher = cluster.target.removeprefix("tcp://")
        window = ("--cross-trainer-cache-bytes", str(_WINDOW_BYTES))
        worker = start_worker(stack, dispatcher, *window).pid

        def read() -> Iterator[Any]:
            readers = []
            for number in range(TRAINERS):
                trainer = f"trainer {number}"
                cache = service.CrossTrainerCache(trainer) if shared else None
                distribute = service.distribute(
                    service.ShardingPolicy.OFF,
                    cluster.target,
                    job_name="training" if shared else trainer,
                    cross_trainer_cache=cache,
                )
                remote = iter(_decoded(inputs).apply(distribute))
                readers.append(stack.enter_context(remote))
            while True:
                before = cpu_seconds_of(worker)
                for _ in range(_BATCHES_PER_MEASUREMENT):
                    for reader in readers:
                        expect(next(reader).shape == (BATCH, SIDE, SIDE, 3), "not a batch")
                yield TRAINERS * _BATCHES_PER_MEASUREMENT, cpu_seconds_of(worker) - before

        return read

    return build


def _check(measured: Elements) -> None:
    for batches, seconds in islice(measured, 2):
        expect(batches > 0 and seconds >= 0, "a measurement is empty")


WORKLOADS = (
    Workload(
        name=f"{TRAINERS} trainers, worker CPU per batch",
        unit="batches",
        check=_check,
        reopen=False,
        self_timed=True,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(shared=True),
                needs=("headrace", "cv2"),
                role="headrace",
            ),
            Contender(
                name="one job per trainer", build=_headrace(shared=False), needs=("headrace", "cv2")
            ),
        ),
        # At most 0.3 of the processor time.
        targets=(Target(of=("one job per trainer",), at_least=1 / 0.3),),
    ),
)
