"""Hugging Face datasets: read from their tables and files where the values are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tqdm

import headrace as hr
from headrace.sources.hugging_face import HuggingFaceRows, find_parquet_rows
from headrace.testing.conformance import check_source

tqdm.tqdm.monitor_interval = 0  # a thread of progress bars, which would not end

NAMES = ["ant", "bee"]
FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=NAMES),
        "half": datasets.Value("float32"),
        "box": datasets.List(datasets.Value("int32"), length=2),
        "inner": {"flag": datasets.Value("bool"), "raw": datasets.Value("binary")},
    }
)


def make_row(number: int) -> dict[str, Any]:
    return {
        "text": f"row {number}",
        "label": number % 2,
        "half": number / 2,
        "box": [number, -number],
        "inner": {"flag": number % 3 == 0, "raw": b"\0" * (number % 4)},
    }


@pytest.fixture
def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list([make_row(n) for n in range(30)], features=FEATURES)


def assert_rows(found: Any, numbers: Any) -> None:
    """Check that elements are the rows with these numbers."""
    found = list(found)
    assert len(found) == len(numbers)
    for element, number in zip(found, numbers, strict=True):
        expected = make_row(number)
        assert element["text"] == expected["text"]
        assert element["label"].dtype == np.int64
        assert element["label"] == expected["label"]
        assert element["half"].dtype == np.float32
        assert element["half"] == expected["half"]
        assert element["box"].dtype == np.int32
        assert element["box"].tolist() == expected["box"]
        assert element["inner"]["flag"] == expected["inner"]["flag"]
        assert element["inner"]["raw"] == expected["inner"]["raw"]


def test_the_source_of_a_table_conforms(rows: datasets.Dataset) -> None:
    source = HuggingFaceRows.of_dataset(rows)
    assert source is not None
    check_source(source, list(hr.Dataset.from_source(source)))
    assert_rows(hr.Dataset.from_source(source), range(30))


def test_selected_shuffled_and_empty_datasets_have_their_own_rows(rows: datasets.Dataset) -> None:
    assert_rows(hr.Dataset.from_pipeline(rows.select([7, 3, 3])), [7, 3, 3])
    shuffled = rows.shuffle(seed=1)
    expected = [int(text.removeprefix("row ")) for text in shuffled["text"]]
    assert_rows(hr.Dataset.from_random_access(shuffled), expected)
    assert_rows(hr.Dataset.from_pipeline(rows.select([])), [])
    texts = hr.Dataset.from_pipeline(rows.select_columns(["text"]))
    assert next(iter(texts)) == {"text": "row 0"}
    joined = datasets.concatenate_datasets([rows.select(range(4)), rows.select([9])])
    assert_rows(hr.Dataset.from_pipeline(joined), [0, 1, 2, 3, 9])


def test_shuffled_batches_resume_at_each_position(rows: datasets.Dataset) -> None:
    shuffled = hr.Dataset.from_pipeline(rows).shuffle(30, seed=2, reshuffle_each_iteration=False)
    dataset = shuffled.batch(4)
    expected = [batch["text"].tolist() for batch in dataset]
    iterator = iter(dataset)
    for position in range(8):
        resumed = iter(dataset)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        assert [batch["text"].tolist() for batch in resumed] == expected[position:]
        next(iterator)


def test_lists_of_different_lengths_are_arrays() -> None:
    tokens = [[number] * (number % 5) for number in range(30)]
    features = datasets.Features({"tokens": datasets.List(datasets.Value("int32"))})
    rows = datasets.Dataset.from_dict({"tokens": tokens}, features=features)
    assert HuggingFaceRows.of_dataset(rows) is not None
    found = [row["tokens"] for row in hr.Dataset.from_pipeline(rows)]
    assert {array.dtype for array in found} == {np.dtype(np.int32)}
    assert [array.tolist() for array in found] == tokens
    found[3][:] = 0  # they belong to the caller
    shuffled = hr.Dataset.from_pipeline(rows).shuffle(30, seed=1)
    assert sorted(row["tokens"].tolist() for row in shuffled) == sorted(tokens)


@pytest.mark.parametrize("change", ["nulls", "text lists", "format", "image", "transform"])
def test_values_that_datasets_must_make_are_made_by_it(rows: datasets.Dataset, change: str) -> None:
    if change == "nulls":
        rows = datasets.Dataset.from_dict({"text": ["a", None]})
    elif change == "text lists":
        rows = datasets.Dataset.from_dict({"words": [["a"], ["b", "c"]]})
    elif change == "format":
        rows = rows.with_format("numpy")
    elif change == "transform":
        rows = rows.with_transform(lambda batch: {"n": [len(text) for text in batch["text"]]})
    else:
        image = {"bytes": hr.io.encode_png(np.zeros((2, 2, 3), np.uint8)), "path": None}
        rows = datasets.Dataset.from_dict({"image": [image]})
        rows = rows.cast_column("image", datasets.Image(decode=False))
    assert HuggingFaceRows.of_dataset(rows) is None
    dataset = hr.Dataset.from_pipeline(rows)
    assert len(dataset) == len(rows)
    assert list(next(iter(dataset))) == list(rows[0])


# --- streams ------------------------------------------------------------------------------------


def stream(path: Path, *tables: Any) -> datasets.IterableDataset:
    """Return a stream of Parquet files with a row group for each 10 rows."""
    names = []
    for number, table in enumerate(tables):
        names.append(str(path / f"{number}.parquet"))
        pyarrow.parquet.write_table(table, names[-1], row_group_size=10)
    return datasets.load_dataset(
        "parquet", data_files=names, split="train", streaming=True, cache_dir=str(path)
    )


def table_of(numbers: range) -> Any:
    return pa.Table.from_pylist([make_row(n) for n in numbers], schema=FEATURES.arrow_schema)


def test_a_stream_of_parquet_files_is_read_by_row_groups(tmp_path: Path) -> None:
    texts = stream(tmp_path, table_of(range(25)), table_of(range(25, 30)))
    source = find_parquet_rows(texts)
    assert source is not None
    assert source.size == 4
    dataset = hr.Dataset.from_pipeline(texts)
    assert len(dataset) == 30
    assert_rows(dataset, range(30))
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        distribute = hr.service.distribute("distributed_epoch", cluster.target)
        found = sorted(dataset.apply(distribute), key=lambda row: float(row["half"]))
    assert_rows(found, range(30))


def test_changed_streams_are_read_by_datasets(tmp_path: Path) -> None:
    texts = stream(tmp_path, table_of(range(30)))
    for changed in (
        texts.map(lambda row: row),
        texts.shuffle(seed=1),
        texts.take(3),
        texts.with_format("numpy"),
        texts.shard(num_shards=1, index=0).filter(lambda row: True),
    ):
        assert find_parquet_rows(changed) is None
    begun = stream(tmp_path, table_of(range(30)))
    iterator = iter(begun)
    next(iterator)
    begun.load_state_dict(begun.state_dict())
    assert find_parquet_rows(begun) is None


def test_streams_with_nulls_yield_none(tmp_path: Path) -> None:
    texts = stream(tmp_path, pa.table({"text": ["a", None]}))
    assert find_parquet_rows(texts) is None
    assert list(hr.Dataset.from_pipeline(texts)) == [{"text": "a"}, {"text": None}]
