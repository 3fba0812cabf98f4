"""Clients, workers and dispatchers of other versions, as real processes."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cli.main import app
from headrace.errors import FailedPreconditionError
from headrace.service import DispatchServer, WorkerConfig, WorkerServer
from headrace.service.messages import GetStatus
from headrace.service.stub import DispatcherStub
from tests.other_version import other_version

MINE = ".".join(map(str, sys.version_info[:2]))
_SECONDS = 60.0


def double(value: int) -> int:
    return 2 * value


def read(address: str) -> list[int]:
    dataset = hr.Dataset.range(100).map(double)
    return sorted(dataset.apply(hr.service.distribute("distributed_epoch", address)))


def read_on(elements: Iterator[int]) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        next(elements)


def doctor(address: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["doctor", address], env={"COLUMNS": "1000"})
    return found.exit_code, found.stdout


@pytest.fixture
def dispatcher() -> Iterator[str]:
    with DispatchServer() as server:
        yield server.target.split("://")[1]


def worker_config(dispatcher: str) -> WorkerConfig:
    return WorkerConfig(dispatcher_address=dispatcher)


def test_worker_of_another_python_version_is_named_to_the_client(dispatcher: str) -> None:
    with other_version("worker", "--dispatcher", dispatcher, python="3.99") as worker:
        words = (
            rf"by a client with Python {MINE}, but these workers run another minor version: "
            rf"{worker} \(Python 3\.99\)"
        )
        with pytest.raises(FailedPreconditionError, match=words):
            read(dispatcher)
        code, found = doctor(dispatcher)
        assert (code, f"{worker} runs Python 3.99" in found) == (1, True)
        # One that can run it is enough.
        with WorkerServer(worker_config(dispatcher)) as mine:
            assert read(dispatcher) == list(range(0, 200, 2))
            code, found = doctor(dispatcher)
            assert (code, "warning" in found) == (0, True)
            shown = CliRunner().invoke(app, ["status", dispatcher, "--json"])
            workers = json.loads(shown.stdout)["workers"]
            assert {each["address"]: each["versions"]["python"] for each in workers} == {
                worker: "3.99",
                mine.address: MINE,
            }


def test_a_client_is_told_of_a_changed_python_version_of_workers(dispatcher: str) -> None:
    dataset = hr.Dataset.range(100).repeat().map(double)
    reading = dataset.apply(hr.service.distribute("distributed_epoch", dispatcher))
    with WorkerServer(worker_config(dispatcher)):
        elements = iter(reading)
        next(elements)
    words = r"these workers run another minor version: 127\.0\.0\.1:\d+ \(Python 3\.99\)"
    with (
        other_version("worker", "--dispatcher", dispatcher, python="3.99"),
        pytest.raises(FailedPreconditionError, match=words),
    ):
        read_on(elements)


def test_another_release_works_and_is_named_once(
    dispatcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        other_version("worker", "--dispatcher", dispatcher, headrace="9.9") as worker,
    ):
        assert read(dispatcher) == list(range(0, 200, 2))
        code, found = doctor(dispatcher)
    [warning] = [each for each in caplog.messages if "9.9" in each]
    assert worker in warning
    assert f"Headrace {hr.__version__}" in warning
    assert (code, "install the same release everywhere" in found) == (0, True)


def test_client_is_told_that_the_dispatcher_is_of_another_release(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with other_version("dispatcher", "--port", "0", headrace="9.9") as dispatcher:
        hr.service.register_dataset(dispatcher, hr.Dataset.range(3))
    assert any(
        f"{dispatcher} runs Python {MINE} with Headrace 9.9" in each for each in caplog.messages
    ), caplog.messages


def test_server_of_another_wire_format_refuses_every_request() -> None:
    with other_version("dispatcher", "--port", "0", headrace="9.9", wire=7) as address:
        words = rf"server {address} \(.*Headrace 9\.9\) supports wire format 7, .* wire format 3"
        with (
            DispatcherStub(address) as stub,
            pytest.raises(FailedPreconditionError, match=words),
        ):
            stub.call(GetStatus(), timeout=_SECONDS)
