"""Parquet files: content against pyarrow, positions, filters, nulls, damage and workers."""

from __future__ import annotations

import datetime
import itertools
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from headrace.sources import parquet, parquet_files
from headrace.sources.parquet import ParquetSource
from headrace.testing.conformance import assert_equal, check_source, read_all


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "_MAX_BATCH_ROWS", 4)


def write(path: Path, table: pa.Table, group: int = 6, **options: Any) -> str:
    pq.write_table(table, path, row_group_size=group, **options)
    return str(path)


def numbered(start: int, stop: int) -> pa.Table:
    x = range(start, stop)
    return pa.table(
        {"x": pa.array(x, pa.int32()), "name": pa.array([f"row {n}" for n in x], pa.string())}
    )


def rows_of(start: int, stop: int) -> list[Any]:
    return [{"x": np.int32(n), "name": f"row {n}"} for n in range(start, stop)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    cuts = [(0, 14), (14, 14), (14, 20), (20, 33)]
    return [
        write(tmp_path / f"{number}.parquet", numbered(*cut)) for number, cut in enumerate(cuts)
    ]


# --- Content --------------------------------------------------------------------------------------

COLUMNS: list[tuple[Any, list[Any], list[Any], ArraySpec]] = [
    (pa.bool_(), [True, False], [np.True_, np.False_], ArraySpec((), bool)),
    (pa.uint8(), [0, 255], [np.uint8(0), np.uint8(255)], ArraySpec((), np.uint8)),
    (pa.int64(), [-1, 2**60], [np.int64(-1), np.int64(2**60)], ArraySpec((), np.int64)),
    (pa.float16(), np.float16([0.5, 2]), [np.float16(0.5), np.float16(2)], ArraySpec((), "f2")),
    (pa.float32(), [0.5, 2], [np.float32(0.5), np.float32(2)], ArraySpec((), "f4")),
    (pa.float64(), [0.5, -np.inf], [np.float64(0.5), np.float64(-np.inf)], ArraySpec((), "f8")),
    (pa.string(), ["", "é"], ["", "é"], ArraySpec((), str)),
    (pa.large_string(), ["a", "b"], ["a", "b"], ArraySpec((), str)),
    (pa.binary(), [b"", b"\xff"], [b"", b"\xff"], ArraySpec((), bytes)),
    (pa.binary(2), [b"ab", b"\0\0"], [b"ab", b"\0\0"], ArraySpec((), bytes)),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b"], ["a", "b"], ArraySpec((), str)),
    (
        pa.timestamp("us", "Europe/Berlin"),
        [0, 1],
        [np.datetime64(0, "us"), np.datetime64(1, "us")],
        ArraySpec((), "M8[us]"),
    ),
    (
        pa.date32(),
        [0, 19000],
        [np.datetime64(0, "D"), np.datetime64(19000, "D")],
        ArraySpec((), "M8[D]"),
    ),
    (
        pa.duration("ms"),
        [5, -5],
        [np.timedelta64(5, "ms"), np.timedelta64(-5, "ms")],
        ArraySpec((), "m8[ms]"),
    ),
    (
        pa.time32("ms"),
        [5, 86399999],
        [np.timedelta64(5, "ms"), np.timedelta64(86399999, "ms")],
        ArraySpec((), "m8[ms]"),
    ),
    (
        pa.list_(pa.int16()),
        [[1, 2, 3], []],
        [np.int16([1, 2, 3]), np.int16([])],
        ArraySpec((None,), np.int16),
    ),
    (
        pa.list_(pa.string()),
        [["a"], ["b", "c"]],
        [np.array(["a"], object), np.array(["b", "c"], object)],
        ArraySpec((None,), str),
    ),
    (
        pa.list_(pa.float32(), 2),
        [[1, 2], [3, 4]],
        [np.float32([1, 2]), np.float32([3, 4])],
        ArraySpec((2,), "f4"),
    ),
    (
        pa.list_(pa.list_(pa.float32(), 1)),
        [[[1], [2]], [[3]]],
        [np.float32([[1], [2]]), np.float32([[3]])],
        ArraySpec((None, 1), "f4"),
    ),
]


@pytest.mark.parametrize(
    ("kind", "values", "expected", "spec"), COLUMNS, ids=[str(column[0]) for column in COLUMNS]
)
def test_values_have_the_dtype_and_shape_of_the_column(
    tmp_path: Path, kind: Any, values: list[Any], expected: list[Any], spec: ArraySpec
) -> None:
    table = pa.table({"value": pa.array(list(values) * 5, kind)})
    source = ParquetSource.of_files(write(tmp_path / "x.parquet", table))

    assert source.element_spec == {"value": spec}
    check_source(source, [{"value": value} for value in expected * 5])


def test_tensors_have_their_shape(tmp_path: Path) -> None:
    values = np.arange(60, dtype="f4").reshape(10, 2, 3)
    table = pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    source = ParquetSource.of_files(write(tmp_path / "x.parquet", table))

    assert source.element_spec == {"t": ArraySpec((2, 3), "f4")}
    check_source(source, [{"t": value} for value in values])


def test_structs_are_dicts(tmp_path: Path) -> None:
    structs = [{"a": n, "b": {"c": str(n), "d": [n] * (n % 3)}} for n in range(10)]
    source = ParquetSource.of_files(
        write(tmp_path / "x.parquet", pa.table({"s": structs, "n": range(10)}))
    )
    expected = [
        {
            "s": {"a": np.int64(n), "b": {"c": str(n), "d": np.full(n % 3, n)}},
            "n": np.int64(n),
        }
        for n in range(10)
    ]

    check_source(source, expected)


@pytest.mark.parametrize(
    "kind", [pa.decimal128(5, 2), pa.list_(pa.list_(pa.int8())), pa.map_(pa.string(), pa.int8())]
)
def test_a_type_without_numpy_equivalent_is_refused(tmp_path: Path, kind: Any) -> None:
    table = pa.table({"x": [1], "odd": pa.nulls(1, kind)})
    name = write(tmp_path / "x.parquet", table)

    with pytest.raises(InvalidArgumentError, match=r"x\.parquet.*column 'odd' has type"):
        hr.ParquetDataset(name)
    assert list(hr.ParquetDataset(name, columns=["x"])) == [{"x": np.int64(1)}]


def test_columns_are_selected_and_ordered(files: list[str]) -> None:
    dataset = hr.ParquetDataset(files, columns=["name", "x"])

    assert list(dataset.element_spec) == ["name", "x"]
    assert list(next(iter(dataset)).items()) == [("name", "row 0"), ("x", np.int32(0))]
    with pytest.raises(InvalidArgumentError, match=r"has no column 'y'; its columns are 'x', 'n"):
        hr.ParquetDataset(files, columns=["y"])
    with pytest.raises(ValueError, match="different names"):
        hr.ParquetDataset(files, columns=["x", "x"])


# --- Indices and positions ------------------------------------------------------------------------


def test_an_index_is_a_row_group(files: list[str]) -> None:
    source = ParquetSource.of_files(files)

    assert [rows for _, _, rows in source.parts] == [6, 6, 2, 6, 6, 6, 1]
    assert source.paths == (*files[:1] * 3, *files[2:3], *files[3:] * 3)
    assert source.element_count == 33
    check_source(source, rows_of(0, 33))


def test_of_many_files_an_index_is_a_file(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MAX_FILES_WITH_PARTS", 3)
    source = ParquetSource.of_files(files)

    assert source.paths == tuple(files)
    assert source.element_count is None
    check_source(source, rows_of(0, 33))
    filtered = ParquetSource.of_files(files, None, [("x", "in", [3, 8, 13, 25])])
    check_source(filtered, [rows_of(n, n + 1)[0] for n in (3, 8, 13, 25)])


@pytest.mark.parametrize("filters", [None, [("x", ">", 8), ("x", "!=", 15)]])
def test_positions_do_not_depend_on_batches(
    files: list[str], filters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ParquetSource.of_files(files, None, filters)

    def positions(limit: int) -> dict[int, Any]:
        reader = source.open(0, source.size)
        found, count = {0: reader.get_position()}, 0
        while (chunk := reader.read(limit)) is not None:
            count += chunk.size
            found[count] = reader.get_position()
        return found

    one_by_one = positions(1)
    for batch_rows in (1, 3, 100):
        monkeypatch.setattr(parquet_files, "_MAX_BATCH_ROWS", batch_rows)
        for limit in (1, 2, 7):
            assert positions(limit).items() <= one_by_one.items()


def test_a_dataset_is_restored_at_every_row(files: list[str]) -> None:
    dataset = hr.ParquetDataset(files, filters=[("x", "not in", {4, 5, 20})], batch_size=3)
    iterator = iter(dataset)
    states, batches = [iterator.get_state()], []
    for batch in iterator:
        batches.append(batch["x"].tolist())
        states.append(iterator.get_state())

    assert list(itertools.chain(*batches)) == [n for n in range(33) if n not in {4, 5, 20}]
    for number, state in enumerate(states):
        resumed = iter(dataset)
        resumed.set_state(state)
        assert [batch["x"].tolist() for batch in resumed] == batches[number:]


@pytest.mark.parametrize("position", [[0], [9, 0], [0, -1], "x", [0, 0.5]])
def test_invalid_positions_are_rejected(files: list[str], position: Any) -> None:
    with pytest.raises(ValueError, match="position must be"):
        ParquetSource.of_files(files).open(0, 7, position)


# --- Filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters",
    [
        [("x", ">", 3)],
        [("x", ">=", 3), ("x", "<", 8)],
        [[("x", "<=", 1)], [("name", "=", "row 30")]],
        [("x", "in", {1, 7, 32})],
        [("name", "not in", ["row 1", "row 2"])],
        [("x", "!=", 5)],
        [("x", ">", 1000)],
    ],
)
def test_filters_select_the_rows_that_pyarrow_selects(files: list[str], filters: Any) -> None:
    source = ParquetSource.of_files(files, ["name"], filters)
    expected = [
        {"name": name}
        for file in files
        for name in pq.read_table(file, filters=filters)["name"].to_pylist()
    ]

    check_source(source, expected)


def test_row_groups_excluded_by_statistics_are_no_indices(files: list[str]) -> None:
    source = ParquetSource.of_files(files, None, [("x", ">", 10), ("x", "<", 16)])

    assert [(file, group) for file, group, _ in source.parts] == [(0, 1), (0, 2), (2, 0)]


def test_nulls_and_dates_are_filtered_like_in_pyarrow(tmp_path: Path) -> None:
    days = [None if n % 4 == 0 else datetime.date(2024, 1, 1 + n) for n in range(20)]
    name = write(tmp_path / "x.parquet", pa.table({"day": pa.array(days), "n": range(20)}))
    for filters in (
        [("day", ">", datetime.date(2024, 1, 8))],
        [("day", "!=", datetime.date(2024, 1, 8))],
        [("day", "not in", [datetime.date(2024, 1, 8)])],
    ):
        expected = pq.read_table(name, filters=filters)["n"].to_pylist()
        found = hr.ParquetDataset(name, columns=["n"], filters=filters)
        assert [int(row["n"]) for row in found] == expected


@pytest.mark.parametrize(
    ("filters", "error", "message"),
    [
        ([], ValueError, "must not be empty"),
        ("x > 3", TypeError, "must be a list such as"),
        ([("x", ">")], TypeError, "must be a list such as"),
        ([("x", "~", 3)], ValueError, "operator '~'"),
        ([("x", "in", 3)], TypeError, "list, tuple or set after 'in'"),
        ([("y", ">", 3)], InvalidArgumentError, "no column 'y'"),
        ([("x", ">", "a")], InvalidArgumentError, "do not fit the columns of"),
    ],
)
def test_invalid_filters_are_refused(
    files: list[str], filters: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hr.ParquetDataset(files, filters=filters)


# --- Nulls ----------------------------------------------------------------------------------------


def test_nulls_of_floats_and_times_are_nan_and_nat(tmp_path: Path) -> None:
    table = pa.table(
        {
            "f": pa.array([None, 1, 2], pa.float32()),
            "t": pa.array([0, None, 1], pa.timestamp("s")),
            "m": pa.array([0, 5, None], pa.time64("us")),
            "l": pa.array([[None, 1.0], [], [2.0]]),
        }
    )
    (batch,) = hr.ParquetDataset(
        write(tmp_path / "x.parquet", table), columns=["f", "t", "m"], batch_size=3
    )

    np.testing.assert_array_equal(batch["f"], np.float32([np.nan, 1, 2]))
    np.testing.assert_array_equal(batch["t"], np.array([0, "NaT", 1], "M8[s]"))
    np.testing.assert_array_equal(batch["m"], np.array([0, 5, "NaT"], "m8[us]"))
    first = next(iter(hr.ParquetDataset(str(tmp_path / "x.parquet"), columns=["l"])))
    np.testing.assert_array_equal(first["l"], [np.nan, 1])


@pytest.mark.parametrize(
    ("kind", "value", "column"),
    [
        (pa.int64(), None, "v"),
        (pa.bool_(), None, "v"),
        (pa.string(), None, "v"),
        (pa.list_(pa.float32()), None, "v"),
        (pa.list_(pa.int8()), [1, None], "v"),
        (pa.list_(pa.int8(), 2), [1, None], "v"),
        (pa.struct({"a": pa.int8(), "b": pa.string()}), {"a": 1, "b": None}, "v.b"),
        (pa.struct({"a": pa.int8()}), None, "v"),
    ],
    ids=str,
)
def test_a_null_without_value_raises_in_its_turn(
    tmp_path: Path, kind: Any, value: Any, column: str
) -> None:
    good = {
        "int64": 3, "bool": True, "string": "a", "list<element: float>": [1.0],
        "list<element: int8>": [1, 2, 3], "fixed_size_list<element: int8>[2]": [1, 2],
    }.get(str(kind).replace("item", "element"), {"a": 1, "b": "x"})  # fmt: skip
    values = [good] * 20
    for row in (7, 9, 10):
        values[row] = value
    table = pa.table({"n": range(20), "v": pa.array(values, kind)})
    source = ParquetSource.of_files(write(tmp_path / "x.parquet", table))
    reader, found, errors = source.open(0, source.size), [], []
    positions = [reader.get_position()]
    while True:
        try:
            chunk = reader.read(100)
        except InvalidArgumentError as error:
            errors.append(str(error))
        else:
            if chunk is None:
                break
            found += [int(row["n"]) for row in chunk.rows()]
        positions.append(reader.get_position())

    assert found == [n for n in range(20) if n not in (7, 9, 10)]
    assert len(errors) == 3
    for error, row in zip(errors, (1, 3, 4), strict=True):
        assert f"column {column!r} has a null in row {row} of row group 1 of '{tmp_path}" in error
    assert [1, 2] in positions
    assert [1, 4] in positions
    assert [int(row["n"]) for row in read_all(source.open(0, 4, [1, 5]))] == [*range(11, 20)]
    kept = hr.ParquetDataset(str(tmp_path / "x.parquet"), filters=[("n", "not in", [7, 9, 10])])
    assert len(list(kept)) == 17


# --- Files ----------------------------------------------------------------------------------------


def test_files_with_different_columns_are_refused(files: list[str], tmp_path: Path) -> None:
    other = write(tmp_path / "other.parquet", pa.table({"x": [0.5], "name": ["a"]}))
    fewer = write(tmp_path / "fewer.parquet", pa.table({"name": ["a"]}))

    with pytest.raises(InvalidArgumentError, match=r"other\.parquet' and .*0\.parquet' have diff"):
        hr.ParquetDataset([*files, other])
    with pytest.raises(InvalidArgumentError, match=r"fewer\.parquet' has no column 'x'"):
        hr.ParquetDataset([*files, fewer])
    assert len(list(hr.ParquetDataset([*files, other, fewer], columns=["name"]))) == 35


def test_of_many_files_one_with_different_columns_fails_in_its_turn(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MAX_FILES_WITH_PARTS", 1)
    other = write(tmp_path / "other.parquet", pa.table({"x": [0.5], "name": ["a"]}))
    source = ParquetSource.of_files([files[0], other, files[2]])
    reader = source.open(0, 3)

    assert sum((reader.read(100) or hr.Chunk.of_rows([])).size for _ in range(5)) == 14
    with pytest.raises(InvalidArgumentError, match=r"other\.parquet' and .*0\.parquet' have diff"):
        reader.read(100)
    assert reader.get_position() == [2, 0]
    assert_equal(read_all(reader), rows_of(14, 20))


def test_missing_files_and_folders_are_named(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"gone\.parquet"):
        hr.ParquetDataset([*files, str(tmp_path / "gone.parquet")])
    with pytest.raises(FailedPreconditionError, match="is a folder"):
        hr.ParquetDataset(str(tmp_path))


def test_files_by_url(files: list[str]) -> None:
    name = f"parquet-{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/{name}", Path(files[0]).read_bytes())
    try:
        check_source(ParquetSource.of_files(f"memory://{name}"), rows_of(0, 14))
        with pytest.raises(NotFoundError, match="gone"):
            hr.ParquetDataset("memory://gone")
    finally:
        memory.rm(f"/{name}")
    assert len(list(hr.ParquetDataset(f"file://{files[0]}"))) == 14


def test_files_are_read_in_turn(files: list[str]) -> None:
    expected = sorted(row["name"] for row in rows_of(0, 33))
    for names in (files, hr.Dataset.from_tensor_slices(files)):
        rows = list(hr.ParquetDataset(names, num_parallel_reads=2))
        assert sorted(row["name"] for row in rows) == expected
        assert [int(row["x"]) for row in rows] != [*range(33)]


def test_without_pyarrow_the_extra_is_named(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(FailedPreconditionError, match=r"reading Parquet.*headrace\[arrow\]"):
        hr.ParquetDataset(files)


# --- Damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no Parquet file at all", b"PAR1" * 100])
def test_a_file_without_footer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)

    with pytest.raises(DataLossError, match=r"x\.parquet'.*bytes"):
        hr.ParquetDataset(path)


def test_a_truncated_file_is_refused(files: list[str]) -> None:
    path = Path(files[0])
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(DataLossError, match=r"footer of .*0\.parquet"):
        hr.ParquetDataset(files)


def test_after_damaged_data_the_next_row_group_is_read(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(24), "data": [b"HERE%d" % n for n in range(24)]})
    name = write(
        tmp_path / "x.parquet", table, compression="none", use_dictionary=False,
        write_page_checksum=True, data_page_size=1, write_batch_size=2, write_statistics=False,
    )  # fmt: skip
    content = bytearray(Path(name).read_bytes())
    content[content.index(b"HERE10")] ^= 1
    Path(name).write_bytes(content)
    source = ParquetSource.of_files(name)
    reader = source.open(0, source.size)

    found = [reader.read(100) for _ in range(3)]
    assert [row["x"] for chunk in found if chunk for row in chunk.rows()] == [*range(10)]
    with pytest.raises(DataLossError, match=r"row group 1 of '.*x\.parquet' at row 4 or soon aft"):
        reader.read(100)
    assert reader.get_position() == [2, 0]
    assert [row["x"] for row in read_all(reader)] == [*range(12, 24)]


def test_text_that_is_not_utf8_is_damage(tmp_path: Path) -> None:
    table = pa.table({"x": range(8), "text": [f"HERE{n}" for n in range(8)]})
    name = write(
        tmp_path / "x.parquet", table, compression="none", use_dictionary=False,
        write_statistics=False,
    )  # fmt: skip
    content = bytearray(Path(name).read_bytes())
    content[content.index(b"HERE5")] = 0xFF
    Path(name).write_bytes(content)
    source = ParquetSource.of_files(name)
    reader = source.open(0, source.size)

    assert (reader.read(100) or hr.Chunk.of_rows([])).size == 4
    with pytest.raises(DataLossError, match=r"row 4 of row group 0 of .*x\.parquet.*soon after"):
        reader.read(100)
    assert [row["x"] for row in read_all(reader)] == [6, 7]


def test_a_file_that_changed_is_refused(files: list[str], tmp_path: Path) -> None:
    source = ParquetSource.of_files(files)
    write(Path(files[0]), numbered(0, 20), group=5)

    with pytest.raises(FailedPreconditionError, match=r"0\.parquet' has \d+ bytes, but had"):
        source.open(0, 1).read(1)
    source._footers.clear()
    with pytest.raises(FailedPreconditionError, match="had 6 rows when the dataset was created"):
        source.open(0, 1).read(1)


def test_a_position_after_the_end_of_a_file_is_refused(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MAX_FILES_WITH_PARTS", 1)
    source = ParquetSource.of_files(files)

    with pytest.raises(DataLossError, match=r"0\.parquet' has 14 rows, but 15 were read"):
        source.open(0, 4, [0, 15]).read(1)


def test_a_closed_reader_refuses_to_read(files: list[str]) -> None:
    reader = ParquetSource.of_files(files).open(0, 1)
    reader.close()

    with pytest.raises(FailedPreconditionError, match="closed"):
        reader.read(1)


def test_an_interruption_loses_no_row(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = ParquetSource.of_files(files)
    reader = source.open(0, source.size)
    found = (reader.read(3) or hr.Chunk.of_rows([])).rows()
    convert, errors = parquet.to_chunk, [KeyboardInterrupt(), MemoryError()]

    def interrupted(*arguments: Any) -> hr.Chunk:
        if errors:
            raise errors.pop()
        return convert(*arguments)

    monkeypatch.setattr(parquet, "to_chunk", interrupted)
    found += (reader.read(3) or hr.Chunk.of_rows([])).rows()
    for error in (MemoryError, KeyboardInterrupt):
        with pytest.raises(error):
            reader.read(3)
    assert_equal(found + read_all(reader), rows_of(0, 33))


# --- Workers --------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[hr.service.LocalCluster]:
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster


def test_workers_share_the_row_groups(files: list[str], cluster: hr.service.LocalCluster) -> None:
    dataset = hr.ParquetDataset(files, filters=[("x", "!=", 5)])
    expected = [n for n in range(33) if n != 5]
    dynamic = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target)
    ordered = hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target, ordered=True)

    assert sorted(int(row["x"]) for row in dataset.apply(dynamic)) == expected
    assert [int(row["x"]) for row in dataset.apply(ordered)] == expected
