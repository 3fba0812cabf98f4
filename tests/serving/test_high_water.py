"""Tests of the high-water mark, which stores the number of the last record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.serving.high_water import HighWaterMark


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def test_mark_returns_none_if_new_and_else_the_last_number(path: Path) -> None:
    mark = HighWaterMark(path)
    assert mark.read() is None
    for number in (0, 1, 2**63, 7):
        mark.write(number)
        assert mark.read() == number
    mark.close()
    mark.close()
    again = HighWaterMark(path)
    assert again.read() == 7
    again.close()


@pytest.mark.parametrize("found", [b"", b"short", bytes(20), b"headrace" + bytes(12), bytes(4096)])
def test_unreadable_mark_returns_none(path: Path, found: bytes) -> None:
    path.write_bytes(found)
    mark = HighWaterMark(path)
    assert mark.read() is None
    mark.write(5)
    assert mark.read() == 5
    mark.close()


def test_every_changed_byte_is_detected(path: Path) -> None:
    mark = HighWaterMark(path)
    mark.write(1234567)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert mark.read() is None
    mark.close()


def test_unusable_mark_is_logged_once_and_not_an_error(
    tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = HighWaterMark(tmp_path / "no directory" / "mark")
    nowhere.write(1)
    assert nowhere.read() is None
    nowhere.close()
    (record,) = caplog.records
    assert "cannot use the high-water mark" in record.getMessage()
    caplog.clear()
    path.touch()
    mark = HighWaterMark(path)
    assert mark._file is not None
    os.close(mark._file)
    mark._file = os.open(path, os.O_RDONLY)
    for number in (1, 2):
        mark.write(number)
    assert len(caplog.records) == 1
    mark.close()
