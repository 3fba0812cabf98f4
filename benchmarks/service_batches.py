"""Throughput of a data service in bytes per second.

A precomputed batch of 64 x 224 x 224 x 3 uint8 (9.6 MB), repeated, is read through one worker
process on the same host. The reader touches one byte of each 4 KiB page of a batch, so that only
bytes that arrived are counted. The two loaders with a worker process are not services and are
limited to one host; they are included as other ways to move a batch between two processes.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tfdata_server import start_tf_data_service
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["BYTES", "SHAPE", "WORKLOADS", "batch", "memcpy", "touch"]

SHAPE = (64, 224, 224, 3)
BYTES = 64 * 224 * 224 * 3
_PAGE = 4096


def batch() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the batch that all contenders send."""
    return np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)


def touch(received: Any) -> int:
    """Read a byte of each page; return 1, the number of batches."""
    np.asarray(received).reshape(-1)[::_PAGE].sum()
    return 1


def _check(batches: Elements) -> None:
    expected = batch()
    # All are kept: a batch must not change when later ones arrive.
    received = [np.asarray(each) for each in islice(batches, 6)]
    expect(len(received) == 6, "the stream ended")
    for each in received:
        expect(
            each.dtype == np.uint8 and each.shape == SHAPE, f"a batch is {each.dtype}, {each.shape}"
        )
        expect(np.array_equal(each, expected), "the bytes of a batch differ from the sent batch")


def _headrace(protocol: str) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=1, processes=True))
        dataset = (
            hr.Dataset.from_tensors(batch())
            .repeat()
            .apply(
                hr.service.distribute(
                    processing_mode=hr.service.ShardingPolicy.OFF,
                    service=cluster.target,
                    data_transfer_protocol=protocol,
                )
            )
        )
        return lambda: iter(dataset)

    return build


def _tf_data(**options: Any) -> Any:
    def build(_: Path, stack: ExitStack) -> Pipeline:
        import tensorflow as tf

        target = start_tf_data_service(stack)
        dataset = (
            tf.data.Dataset.from_tensors(batch())
            .repeat()
            .apply(
                tf.data.experimental.service.distribute(
                    processing_mode=tf.data.experimental.service.ShardingPolicy.OFF,
                    service=target,
                    **options,
                )
            )
        )
        return lambda: dataset.as_numpy_iterator()

    return build


def _torch(_: Path, __: ExitStack) -> Pipeline:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Batches(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            constant = batch()
            while True:
                # A new tensor each time: a tensor that was sent before is not copied again, and all
                # received tensors would share its memory.
                yield torch.from_numpy(constant)

    loader = DataLoader(Batches(), batch_size=None, num_workers=1)
    return lambda: iter(loader)


def _grain(_: Path, __: ExitStack) -> Pipeline:
    import grain
    from absl import flags

    flags.FLAGS(["grain"])  # worker processes require parsed flags

    class Same:
        def __init__(self) -> None:
            self.same: Any = None

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, _: int) -> Any:
            if self.same is None:
                self.constant = batch()
            return self.same

    dataset = (
        grain.MapDataset.source(Same())
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    )
    return lambda: iter(dataset)


def memcpy(_: Path, __: ExitStack) -> Pipeline:
    """Return copies of the batch, always into the same buffer."""
    source, buffer = batch(), np.empty(SHAPE, np.uint8)

    def copies() -> Iterator[Any]:
        while True:
            np.copyto(buffer, source)
            yield buffer

    return copies


def _loopback(_: Path, stack: ExitStack) -> Pipeline:
    """Return batches from another process through a plain socket."""

    def received() -> Iterator[Any]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            sender = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.service_batches", str(port)]
            )
            stack.callback(sender.wait)
            stack.callback(sender.kill)
            server.settimeout(30)
            connection, _address = server.accept()
        buffer = np.empty(SHAPE, np.uint8)
        with connection:
            connection.settimeout(30)
            while True:
                view = memoryview(buffer).cast("B")
                while view:
                    view = view[connection.recv_into(view) :]
                yield buffer

    return received


def _send(port: int) -> None:
    sent = batch()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        try:
            while True:
                connection.sendall(sent)
        except (BrokenPipeError, ConnectionResetError):
            return


WORKLOADS = (
    Workload(
        name="service, 9.6 MB batches",
        unit="batches",
        item_bytes=BYTES,
        check=_check,
        reopen=False,
        consume=touch,
        contenders=(
            Contender(
                name="headrace, shared memory",
                build=_headrace("shm"),
                needs=("headrace",),
                role="headrace",
            ),
            Contender(
                name="headrace, tcp", build=_headrace("tcp"), needs=("headrace",), role="headrace"
            ),
            Contender(name="tf.data service, default", build=_tf_data(), needs=("tensorflow",)),
            Contender(
                name="tf.data service, compression=None",
                build=_tf_data(compression=None),
                needs=("tensorflow",),
            ),
            Contender(name="torch DataLoader, 1 worker", build=_torch, needs=("torch",)),
            Contender(name="grain mp_prefetch, 1 worker", build=_grain, needs=("grain",)),
            Contender(name="memcpy", build=memcpy, role="limit"),
            Contender(name="bare Python socket, recv_into", build=_loopback),
        ),
        targets=(
            Target(by="headrace, shared memory", of=("tf.data service, default",), at_least=4.0),
            Target(by="headrace, tcp", of=("tf.data service, default",), at_least=2.0),
            Target(by="headrace, tcp", of=("bare Python socket, recv_into",), at_least=0.95),
        ),
    ),
)

if __name__ == "__main__":
    _send(int(sys.argv[1]))
