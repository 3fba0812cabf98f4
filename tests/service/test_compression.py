"""Replies are compressed only over a slow network, and only if that helps."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import headrace as hr
from headrace.element import frame_compression
from headrace.errors import FailedPreconditionError
from headrace.service import (
    DispatchServer,
    ShardingPolicy,
    WorkerConfig,
    distribute,
    from_dataset_id,
    register_dataset,
)
from headrace.service import WorkerServer as Worker
from headrace.transport import address as addresses
from tests.service.reading import numbers

pytestmark = pytest.mark.system

_BYTES_A_SECOND = 8e6


class Wire:
    """A slow wire: a port that forwards data at a limited rate."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.target = free.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                    thread = threading.Thread(target=self._pass_on, args=(one, other), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 15):
                time.sleep(len(data) / _BYTES_A_SECOND)
                other.sendall(data)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        for each in [self.listener, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10.0)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_compressible_data_arrives_sooner_over_a_slow_network(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "is_local_host", lambda host: False)
    packed: list[int] = []
    pack = frame_compression.compress_frame
    monkeypatch.setattr(
        frame_compression, "compress_frame", lambda *given: packed.append(1) or pack(*given)
    )
    paces = {}
    with DispatchServer() as dispatcher:
        config = WorkerConfig(
            dispatcher.target.partition("://")[2],
            # Its advertised address leads through the wire.
            worker_address=f"127.0.0.1:{wire.port}",
            port=wire.target,
        )
        with Worker(config):
            data = hr.Dataset.range(10**6).map(lambda x: np.full(60_000, x)).repeat()
            for compression in (None, "AUTO"):  # nothing of the first is packed late, either
                packed.clear()
                share = distribute(
                    "parallel_epochs",
                    dispatcher.target,
                    data_transfer_protocol="tcp",
                    compression=compression,
                )
                with iter(data.apply(share)) as iterator:
                    for number in range(60):
                        element = next(iterator)
                        assert element[0] == element[-1] == number
                        element[:] = 0
                        if number == 40:
                            began = time.monotonic()
                    paces[compression] = 19 / (time.monotonic() - began)
                assert bool(packed) == (compression == "AUTO")
    assert paces["AUTO"] > 1.5 * paces[None]


def test_compressed_data_is_read_in_order_too(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "is_local_host", lambda host: False)
    packed: list[int] = []
    pack = frame_compression.compress_frame
    monkeypatch.setattr(
        frame_compression, "compress_frame", lambda *given: packed.append(1) or pack(*given)
    )
    with DispatchServer() as dispatcher:
        config = WorkerConfig(
            dispatcher.target.partition("://")[2],
            worker_address=f"127.0.0.1:{wire.port}",
            port=wire.target,
        )
        share = distribute(
            ShardingPolicy.DYNAMIC, dispatcher.target, data_transfer_protocol="tcp", ordered=True
        )
        data = hr.Dataset.range(10**4).map(lambda x: np.full(60_000, x)).apply(share)
        with Worker(config), iter(data) as iterator:
            for number in range(40):
                element = next(iterator)
                assert element[0] == element[-1] == number
    assert packed


def test_nothing_is_compressed_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_compression, "compress_frame", lambda *given: pytest.fail("packed"))
    with (
        DispatchServer() as dispatcher,
        Worker(WorkerConfig(dispatcher.target.partition("://")[2])),
    ):
        for protocol in ("tcp", "shm", "local"):
            share = distribute(
                "parallel_epochs", dispatcher.target, data_transfer_protocol=protocol
            )
            assert len(list(hr.Dataset.range(100_000).batch(1000).apply(share))) == 100


@pytest.mark.parametrize("compression", ["AUTO", None])
def test_reading_by_id_uses_the_registered_compression(compression: str | None) -> None:
    with (
        DispatchServer() as dispatcher,
        Worker(WorkerConfig(dispatcher.target.partition("://")[2])),
    ):
        dataset = hr.Dataset.from_tensor_slices([chr(97 + n) for n in range(26)])
        name = register_dataset(
            dispatcher.target, dataset.map(lambda x: str(x).upper()), compression=compression
        )
        read = from_dataset_id("parallel_epochs", dispatcher.target, name)
        assert read.element_spec == hr.ArraySpec((), str)
        assert [str(each) for each in read] == [chr(65 + n) for n in range(26)]
        register_dataset(dispatcher.target, dataset, compression=compression, dataset_id="x")
        other = None if compression else "AUTO"
        with pytest.raises(hr.errors.AlreadyExistsError, match=r"compression: .*; got "):
            register_dataset(dispatcher.target, dataset, compression=other, dataset_id="x")


def test_shared_memory_with_a_remote_worker_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "is_local_host", lambda host: False)
    with (
        DispatchServer() as dispatcher,
        Worker(WorkerConfig(dispatcher.target.partition("://")[2])) as worker,
    ):
        share = distribute("parallel_epochs", dispatcher.target, data_transfer_protocol="shm")
        with pytest.raises(
            FailedPreconditionError,
            match=f'the worker at {worker.address} is on another machine; use None or "tcp"',
        ):
            numbers(hr.Dataset.range(3).apply(share))
