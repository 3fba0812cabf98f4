"""A disk or a network that fails in the middle of a file."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import DataLossError, HeadraceError, UnavailableError
from headrace.sources import record_files
from headrace.sources.text_files import TextLineSource
from headrace.sources.tfrecord import TFRecordSource, TFRecordWriter


class Failing:
    """A stream that fails at its second read, with the error of a device."""

    def __init__(self, stream: Any, error: Exception) -> None:
        self._stream, self._error = stream, error
        self.reads = 0

    def read(self, size: int) -> bytes:
        self.reads += 1
        if self.reads == 2:
            raise self._error
        data: bytes = self._stream.read(size)
        return data

    def close(self) -> None:
        self._stream.close()


def outcomes(dataset: hr.Dataset) -> list[Any]:
    """Return the elements, and the errors where they were raised."""
    found: list[Any] = []
    with iter(dataset) as iterator:
        while len(found) < 100:
            try:
                found.append(next(iterator))
            except StopIteration:
                return found
            except HeadraceError as error:
                found.append(error)
    raise AssertionError(f"it does not end: {found[-3:]}")


@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), UnavailableError),
        (ConnectionResetError("reset by the store"), UnavailableError),
        (DataLossError("a damaged block"), DataLossError),
    ],
    ids=["disk", "network", "damage"],
)
def test_a_file_that_fails_midway_is_reported_and_the_next_file_follows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    reported: type[HeadraceError],
) -> None:
    names = [str(tmp_path / name) for name in ("first", "second")]
    for name in names:
        Path(name).write_bytes(b"".join(b"%04d\n" % number for number in range(10)))
    opened = record_files.open_file

    def open_file(name: str, *arguments: Any) -> Any:
        stream = opened(name, *arguments)
        return Failing(stream, raised) if name == names[0] else stream

    monkeypatch.setattr(record_files, "open_file", open_file)

    found = outcomes(hr.Dataset.from_source(TextLineSource(names, buffer_size=25)))

    assert found[:5] == [b"%04d" % number for number in range(5)]
    assert type(found[5]) is reported
    if reported is UnavailableError:
        assert f"{names[0]!r} cannot be read at byte 25" in str(found[5])
        assert str(raised) in str(found[5])
    assert found[6:] == [b"%04d" % number for number in range(10)]


class FailingDisk(io.FileIO):
    """A local file that fails at one of its reads."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__(name)
        self._left = at

    def read(self, size: int = -1, /) -> bytes:
        self._left -= 1
        if self._left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


# Of records of 100 bytes the first are read by 250 bytes and 62, then each by 84 and 16.
@pytest.mark.parametrize(("at", "byte", "records"), [(3, 312, 3), (4, 396, 3), (7, 512, 5)])
def test_a_disk_error_among_large_records_keeps_earlier_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, byte: int, records: int
) -> None:
    names = [str(tmp_path / name) for name in ("first", "second")]
    written = [bytes([number]) * 84 for number in range(10)]
    for name in names:
        with TFRecordWriter(name) as writer:
            for record in written:
                writer.write(record)
    monkeypatch.setattr(
        record_files,
        "open_file",
        lambda name, compression, offset, options: FailingDisk(name, at if name == names[0] else 0),
    )

    found = outcomes(hr.Dataset.from_source(TFRecordSource(names, buffer_size=250)))

    assert found[:records] == written[:records]
    assert type(found[records]) is UnavailableError
    assert f"{names[0]!r} cannot be read at byte {byte}" in str(found[records])
    assert found[records + 1 :] == written
