"""Throughput of each transport for large batches, compared with the machine's own primitives.

Batches of 64 x 224 x 224 x 3 uint8 (9.6 MB) are read through one worker process on the same host:
through shared memory, compared with a plain copy (the batch is assembled from rows, directly in
shared memory), and encrypted, compared with ZeroMQ sockets with CURVE. `service_batches` compares
TCP with a bare Python socket. The reader touches one byte of each 4 KiB page of a batch.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.dispatcher_process import start_worker
from benchmarks.local_service import local_service
from benchmarks.service_batches import BYTES, SHAPE, batch, memcpy, touch
from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]


def _check(batches: Elements) -> None:
    expected = batch()
    # All are kept: a batch must not change when later ones arrive.
    for each in list(islice(batches, 6)):
        expect(np.array_equal(np.asarray(each), expected), "a batch differs from the sent batch")


def _assembled(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.from_tensor_slices(batch()).repeat().batch(SHAPE[0])


def _precomputed(_: Path) -> Any:
    import headrace as hr

    return hr.Dataset.from_tensors(batch()).repeat()


def _encrypted(_: Path, stack: ExitStack) -> Pipeline:
    import headrace as hr
    from headrace.transport.security import new_keys

    keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    new_keys(keys)
    service = hr.service
    servers = service.Security.load(keys, "server")
    dispatcher = stack.enter_context(
        service.DispatchServer(service.DispatcherConfig(security=servers))
    )
    start_worker(stack, dispatcher.target.removeprefix("tcp://"), "--keys", str(keys))
    read = service.distribute(
        service.ShardingPolicy.OFF,
        dispatcher.target,
        data_transfer_protocol="tcp",
        compression=None,
        security=service.Security.load(keys, "client"),
    )
    remote = _precomputed(keys).apply(read)
    return lambda: iter(remote)


def _zeromq(_: Path, stack: ExitStack) -> Pipeline:
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.PULL))
    server_public, server_secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, server_secret)
    socket.set(zmq.CURVE_PUBLICKEY, server_public)
    socket.set(zmq.RCVHWM, 4)
    socket.set(zmq.RCVTIMEO, 30_000)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    sender = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.service_limits", str(port), server_public.decode()]
    )
    stack.callback(sender.wait)
    stack.callback(sender.kill)

    def received() -> Iterator[Any]:
        while True:
            yield np.frombuffer(socket.recv(copy=False).buffer, np.uint8).reshape(SHAPE)

    return received


def _send(port: int, server_public: bytes) -> None:
    client_public, client_secret = zmq.curve_keypair()
    sent = batch()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set(zmq.CURVE_SERVERKEY, server_public)
        socket.set(zmq.CURVE_PUBLICKEY, client_public)
        socket.set(zmq.CURVE_SECRETKEY, client_secret)
        socket.set(zmq.SNDHWM, 4)
        socket.connect(f"tcp://127.0.0.1:{port}")
        while True:
            socket.send(sent.data, copy=False)


def _workload(
    name: str, build: Any, reference: Contender, at_least: float, or_rate: float | None = None
) -> Workload:
    return Workload(
        name=f"9.6 MB batches, {name}",
        unit="batches",
        item_bytes=BYTES,
        check=_check,
        consume=touch,
        reopen=False,
        contenders=(
            Contender(name="headrace", build=build, needs=("headrace",), role="headrace"),
            reference,
        ),
        targets=(Target(of=(reference.name,), at_least=at_least, or_rate=or_rate),),
    )


WORKLOADS = (
    _workload(
        "assembled in shared memory",
        local_service(_assembled, mode="OFF", data_transfer_protocol="shm"),
        Contender(name="memcpy", build=memcpy, role="limit"),
        at_least=0.5,
        or_rate=10e9 / BYTES,
    ),
    _workload(
        "encrypted",
        _encrypted,
        Contender(name="ZeroMQ push and pull, CURVE", build=_zeromq),
        at_least=0.9,
    ),
)

if __name__ == "__main__":
    _send(int(sys.argv[1]), sys.argv[2].encode())
