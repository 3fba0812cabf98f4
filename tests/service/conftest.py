"""Fixtures that allocate process-wide resources before the first test, so they are no leaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.data.dataset import Dataset
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from tests.service.dispatcher.scenario import Scenario


@pytest.fixture
def scene() -> Iterator[Scenario]:
    """A scenario of the dispatcher whose events and state are checked after the test."""
    scene = Scenario()
    yield scene
    scene.check()


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Start the threads that ZeroMQ's context and pyzmq's collector keep."""
    with LocalCluster(num_workers=1, processes=False) as cluster:
        for protocol in ("shm", "tcp"):
            list(
                Dataset.range(1 << 16)
                .batch(1 << 16)
                .apply(
                    distribute("parallel_epochs", cluster.target, data_transfer_protocol=protocol)
                )
            )


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A dispatcher and one worker in this process."""
    with LocalCluster(num_workers=1, processes=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """The address of a dispatcher with two workers, all in this process."""
    with DispatchServer(DispatcherConfig(client_timeout_ms=3000)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)), WorkerServer(WorkerConfig(address)):
            yield address
