"""JSON Lines files, compared with the json module."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import headrace as hr
from headrace.element.normalize import normalize
from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError
from headrace.sources import json_lines
from headrace.sources.json_lines import JsonLinesSource
from headrace.testing.conformance import assert_equal, check_source

ROWS: list[dict[str, Any]] = [
    {
        "id": number,
        "score": number / 4,
        "ok": number % 3 == 0,
        "text": "é\n" * (number % 4),
        "vector": [number, number + 1],
        "ragged": [0.5] * (1 + number % 3),
        "nested": {"a": [[number]]},
        "empty": None,
    }
    for number in range(40)
]
MIXED: list[dict[str, Any]] = [
    {"id": 1, "x": [1, 2]},
    {"id": 2.5, "x": [1, 2.5]},
    {"id": 2**63, "x": []},
    {"id": "é", "x": ["a", "b"]},
    {"other": True},
    {},
    {"id": float("inf"), "x": [True, False], "y": [1, True]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(params=["installed parser", "json"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "json":
        monkeypatch.setattr(json_lines, "_find_parser", lambda: json.loads)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["uniform", "mixed"])
def test_lines_are_elements(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    name = write(tmp_path / "x.jsonl", rows)
    expected = [normalize(json.loads(json.dumps(row))) for row in rows]

    assert_equal(list(hr.JsonLinesDataset(name)), expected)
    size = Path(name).stat().st_size
    for part_bytes, block_bytes in ((100, 300), (size, 1)):
        counts = (round(size / part_bytes),)
        check_source(JsonLinesSource((name,), None, counts, part_bytes, block_bytes), expected)


@pytest.mark.usefixtures("parser")
def test_columns_are_selected_and_ordered(tmp_path: Path) -> None:
    name = write(tmp_path / "x.jsonl", ROWS)

    dataset = hr.JsonLinesDataset(name, columns=["score", "id", "vector"])

    assert [list(row) for row in dataset] == [["score", "id", "vector"]] * 40
    batch = next(iter(dataset.batch(40)))
    np.testing.assert_array_equal(batch["vector"], [row["vector"] for row in ROWS])
    assert batch["score"].dtype == np.float64


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("{", DataLossError, "is not JSON"),
        ('{"id": 1} {"id": 2}', DataLossError, "is not JSON"),
        ("[1]", InvalidArgumentError, "is a JSON array, but must be an object"),
        ("7", InvalidArgumentError, "is a JSON number"),
        ('{"x": 1}', InvalidArgumentError, r"has no key 'id'; its keys are \['x'\]"),
        ('{"id": [[1], [1, 2]]}', InvalidArgumentError, r"cannot be an element: component \['id'"),
    ],
)
def test_damaged_line_raises_in_its_turn(
    tmp_path: Path, line: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"id": 1}}\n\n{line}\n  \n{{"id": 2}}\n')
    iterator = iter(hr.JsonLinesDataset(path, columns=["id"]))

    assert next(iterator) == {"id": 1}
    with pytest.raises(error, match=rf"the line at byte 11 of '.*x\.jsonl' {message}"):
        next(iterator)
    assert list(iterator) == [{"id": 2}]


def test_compressed_and_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    data = gzip.compress(b'{"id": 1}\n{"id": 2}')
    path.write_bytes(data)
    assert list(hr.JsonLinesDataset(path, compression_type="GZIP")) == [{"id": 1}, {"id": 2}]

    path.write_bytes(data[:-4])
    iterator = iter(hr.JsonLinesDataset(path, compression_type="GZIP"))
    assert next(iterator) == {"id": 1}
    with pytest.raises(DataLossError, match="truncated"):
        next(iterator)
    assert list(iterator) == []


def test_error_of_a_compressed_file_names_the_argument(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))

    with pytest.raises(DataLossError, match=r'a GZIP file: pass compression_type="GZIP"'):
        next(iter(hr.JsonLinesDataset(tmp_path / "x.jsonl.gz")))


def test_files_are_named_by_lists_datasets_and_urls(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{k}.jsonl", [{"id": k}] * 2) for k in range(3)]
    (tmp_path / "3.jsonl").touch()
    expected = [0, 0, 1, 1, 2, 2]

    assert [row["id"] for row in hr.JsonLinesDataset([*names, tmp_path / "3.jsonl"])] == expected
    parallel = hr.JsonLinesDataset(names, num_parallel_reads=2)
    assert sorted(row["id"] for row in parallel) == expected
    listed = hr.Dataset.list_files(str(tmp_path / "*.jsonl"), shuffle=False)
    assert [row["id"] for row in hr.JsonLinesDataset(listed)] == expected
    url = "memory://json_lines/x.jsonl"
    with fsspec.open(url, "w") as file:
        file.write('{"id": 5}')
    try:
        assert list(hr.JsonLinesDataset(url)) == [{"id": 5}]
    finally:
        fsspec.filesystem("memory").rm("/json_lines", recursive=True)
    with pytest.raises(NotFoundError, match="gone"):
        list(hr.JsonLinesDataset(tmp_path / "gone"))


def test_invalid_columns_are_rejected() -> None:
    with pytest.raises(TypeError, match="must be a list of names"):
        hr.JsonLinesDataset("x", columns="id")
    with pytest.raises(ValueError, match="must be different names"):
        hr.JsonLinesDataset("x", columns=["a", "a"])


def test_iterator_resumes_at_every_row_of_several_parts(tmp_path: Path) -> None:
    names = tuple(write(tmp_path / f"{k}.jsonl", ROWS[:9]) for k in range(2))
    source = JsonLinesSource(names, None, (3, 3), 400, 100)
    expected = list(hr.Dataset.from_source(source))
    assert len(expected) == 18

    for count in range(19):
        iterator = iter(hr.Dataset.from_source(source))
        for _ in range(count):
            next(iterator)
        resumed = iter(hr.Dataset.from_source(source))
        resumed.set_state(iterator.get_state())
        assert_equal(list(resumed), expected[count:])
