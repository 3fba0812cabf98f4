"""ArrayRecord files: records by index."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from array_record.python import array_record_module

import headrace as hr
from headrace.errors import DataLossError, NotFoundError
from headrace.plan.source import IndexedSource
from headrace.sources.array_record import ArrayRecordSource
from headrace.testing.conformance import check_source, read_all


def test_missing_files_and_urls_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"No such file: '.*none'"):
        hr.ArrayRecordDataset(tmp_path / "none")
    with pytest.raises(NotFoundError, match=r"No files matched pattern: '.*none\*'"):
        hr.ArrayRecordDataset([tmp_path / "none*"])
    with pytest.raises(ValueError, match=r"must be local files, but got 's3://bucket/x'"):
        hr.ArrayRecordDataset("s3://bucket/x")


def write(path: Path, records: list[bytes], options: str = "group_size:1") -> str:
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


RECORDS = [b"%d\0" % number * (number % 5) for number in range(40)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [
        write(tmp_path / "1.array_record", RECORDS[:7]),
        write(tmp_path / "2.array_record", []),
        write(tmp_path / "3.array_record", RECORDS[7:], "group_size:4"),
    ]


def test_source_conforms(files: list[str]) -> None:
    source = ArrayRecordSource.from_files(files)

    assert isinstance(source, IndexedSource)
    assert source.counts == (7, 0, 33)
    check_source(source, RECORDS)
    rows = np.array([[39, 0], [7, 7]])
    assert source.gather(rows).tolist() == [[RECORDS[39], RECORDS[0]], [RECORDS[7], RECORDS[7]]]


def test_names_and_patterns(files: list[str], tmp_path: Path) -> None:
    assert list(hr.ArrayRecordDataset(f"{tmp_path}/*.array_record")) == RECORDS
    assert list(hr.ArrayRecordDataset(f"file://{files[0]}")) == RECORDS[:7]
    assert list(hr.ArrayRecordDataset(files[::-1])) == RECORDS[7:] + RECORDS[:7]
    names = hr.Dataset.list_files(f"{tmp_path}/*.array_record", shuffle=False)
    assert list(hr.ArrayRecordDataset(names)) == RECORDS
    assert list(names.interleave(hr.ArrayRecordDataset, cycle_length=1)) == RECORDS
    assert list(hr.ArrayRecordDataset(files[1])) == []


def test_shuffled_iterators_resume_at_any_element(files: list[str]) -> None:
    dataset = hr.ArrayRecordDataset(files).shuffle(40, seed=1, reshuffle_each_iteration=False)
    expected = list(dataset)
    assert sorted(expected) == sorted(RECORDS)
    assert expected != RECORDS
    for count in range(41):
        with iter(dataset) as iterator:
            assert [next(iterator) for _ in range(count)] == expected[:count]
            state = iterator.get_state()
        with iter(dataset) as iterator:
            iterator.set_state(state)
            assert list(iterator) == expected[count:]


def test_source_is_pickled_without_open_files(files: list[str]) -> None:
    source = ArrayRecordSource.from_files(files)
    source.gather(np.arange(40))
    copy = pickle.loads(pickle.dumps(source))

    assert copy == source
    assert read_all(copy.open(0, 40)) == RECORDS


def test_damaged_record_fails_alone(files: list[str], tmp_path: Path) -> None:
    records = [bytes([65 + number]) * 50 for number in range(20)]
    path = Path(write(tmp_path / "x", records, "group_size:1,uncompressed"))
    content = bytearray(path.read_bytes())
    content[content.index(records[7]) + 20] ^= 1
    path.write_bytes(content)
    iterator = iter(hr.ArrayRecordDataset([files[0], path]))

    assert [next(iterator) for _ in range(14)] == RECORDS[:7] + records[:7]
    with pytest.raises(DataLossError, match=r"x': cannot read record 7: Corrupted.* at byte "):
        next(iterator)
    assert list(iterator) == records[8:]


def test_damaged_file_is_an_error_when_the_dataset_is_created(
    files: list[str], tmp_path: Path
) -> None:
    content = Path(files[0]).read_bytes()
    for damaged in (b"", b"some text", content[:-10], content[: len(content) // 2]):
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        with pytest.raises(DataLossError, match=r"or damaged \(\d+ bytes\): \w"):
            hr.ArrayRecordDataset([files[0], path])


def test_changed_file_is_an_error(files: list[str]) -> None:
    dataset = hr.ArrayRecordDataset(files)
    write(Path(files[0]), RECORDS[:5])

    with pytest.raises(DataLossError, match=r"has 5 records, but it had 7 when the dataset was"):
        next(iter(dataset))
    Path(files[0]).unlink()
    with pytest.raises(NotFoundError, match="No such file"):
        next(iter(dataset))


@pytest.mark.parametrize("ordered", [False, True])
def test_workers_share_the_records(files: list[str], ordered: bool) -> None:
    dataset = hr.ArrayRecordDataset(files)

    with hr.service.LocalCluster(2, processes=False) as cluster:
        distribute = hr.service.distribute("distributed_epoch", cluster.target, ordered=ordered)
        found = list(dataset.apply(distribute))

    assert found == RECORDS if ordered else sorted(found) == sorted(RECORDS)
