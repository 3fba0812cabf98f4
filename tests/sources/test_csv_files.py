"""CSV files, compared with the csv module."""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.csv
import pytest

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError
from headrace.sources.csv_files import CsvSource, find_columns, find_dtype
from headrace.sources.csv_syntax import CsvSyntax
from headrace.testing.conformance import assert_equal, check_source

# Its first call opens a pipe for signals, which it keeps.
pyarrow.csv.read_csv(pyarrow.BufferReader(b"a\n1\n"))

COLUMNS = ("id", "score", "text", "ok")
DTYPES = tuple(map(np.dtype, (np.int64, np.float64, np.str_, np.bool_)))
ROWS: list[dict[str, Any]] = [
    {
        "id": np.int64(number),
        "score": np.float64(number / 4),
        "text": f"é, {number}" * (number % 3),
        "ok": np.bool_(number % 3 == 0),
    }
    for number in range(30)
]


def write(path: Path, rows: list[dict[str, Any]], columns: Any = COLUMNS, **style: Any) -> str:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, **style)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def names(tmp_path: Path) -> tuple[str, ...]:
    """Two files with different orders of columns and line ends, and an empty one between."""
    first = write(tmp_path / "a.csv", ROWS[:20], lineterminator="\n")
    (tmp_path / "b.csv").touch()
    last = write(tmp_path / "c.csv", ROWS[20:], COLUMNS[::-1], lineterminator="\r\n")
    return first, str(tmp_path / "b.csv"), last


def test_rows_are_elements_with_inferred_dtypes(names: tuple[str, ...]) -> None:
    dataset = hr.CsvDataset(names)

    assert_equal(list(dataset), ROWS)
    assert dataset.element_spec == {
        name: ArraySpec((), dtype) for name, dtype in zip(COLUMNS, DTYPES, strict=True)
    }
    assert next(iter(dataset.batch(30)))["score"].tolist() == [row["score"] for row in ROWS]


@pytest.mark.parametrize("part_bytes", [7, 100, 1000])
@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_parts_give_the_same_rows(
    names: tuple[str, ...], part_bytes: int, block_bytes: int
) -> None:
    counts = tuple(max(1, Path(name).stat().st_size // part_bytes) for name in names)

    check_source(CsvSource(names, None, counts, part_bytes, block_bytes, COLUMNS, DTYPES), ROWS)


@pytest.mark.parametrize("block_bytes", [1, 20, 1 << 20])
def test_values_with_line_breaks(tmp_path: Path, block_bytes: int) -> None:
    rows = [{"a": np.int64(k), "b": 'x\n"\n"' * (k % 3), "c": "\r\n" * (k % 2)} for k in range(9)]
    name = write(tmp_path / "x.csv", rows, ("a", "b", "c"), lineterminator="\n")

    dataset = hr.CsvDataset(name, newlines_in_values=True)

    assert_equal(list(dataset), rows)
    syntax = CsvSyntax(newlines_in_values=True)
    columns, dtypes = find_columns([name], None, {}, syntax)
    check_source(
        CsvSource((name,), block_bytes=block_bytes, columns=columns, dtypes=dtypes, syntax=syntax),
        rows,
    )
    with pytest.raises(DataLossError, match="newlines_in_values=True"):
        list(hr.CsvDataset(name))


def test_columns_and_dtypes_are_chosen(names: tuple[str, ...]) -> None:
    dataset = hr.CsvDataset(names, columns=["text", "id"], dtypes={"id": "float32", "text": bytes})

    assert_equal(
        list(dataset),
        [{"text": row["text"].encode(), "id": np.float32(row["id"])} for row in ROWS],
    )


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "bool", str, bytes, "M8[s]"])
def test_supported_dtypes(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "x.csv"
    text = "2020-01-02" if dtype == "M8[s]" else "1"
    path.write_text(f"a\n{text}\n{text}")

    dataset = hr.CsvDataset(path, dtypes={"a": dtype})

    expected: Any = {str: text, bytes: text.encode()}.get(dtype)
    expected = np.array(text).astype(dtype)[()] if expected is None else expected
    if dtype == "bool":
        expected = np.True_
    assert_equal(list(dataset), [{"a": expected}] * 2)
    assert dataset.element_spec == {"a": ArraySpec((), dtype)}


@pytest.mark.parametrize("dtype", ["float16", "complex64", "M8", "V3", "nonsense", 3])
def test_unsupported_dtypes_are_rejected(dtype: Any) -> None:
    with pytest.raises(TypeError, match="`dtypes` of column 'a' must be"):
        find_dtype("a", dtype)


def test_files_without_header(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("\ufeff1\t'a\tb'\n2\tc\n")

    default = hr.CsvDataset(path, header=False, delimiter="\t", quote="'")
    assert_equal(list(default), [{"f0": np.int64(1), "f1": "a\tb"}, {"f0": np.int64(2), "f1": "c"}])
    named = hr.CsvDataset(path, ["n", "s"], header=False, delimiter="\t", quote="'")
    assert [row["s"] for row in named] == ["a\tb", "c"]
    unquoted = hr.CsvDataset(path, list("abc"), None, False, "\t", "", None)
    with pytest.raises(DataLossError, match="Expected 3 columns, got 2"):
        list(unquoted)


def test_empty_values(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b,c\n,,1.5\n3,"",\n')

    rows = list(hr.CsvDataset(path))

    assert_equal([row["b"] for row in rows], ["", ""])
    assert [float(row["a"]) for row in rows][1] == 3
    assert np.isnan(rows[0]["a"])
    assert np.isnan(rows[1]["c"])
    iterator = iter(hr.CsvDataset(path, dtypes={"a": int}))
    with pytest.raises(InvalidArgumentError, match=r"byte 6 .* column 'a' .* int64: .* empty"):
        next(iterator)
    assert next(iterator)["a"] == 3


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("x,1", InvalidArgumentError, r"column 'a' that does not fit its dtype int64: .* 'x'"),
        ("1", DataLossError, "Expected 2 columns, got 1"),
        ("1,2,3", DataLossError, "Expected 2 columns, got 3"),
        ("1,\ud8ff", InvalidArgumentError, "column 'b' .* UTF8"),
    ],
)
def test_damaged_row_raises_in_its_turn(
    tmp_path: Path, line: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "x.csv"
    text = "a,b\n" + "1,one\n" * 9 + line + "\n" + line + "\n2,two\n"
    path.write_bytes(text.encode(errors="surrogatepass"))
    iterator = iter(hr.CsvDataset(path, dtypes={"a": int, "b": str}))

    assert [next(iterator)["b"] for _ in range(9)] == ["one"] * 9
    with pytest.raises(error, match=rf"the row at byte 58 of '.*x\.csv' .*{message}"):
        next(iterator)
    with pytest.raises(error, match=message):
        next(iterator)
    assert [row["a"] for row in iterator] == [2]


def test_ambiguous_quotes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,5" pipe\n2,"x\ny"\n')

    with pytest.raises(DataLossError, match="quote within a value at byte 7"):
        list(hr.CsvDataset(path, dtypes={"a": int, "b": str}, newlines_in_values=True))


def test_unterminated_quote_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,x\n2,"y\n3,5"\n')
    arguments: dict[str, Any] = {"dtypes": {"a": int, "b": str}}

    for newlines_in_values in (False, True):
        path.write_text(path.read_text()[: -2 if newlines_in_values else None])
        iterator = iter(hr.CsvDataset(path, newlines_in_values=newlines_in_values, **arguments))
        assert next(iterator)["b"] == "x"
        with pytest.raises(DataLossError, match="byte 8 "):
            list(iterator)


def test_headers_must_have_the_columns(names: tuple[str, ...], tmp_path: Path) -> None:
    other = write(tmp_path / "d.csv", [], ("id", "text"))
    twice = tmp_path / "twice.csv"
    twice.write_text("a,a\n1,2\n")

    with pytest.raises(InvalidArgumentError, match="has no column 'x'; its header is"):
        hr.CsvDataset(names, columns=["x"])
    with pytest.raises(InvalidArgumentError, match="`dtypes` names 'x'"):
        hr.CsvDataset(names, dtypes={"x": int})
    with pytest.raises(InvalidArgumentError, match="has a name twice"):
        hr.CsvDataset(twice)
    iterator = iter(hr.CsvDataset([names[0], other, names[2]]))
    assert len([next(iterator) for _ in range(20)]) == 20
    with pytest.raises(InvalidArgumentError, match=r"d\.csv' has no column 'score'"):
        next(iterator)
    assert len(list(iterator)) == 10


def test_missing_and_empty_files(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="gone"):
        hr.CsvDataset(tmp_path / "gone")
    with pytest.raises(NotFoundError, match="gone"):
        list(hr.CsvDataset([names[0], tmp_path / "gone"]))
    with pytest.raises(InvalidArgumentError, match="all files are empty"):
        hr.CsvDataset(names[1])
    assert list(hr.CsvDataset(names[1], ["a"], {"a": int})) == []
    assert_equal(list(hr.CsvDataset(names[::-1], COLUMNS)), [*ROWS[20:], *ROWS[:20]])
    (tmp_path / "head.csv").write_text("a,b\n")
    assert hr.CsvDataset(tmp_path / "head.csv").element_spec["a"] == ArraySpec((), str)


def test_files_are_named_by_datasets_and_urls(names: tuple[str, ...]) -> None:
    parallel = hr.CsvDataset(names, num_parallel_reads=2)
    assert sorted(row["id"] for row in parallel) == list(range(30))
    listed = hr.Dataset.from_tensor_slices([names[0], names[2]])
    assert [row["id"] for row in hr.CsvDataset(listed)] == list(range(30))
    url = "memory://csv_files/x.csv"
    with fsspec.open(url, "w") as file:
        file.write("a\n1\n")
    try:
        assert list(hr.CsvDataset(url)) == [{"a": 1}]
    finally:
        fsspec.filesystem("memory").rm("/csv_files", recursive=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delimiter": ""}, "`delimiter` must be one ASCII character"),
        ({"delimiter": "\n"}, "`delimiter` must be one ASCII character"),
        ({"quote": "''"}, "`quote` must be one ASCII character"),
        ({"quote": ","}, "must differ"),
        ({"columns": []}, "`columns` must be different names"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hr.CsvDataset("x", **arguments)


def test_error_of_a_compressed_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"a\n1\n"))

    with pytest.raises(DataLossError, match='is a GZIP file: pass compression_type="GZIP"'):
        hr.CsvDataset(tmp_path / "x.csv.gz")


@pytest.mark.parametrize("is_dataset", [False, True])
def test_compressed_files_are_read_and_resumed(names: tuple[str, ...], is_dataset: bool) -> None:
    for name in names:
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    given: Any = [f"{name}.gz" for name in names if Path(name).stat().st_size]
    if is_dataset:
        given = hr.Dataset.from_tensor_slices(given)
    dataset = hr.CsvDataset(given, COLUMNS, compression_type="GZIP")
    iterator = iter(dataset)
    found = [next(iterator) for _ in range(7)]
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert_equal([*found, *resumed], ROWS)


def test_types_of_arguments_are_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=r"`dtypes` must be a Mapping, but got .*map names"):
        hr.CsvDataset(names, dtypes=["int64"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`header` must be a bool"):
        hr.CsvDataset(names, header=["a", "b"])  # type: ignore[arg-type]


def test_workers_share_the_rows_of_a_file(names: tuple[str, ...]) -> None:
    counts = tuple(max(1, Path(name).stat().st_size // 100) for name in names)
    source = CsvSource(names, None, counts, 100, columns=COLUMNS, dtypes=DTYPES)
    dataset = hr.Dataset.from_source(source)

    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        spread = dataset.apply(hr.service.distribute("distributed_epoch", cluster.target))
        assert sorted(row["id"] for row in spread) == list(range(30))
        ordered = dataset.apply(
            hr.service.distribute("distributed_epoch", cluster.target, ordered=True)
        )
        assert_equal(list(ordered), ROWS)


def test_iterator_resumes_at_every_row(names: tuple[str, ...]) -> None:
    dataset = hr.CsvDataset(names)
    iterator = iter(dataset)
    for count in range(31):
        resumed = iter(dataset)
        resumed.set_state(iterator.get_state())
        assert_equal(list(resumed), ROWS[count:])
        next(iterator, None)


def test_pyarrow_is_imported_on_use_only(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import headrace as hr; hr.JsonLinesDataset\n"
        "try: hr.CsvDataset('x', ['a'], {'a': int})\n"
        "except hr.errors.FailedPreconditionError as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "pip install 'headrace[arrow]'" in found.stdout


def test_types_are_inferred_silently_beside_rows_that_are_not_utf8(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.csv"
    path.write_bytes(b"a,b\n1,2\n3\xff\n5,6\n")
    iterator = iter(hr.CsvDataset(path))
    assert next(iterator) == {"a": 1, "b": 2}
    with pytest.raises(hr.errors.DataLossError, match=r"damaged\.csv"):
        next(iterator)
    assert next(iterator) == {"a": 5, "b": 6}
    assert not capfd.readouterr().err
