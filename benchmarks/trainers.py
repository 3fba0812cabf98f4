"""What does a worker save where four trainers share what it makes?

Photographs, decoded, resized and batched by 16 in one worker process, for four trainers that read
everything. They share it through the cross-trainer cache, or each has a job of its own. What is
measured is the processor time of the worker for a batch that a trainer got: making it and sending
it. Shared, a batch is made once and sent four times, so that a quarter would be perfect.

The window that they share is small, so that it is full when the clock starts, as it is soon in any
training: until then each batch lies in memory that is touched for the first time, which costs as
much as the machine takes for that.
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
_AT_ONCE = 8
"""Batches for each trainer from one look at the worker's clock to the next."""
_WINDOW_BYTES = 64 << 20
"""Of 27 batches, which are made while the elements are checked and the contender warms up."""


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
                one = service.distribute(
                    service.ShardingPolicy.OFF,
                    cluster.target,
                    job_name="training" if shared else trainer,
                    cross_trainer_cache=cache,
                )
                remote = iter(_decoded(inputs).apply(one))
                readers.append(stack.enter_context(remote))
            while True:
                before = cpu_seconds_of(worker)
                for _ in range(_AT_ONCE):
                    for reader in readers:
                        expect(next(reader).shape == (BATCH, SIDE, SIDE, 3), "not a batch")
                yield TRAINERS * _AT_ONCE, cpu_seconds_of(worker) - before

        return read

    return build


def _check(measured: Elements) -> None:
    for batches, seconds in islice(measured, 2):
        expect(batches > 0 and seconds >= 0, "nothing was measured")


WORKLOADS = (
    Workload(
        name=f"{TRAINERS} trainers, the worker's CPU for a batch",
        unit="batches",
        check=_check,
        reopen=False,
        own_clock=True,
        contenders=(
            Contender(
                name="headrace",
                build=_headrace(shared=True),
                needs=("headrace", "cv2"),
                role="headrace",
            ),
            Contender(name="a job each", build=_headrace(shared=False), needs=("headrace", "cv2")),
        ),
        # At most 0.3 of the processor time.
        targets=(Target(of=("a job each",), at_least=1 / 0.3),),
    ),
)
