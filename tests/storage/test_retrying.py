from __future__ import annotations

import errno
import itertools
import logging
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from headrace.errors import UnavailableError
from headrace.storage import retrying
from headrace.storage.files import open_file
from headrace.storage.retrying import is_transient, retry_read
from headrace.testing import ManualClock


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("failed")
        self.status = status


class ClientError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("failed")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        OSError(errno.EIO, "I/O error"),
        OSError("the connection was closed"),
        HttpError(503),
        HttpError(429),
        ClientError(500),
    ],
)
def test_transient_errors(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        PermissionError(),
        OSError(errno.ENOSPC, "disk full"),
        HttpError(403),
        ClientError(404),
        ValueError("wrong"),
        UnavailableError("gave up"),
    ],
)
def test_permanent_errors(error: Exception) -> None:
    assert not is_transient(error)


def test_pauses_grow_until_the_deadline(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[float] = []

    def fail() -> None:
        attempts.append(clock())
        raise TimeoutError("no reply\nDetails: ...")

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UnavailableError, match=r"'x://y' .*at byte 7: (\d+) .*: no reply$"),
    ):
        retry_read(fail, "x://y", 7, clock=clock, sleep=clock.advance)

    pauses = [after - before for before, after in itertools.pairwise(attempts)]
    assert 0.05 <= pauses[0] <= 0.1
    assert max(pauses) <= 10
    assert 100 < attempts[-1] - attempts[0] < retrying.DEADLINE_SECONDS
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) in (2, 3)
    assert "'x://y' at byte 7: no data for" in warnings[0]


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory that fail a number of times."""

    protocol = "flaky"
    failures = 0
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the base class
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("flaky:/")))

    @classmethod
    def fail(cls) -> None:
        if cls.failures:
            cls.failures -= 1
            raise ConnectionResetError("reset")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **kwargs)
        self.fail()
        return FlakyFile(super()._open(path, mode, **kwargs))


class FlakyFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        FlakyFileSystem.fail()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


def test_a_failed_read_of_any_file_system_resumes_at_its_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FlakyFileSystem().pipe_file("/f/x", bytes(range(100)))
    monkeypatch.setattr(FlakyFileSystem, "failures", 1)
    stream = open_file("flaky://f/x")

    found = []
    for count in (2, 0, 3):
        FlakyFileSystem.failures = count
        found.append(stream.read(30))
    assert b"".join(found) == bytes(range(90))
    assert stream.read(30) == bytes(range(90, 100))
    stream.close()
