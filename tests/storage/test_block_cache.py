from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.storage import block_cache
from headrace.storage.block_cache import BlockCache
from headrace.storage.files import open_file
from headrace.storage.options import StorageCache, StorageOptions
from tests.storage.conftest import S3Server


@pytest.fixture(autouse=True)
def _no_known_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_directories", {})


def fetch_nothing() -> bytes:
    raise AssertionError("the block must be in the cache")


def test_blocks_are_stored_and_found(tmp_path: Path) -> None:
    cache = StorageCache(str(tmp_path / "cache"), 1 << 20)

    assert BlockCache(cache, "s3://x", "1").read(0, 4, lambda: b"data") == b"data"
    assert BlockCache(cache, "s3://x", "1").read(0, 4, fetch_nothing) == b"data"
    for url, version, number in (("s3://x", "1", 1), ("s3://x", "2", 0), ("s3://y", "1", 0)):
        assert BlockCache(cache, url, version).read(number, 4, lambda: b"more") == b"more"
    assert len(os.listdir(tmp_path / "cache")) == 4


@pytest.mark.parametrize("damage", [b"", b"dat", b"dbta", b"data" + bytes(12), b"datadata"])
def test_damaged_blocks_are_fetched_again(tmp_path: Path, damage: bytes) -> None:
    blocks = BlockCache(StorageCache(str(tmp_path), 1 << 20), "s3://x", "1")
    blocks.read(0, 4, lambda: b"data")
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage + good[4:] if len(damage) == 4 else damage)

    assert blocks.read(0, 4, lambda: b"data") == b"data"
    assert path.read_bytes() == good


def test_incomplete_data_is_not_stored(tmp_path: Path) -> None:
    blocks = BlockCache(StorageCache(str(tmp_path), 1 << 20), "s3://x", "1")

    assert blocks.read(0, 4, lambda: b"dat") == b"dat"
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_blocks_are_removed(tmp_path: Path) -> None:
    blocks = BlockCache(StorageCache(str(tmp_path), 10_000), "s3://x", "1")
    for number in range(9):
        blocks.read(number, 1000, lambda: bytes(1000))
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    blocks.read(0, 1000, fetch_nothing)

    for number in range(9, 14):
        blocks.read(number, 1000, lambda: bytes(1000))

    blocks.read(0, 1000, fetch_nothing)
    blocks.read(13, 1000, fetch_nothing)
    with pytest.raises(AssertionError):
        blocks.read(1, 1000, fetch_nothing)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000


def test_without_space_files_are_read_directly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")  # no folder can be created here
    cache = StorageCache(str(tmp_path / "file"), 1 << 20)

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            block = BlockCache(cache, "s3://x", "1").read(number, 4, lambda: b"data")
            assert block == b"data"

    (record,) = caplog.records
    assert "they are read directly" in record.getMessage()


def test_blocks_larger_than_the_cache_are_not_stored(tmp_path: Path) -> None:
    blocks = BlockCache(StorageCache(str(tmp_path), 10), "s3://x", "1")

    assert blocks.read(0, 100, lambda: bytes(100)) == bytes(100)
    assert list(tmp_path.iterdir()) == []


_USE_CACHE = """
import sys
from headrace.storage.block_cache import BlockCache
from headrace.storage.options import StorageCache

blocks = BlockCache(StorageCache(sys.argv[1], 20_000), "s3://x", "1")
for step in range(300):
    number = (int(sys.argv[2]) + step * 7) % 40
    expected = bytes([number]) * 1000
    assert blocks.read(number, 1000, lambda: expected) == expected
"""


@pytest.mark.heavy
def test_processes_share_a_directory(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _USE_CACHE, str(tmp_path), first])
        for first in ("0", "20")
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 20_000 * (1 + 2 / 16) + 2 * max(sizes)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.system
def test_second_epoch_reads_the_local_disk(s3_server: S3Server, tmp_path: Path) -> None:
    lines = [b"%06d" % number for number in range(3_000_000)]
    s3_server.put("bucket/x.txt", b"\n".join(lines))  # three blocks
    cache = hr.StorageCache(str(tmp_path / "cache"), 100 << 20)
    options = {**s3_server.options, "cache": cache}
    dataset = hr.TextLineDataset("s3://bucket/x.txt", storage_options=options)

    assert list(dataset) == lines
    assert s3_server.count_gets() == 3
    assert list(dataset) == lines
    assert s3_server.count_gets() == 3

    s3_server.put("bucket/x.txt", b"new")
    assert list(dataset) == [b"new"]


def test_any_range_of_a_cached_file_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    for module in ("block_cache", "remote_stream"):
        monkeypatch.setattr(f"headrace.storage.{module}.BLOCK_BYTES", 10)
    system = fsspec.filesystem("memory")
    content = bytes(range(95))
    system.pipe_file("/cached/x", content)
    options = StorageOptions({"cache": StorageCache(str(tmp_path), 1 << 20)})
    for _ in range(2):
        stream: Any = open_file("memory://cached/x", "", 7, options)
        assert stream.read(50) == content[7:57]
        assert stream.seek(-5, os.SEEK_END) == 90
        assert stream.read(50) == content[90:]
        assert stream.read(1) == b""
        stream.seek(20)
        assert stream.read() == content[20:]
        stream.close()
    system.rm("/cached", recursive=True)
