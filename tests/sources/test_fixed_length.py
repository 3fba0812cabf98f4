"""Files of records of one length."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import headrace as hr
from headrace.errors import DataLossError, NotFoundError
from headrace.plan.source import IndexedSource
from headrace.sources.fixed_length import (
    FixedLengthFilesSource,
    FixedLengthRecordsSource,
    make_fixed_length_source,
)
from headrace.testing.conformance import check_source

RECORDS = [b"%03d" % number for number in range(20)]


@pytest.fixture
def names(tmp_path: Path) -> tuple[str, ...]:
    paths = [tmp_path / name for name in "abc"]
    for path, records in zip(paths, (RECORDS[:12], [], RECORDS[12:]), strict=True):
        path.write_bytes(b"head" + b"".join(records) + b"ft")
    return tuple(map(str, paths))


def test_records_of_local_files_are_indexed(names: tuple[str, ...]) -> None:
    source = make_fixed_length_source(names, 3, 4, 2)

    assert isinstance(source, FixedLengthRecordsSource)
    check_source(source, RECORDS)
    dataset = hr.FixedLengthRecordDataset(names, 3, 4, 2)
    assert len(dataset) == 20
    assert sorted(dataset.shuffle(20, seed=1)) == RECORDS
    assert sorted(hr.FixedLengthRecordDataset(names, 3, 4, 2, num_parallel_reads=2)) == RECORDS


@pytest.mark.parametrize("buffer_size", [None, 1, 5])
def test_files_are_read_in_order(names: tuple[str, ...], buffer_size: int | None) -> None:
    check_source(
        FixedLengthFilesSource(
            names, buffer_size=buffer_size, record_bytes=3, header_bytes=4, footer_bytes=2
        ),
        RECORDS,
    )


def test_records_by_url() -> None:
    url = "memory://fixed_length/x"
    with fsspec.open(url, "wb") as file:
        file.write(b"abcdef")
    try:
        assert list(hr.FixedLengthRecordDataset(url, 2)) == [b"ab", b"cd", b"ef"]
    finally:
        fsspec.filesystem("memory").rm("/fixed_length", recursive=True)


def test_incomplete_record_raises_after_the_others(names: tuple[str, ...]) -> None:
    with open(names[0], "ab") as file:
        file.write(b"x")
    source = make_fixed_length_source(names, 3, 4, 2)
    assert not isinstance(source, IndexedSource)
    iterator = iter(hr.Dataset.from_source(source))

    assert [next(iterator) for _ in range(12)] == RECORDS[:12]
    with pytest.raises(DataLossError, match=r"1 bytes after .* ends at byte 40"):
        next(iterator)
    assert list(iterator) == RECORDS[12:]


def test_missing_empty_and_tiny_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "tiny").write_bytes(b"abc")

    assert list(hr.FixedLengthRecordDataset(tmp_path / "empty", 3)) == []
    assert list(hr.FixedLengthRecordDataset(tmp_path / "empty", 3, 4)) == []
    with pytest.raises(DataLossError, match="has 3 bytes, fewer than its header of 4 bytes"):
        list(hr.FixedLengthRecordDataset(tmp_path / "tiny", 3, 4))
    with pytest.raises(NotFoundError, match="gone"):
        list(hr.FixedLengthRecordDataset(tmp_path / "gone", 3))
    with pytest.raises(ValueError, match="`record_bytes` must be at least 1"):
        hr.FixedLengthRecordDataset("x", 0)


def test_file_that_became_shorter_raises(names: tuple[str, ...]) -> None:
    dataset = hr.FixedLengthRecordDataset(names, 3, 4, 2)
    Path(names[0]).write_bytes(b"head" + RECORDS[0])

    with pytest.raises(DataLossError, match="when the dataset was created"):
        list(dataset)


def test_workers_share_the_records_of_a_file(names: tuple[str, ...]) -> None:
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        spread = hr.FixedLengthRecordDataset(names, 3, 4, 2).apply(
            hr.service.distribute("distributed_epoch", cluster.target)
        )
        assert sorted(spread) == RECORDS
