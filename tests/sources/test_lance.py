"""Lance datasets: rows of one version, by index."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError, UnavailableError
from headrace.saved.schema import FileSchema
from headrace.sources.lance import LanceRows
from headrace.testing.conformance import check_source

ROWS = 25


def make_table(numbers: range) -> Any:
    return pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "tokens": pa.array([[n] * (n % 4) for n in numbers], pa.list_(pa.int64())),
            "text": [f"text {n}" for n in numbers],
            "vector": pa.array([[n, 0.5] for n in numbers], pa.list_(pa.float32(), 2)),
        }
    )


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start Lance's threads, which live as long as the process."""
    lance.write_dataset(make_table(range(1)), str(tmp_path_factory.mktemp("lance") / "x.lance"))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Write a dataset of two versions; the second one has all rows."""
    name = str(tmp_path / "rows.lance")
    lance.write_dataset(make_table(range(10)), name)
    lance.write_dataset(make_table(range(10, ROWS)), name, mode="append")
    return name


def assert_rows(rows: Any, numbers: Any) -> None:
    """Check that elements are the rows with these numbers."""
    rows = list(rows)
    assert [int(row["number"]) for row in rows] == list(numbers)
    for row, n in zip(rows, numbers, strict=True):
        assert list(row) == ["number", "tokens", "text", "vector"]
        assert row["number"].dtype == np.int32
        assert (row["tokens"].dtype, row["tokens"].tolist()) == (np.int64, [n] * (n % 4))
        assert row["text"] == f"text {n}"
        assert (row["vector"].dtype, row["vector"].tolist()) == (np.float32, [n, 0.5])


def test_the_source_conforms(path: str) -> None:
    source = LanceRows.of_dataset(path, None, None, None)
    check_source(source, list(hr.Dataset.from_source(source)))
    assert pickle.loads(pickle.dumps(source)) == source


def test_rows_have_all_columns_or_the_selected_ones(path: str) -> None:
    assert_rows(hr.LanceDataset(path), range(ROWS))
    assert len(hr.LanceDataset(Path(path))) == ROWS
    assert next(iter(hr.LanceDataset(path, columns=["text"]))) == {"text": "text 0"}


def test_an_older_version_is_read_and_later_rows_do_not_appear(path: str) -> None:
    assert_rows(hr.LanceDataset(path, version=1), range(10))
    dataset = hr.LanceDataset(path)
    lance.write_dataset(make_table(range(90, 99)), path, mode="overwrite")
    assert_rows(dataset, range(ROWS))
    with pytest.raises(NotFoundError, match=r"No such Lance dataset: version 9 of '.*rows\.lance'"):
        hr.LanceDataset(path, version=9)


def test_shuffled_iterators_resume_at_each_row(path: str) -> None:
    dataset = hr.LanceDataset(path).shuffle(ROWS, seed=1, reshuffle_each_iteration=False)
    expected = [int(row["number"]) for row in dataset]
    assert sorted(expected) == list(range(ROWS)) != expected
    iterator = iter(dataset)
    for position in range(ROWS):
        resumed = iter(dataset)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        assert_rows(resumed, expected[position:])
        next(iterator)


@pytest.mark.parametrize("ordered", [False, True])
def test_workers_read_each_row_once(path: str, ordered: bool) -> None:
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        distribute = hr.service.distribute("distributed_epoch", cluster.target, ordered=ordered)
        rows = list(hr.LanceDataset(path).apply(distribute))
    assert_rows(rows if ordered else sorted(rows, key=lambda row: int(row["number"])), range(ROWS))


def test_missing_datasets_and_columns_are_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"No such Lance dataset: '.*none'"):
        hr.LanceDataset(tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match=r"no column 'label'; its columns are \['num"):
        hr.LanceDataset(path, columns=["number", "label"])


def test_columns_without_numpy_values_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x.lance")
    lance.write_dataset(pa.table({"words": [["a"], ["b", "c"]]}), path)
    with pytest.raises(InvalidArgumentError, match=r"x\.lance': column \['words'\] has lists of"):
        hr.LanceDataset(path)


def test_a_null_fails_for_its_row_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "x.lance")
    lance.write_dataset(pa.table({"n": [1, None, 3], "x": [0.5, None, 1.5]}), path)
    iterator = iter(hr.LanceDataset(path))
    assert next(iterator) == {"n": 1, "x": 0.5}
    with pytest.raises(InvalidArgumentError, match=r"row 1 of '.*x\.lance': column 'n' is null"):
        next(iterator)
    assert next(iterator) == {"n": 3, "x": 1.5}
    floats = [float(row["x"]) for row in hr.LanceDataset(path, columns=["x"])]
    assert np.array_equal(floats, [0.5, np.nan, 1.5], equal_nan=True)


def test_lost_files_are_errors(path: str) -> None:
    dataset = hr.LanceDataset(path)
    shutil.rmtree(Path(path) / "data")
    with pytest.raises(DataLossError, match=r"rows\.lance': \d+ rows from row 0 cannot be read"):
        next(iter(dataset))


class FailingDataset:
    def take(self, indices: list[int], columns: list[str]) -> None:
        raise OSError("connection lost")


@pytest.mark.parametrize(
    ("uri", "kind"), [("s3://b/x.lance", UnavailableError), ("/x.lance", DataLossError)]
)
def test_rows_that_cannot_be_reached_are_not_damaged(uri: str, kind: type[Exception]) -> None:
    rows = LanceRows(uri, 1, (), FileSchema(None, ()), 3)
    object.__setattr__(rows, "_dataset", SimpleNamespace(open=lambda *_: FailingDataset()))
    with pytest.raises(kind, match=r"rows from row 1 cannot be read: connection lost"):
        rows.take(np.array([1, 2]))
