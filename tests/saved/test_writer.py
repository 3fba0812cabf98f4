"""Tests of writing elements to chunk files and reading them back."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.element.chunk import Chunk
from headrace.element.spec import ArraySpec, spec_of
from headrace.errors import DataLossError, InvalidElementError, UnavailableError
from headrace.saved.chunk_file import ChunkFile, allocate_columns, finish_columns
from headrace.saved.format import ChunkRecord
from headrace.saved.schema import decode_schema
from headrace.saved.writer import StreamWriter
from tests.saved.strategies import DTYPES, Pair, array_of, bits, random_structure
from tests.saved.streams import SAVE, begun, publish, read, saved, write_stream


@pytest.mark.parametrize("round_", range(40))
def test_random_elements_round_trip_exactly(tmp_path: Path, round_: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    make = random_structure(rng)
    rows = [make(rng) for _ in range(rng.integers(1, 60))]
    directory = begun(tmp_path)
    batch_bytes = int(rng.choice([1, 300, 1 << 20]))

    records = write_stream(directory, 0, rows, each=23, batch_bytes=batch_bytes)
    records = publish(directory, records)
    found = read(directory, records, limit=int(rng.integers(1, 20)))

    assert sum(record.elements for record in records) == len(rows)
    assert [bits(row) for row in found] == [bits(row) for row in rows]
    for record in records:
        whole = pa.ipc.open_file(directory.folder.path(record.public_name(SAVE))).read_all()
        assert whole.num_rows == record.elements
        assert os.path.getsize(directory.folder.path(record.public_name(SAVE))) == record.bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_every_dtype_round_trip_exactly(tmp_path: Path, dtype: np.dtype[Any]) -> None:
    for shape in [(), (3,), (2, 0), (2, 1, 2)]:
        check_column(tmp_path / str(len(shape)) / str(shape), dtype, shape)


def check_column(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    stacked = array_of(np.random.default_rng(5), dtype, (11, *shape))
    directory = begun(path)
    writer = StreamWriter(directory, SAVE, 0, batch_bytes=max(1, stacked.nbytes // 3))
    writer.append(Chunk.of_columns(stacked, 11))
    writer.finish_file()
    (record,) = writer.take_finished_files()
    (record,) = publish(directory, [record])

    assert [bits(row) for row in read(directory, [record], 4)] == [bits(row) for row in stacked]
    file = ChunkFile(directory.folder, record, SAVE)
    rows = np.array([10, 0, 3, 3, 9])
    made = allocate_columns(file.schema, 5)
    file.gather(rows, made, np.arange(5))
    assert bits(finish_columns(file.schema, made)[0]) == bits(np.take(stacked, rows, axis=0))


def test_large_rows_can_be_gathered(tmp_path: Path) -> None:
    rows = [np.full(3000, number, ">i2") for number in range(9)]
    directory = saved(tmp_path, rows)
    (record,) = directory.read_status().chunks or ()
    file = ChunkFile(directory.folder, record, SAVE)
    made = allocate_columns(file.schema, 3)
    file.gather(np.array([8, 2, 2]), made, np.array([2, 0, 1]))

    assert finish_columns(file.schema, made)[0][:, 0].tolist() == [2, 2, 8]


def test_pyarrow_reads_the_files(tmp_path: Path) -> None:
    rows = [
        {
            "image": np.full((2, 3), n, np.uint8),
            "flag": np.bool_(n % 2),
            "at": np.datetime64(n, "s"),
            "z": np.complex64(n + 1j),
            "words": (b"b%d" % n, f"é{n}"),
            "tokens": np.arange(n, dtype=">i4"),
            "grid": np.ones((n, 2)),
        }
        for n in range(4)
    ]
    directory = saved(tmp_path, rows)
    (record,) = directory.read_status().chunks or ()

    table = pa.ipc.open_file(tmp_path / record.public_name(SAVE)).read_all()

    assert table.column("image").combine_chunks().to_numpy_ndarray().tolist() == [
        row["image"].tolist() for row in rows
    ]
    assert table.column("flag").to_pylist() == [False, True, False, True]
    assert table.column("at").type == pa.timestamp("s")
    assert table.column("z").to_pylist() == [[n, 1] for n in range(4)]
    assert table.column("words.0").to_pylist() == [b"b0", b"b1", b"b2", b"b3"]
    assert table.column("words.1").to_pylist() == ["é0", "é1", "é2", "é3"]
    assert table.column("tokens").to_pylist() == [list(range(n)) for n in range(4)]
    assert table.column("grid.shape").to_pylist() == [[n, 2] for n in range(4)]


def test_ambiguous_column_names_are_written_in_full(tmp_path: Path) -> None:
    directory = saved(tmp_path, [{"a": {"b": np.int8(1)}, "a.b": np.int8(2)}])
    (record,) = directory.read_status().chunks or ()

    table = pa.ipc.open_file(tmp_path / record.public_name(SAVE)).read_all()

    assert table.to_pylist() == [{"['a']['b']": 1, "['a.b']": 2}]


def test_file_is_closed_at_its_maximum_size(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    writer = StreamWriter(directory, SAVE, 3, chunk_bytes=10_000, batch_bytes=2000)
    for _ in range(10):
        writer.append(Chunk.of_columns(np.zeros((100, 8)), 100))
    writer.finish_file()
    records = writer.take_finished_files()

    assert [record[:2] for record in records] == [(3, number) for number in range(len(records))]
    assert len(records) == 7
    assert all(10_000 <= record.bytes < 14_000 for record in records[:-1])
    assert sum(record.elements for record in records) == 1000


def test_element_of_another_shape_starts_another_file(tmp_path: Path) -> None:
    rows = [np.zeros(4), np.ones(4), np.zeros(2), np.ones(4)]
    directory = begun(tmp_path)
    records = write_stream(directory, 0, rows, batch_bytes=1)
    records = publish(directory, records)

    assert [record.elements for record in records] == [2, 2]
    assert [bits(row) for row in read(directory, records)] == [bits(row) for row in rows]
    assert [decode_schema(r.schema, "").columns[0].shape for r in records] == [(4,), (None,)]


def test_constant_axes_are_in_the_schema(tmp_path: Path) -> None:
    rows = [np.zeros((n, 3)) for n in (2, 0, 1)]
    spec = ArraySpec((None, 3), np.float64)
    for batch_bytes in (1, 1 << 20):
        writer = StreamWriter(begun(tmp_path), SAVE, 0, spec=spec, batch_bytes=batch_bytes)
        for row in rows:
            writer.append(Chunk.of_rows([row]))
        writer.finish_file()
        records = publish(begun(tmp_path), writer.take_finished_files())

        assert decode_schema(records[-1].schema, "").spec(None) == spec
        assert [bits(row) for row in read(begun(tmp_path), records)] == [bits(row) for row in rows]


def test_dict_keys_have_the_order_of_the_spec(tmp_path: Path) -> None:
    spec = {"a": ArraySpec((), np.int64), "b": ArraySpec((), bytes)}
    directory = begun(tmp_path)
    records: list[ChunkRecord] = []
    for stream, row in enumerate(({"a": np.int64(1), "b": b"x"}, {"b": b"y", "a": np.int64(2)})):
        writer = StreamWriter(directory, SAVE, stream, spec=spec)
        writer.append(Chunk.of_rows([row]))
        writer.finish_file()
        records += writer.take_finished_files()

    assert len({record.schema for record in records}) == 1
    found = read(directory, publish(directory, records))
    assert [list(row.items()) for row in found] == [
        [("a", 1), ("b", b"x")],
        [("a", 2), ("b", b"y")],
    ]


def test_full_disk_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = begun(tmp_path)
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", 0)
    monkeypatch.setattr(directory.folder, "create", lambda name: full)
    writer = StreamWriter(directory, SAVE, 0)
    writer.append(Chunk.of_rows([np.zeros(4)]))

    with pytest.raises(UnavailableError, match=r"cannot write '.*arrow': .*No space left"):
        writer.finish_file()
    writer.close()


def test_str_that_is_not_utf_8_is_kept(tmp_path: Path) -> None:
    rows = ["plain", "lone \ud800", "plain again", ""]
    directory = begun(tmp_path)
    records = write_stream(directory, 0, rows, batch_bytes=1)
    records = publish(directory, records)

    assert [record.elements for record in records] == [1, 3]
    assert [record.number for record in records] == [0, 1]
    assert read(directory, records) == rows


def test_empty_arrays_take_the_dtype_of_later_ones(tmp_path: Path) -> None:
    empty, words = np.empty(0, object), np.array(["a"], object)
    rows = [empty, words, empty]
    directory = begun(tmp_path)
    records = write_stream(directory, 0, rows, batch_bytes=1)
    records = publish(directory, records)

    assert [row.tolist() for row in read(directory, records)] == [[], ["a"], []]


def test_elements_without_components_are_counted(tmp_path: Path) -> None:
    directory = saved(tmp_path, [{"nothing": None}] * 5)

    assert read(directory, directory.read_status().chunks or ()) == [{"nothing": None}] * 5


def test_large_array_is_written_without_a_copy(tmp_path: Path) -> None:
    rows = [np.arange(1 << 20), np.arange(1 << 20) + 1]
    directory = saved(tmp_path, rows)

    found = read(directory, directory.read_status().chunks or ())
    assert [bits(row) for row in found] == [bits(row) for row in rows]


def test_stream_continues_at_a_later_number(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    records = write_stream(directory, 0, [b"a", b"b"], each=1)
    records += write_stream(directory, 0, [b"c"], number=2)
    records = publish(directory, records)
    directory.finish(SAVE, records)

    assert read(directory, directory.read_status().chunks or ()) == [b"a", b"b", b"c"]


def test_closed_writer_leaves_no_partial_file(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    writer = StreamWriter(directory, SAVE, 0, batch_bytes=1)
    writer.append(Chunk.of_rows([np.zeros(4)]))
    writer.close()
    writer.close()

    assert writer.take_finished_files() == []
    assert os.listdir(tmp_path) == ["dataset.json"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"x": np.int64(1)}, {"x": np.float64(1)}],
            r"\['x'\]: it is int64 in element 0, and float64",
        ),
        ([(np.zeros(2), 1), (np.zeros((2, 2)), 1)], r"\[0\]: .* 1 axes .*, and an array of 2 axes"),
        (
            [np.zeros(2), np.zeros(2, "f4")],
            r"the element: .*of float64 .*, and an array of float32",
        ),
        (
            [{"x": b"a"}, {"x": "a"}],
            r"cannot save component \['x'\]: it is bytes in element 0, and str",
        ),
        (
            [np.array([b"a"], object), np.array(["a"], object)],
            "the element: it is .*bytes.* in element 0, and .*str.* in element 1",
        ),
        ([{"x": 1}, {"y": 1}], "a dict with keys .'x'. was expected, and element 1 has a dict"),
        (
            [np.datetime64(1, "s"), np.datetime64(1, "D")],
            "the element: .*64.s. in element 0.* in element 1",
        ),
    ],
)
@pytest.mark.parametrize("batch_bytes", [1, 4 << 20])
def test_unsupported_element_is_an_error_that_names_the_component(
    tmp_path: Path, rows: list[Any], message: str, batch_bytes: int
) -> None:
    directory = begun(tmp_path)
    writer = StreamWriter(directory, SAVE, 0, batch_bytes=batch_bytes)
    if batch_bytes == 1:  # each element in a separate batch
        message = "component|the element|at the top"

    def write() -> None:
        for row in rows:
            writer.append(Chunk.of_rows([row]))
        writer.finish_file()

    with pytest.raises(InvalidElementError, match=message):
        write()
    writer.close()


def test_stream_is_checked_against_the_spec(tmp_path: Path) -> None:
    for spec, message in (
        ({"x": ArraySpec((), np.int32)}, r"\['x'\]: it is int64, but .*spec is .*int32"),
        ({"x": ArraySpec((None,), np.int64)}, r"cannot save component \['x'\]: it is int64"),
    ):
        writer = StreamWriter(begun(tmp_path), SAVE, 0, spec=spec)
        writer.append(Chunk.of_rows([{"x": np.int64(1)}]))
        with pytest.raises(InvalidElementError, match=message):
            writer.finish_file()
        writer.close()
    element = Pair(np.zeros((2, 3)), "s")
    writer = StreamWriter(begun(tmp_path), SAVE, 0, spec=spec_of(element))
    writer.append(Chunk.of_rows([element]))
    writer.finish_file()
    assert len(writer.take_finished_files()) == 1


# --- damage ---------------------------------------------------------------------------------------


def damaged_rows(path: Path) -> tuple[Any, list[Any], ChunkRecord]:
    rows = [
        {"x": np.arange(n % 3 + 1), "s": f"text {n}", "b": b"b" * n, "y": np.full((2, 2), n)}
        for n in range(40)
    ]
    directory = begun(path)
    records = write_stream(directory, 0, rows, batch_bytes=700)
    records = publish(directory, records)
    return directory, rows, records[-1]


def test_changed_byte_is_detected_or_has_no_effect(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    directory, _, record = damaged_rows(tmp_path)
    path = Path(directory.folder.path(record.public_name(SAVE)))
    whole = path.read_bytes()
    wanted = [bits(row) for row in read(directory, [record])]
    found_out = 0
    for _ in range(300):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        try:
            found: Any = [bits(row) for row in read(directory, [record])]
        except DataLossError as error:
            found_out += 1
            found = str(error)
        assert found == wanted or str(path) in found, f"byte {at}"
    assert found_out > 50


@pytest.mark.parametrize("left", [0, 1, 9, 0.5, -1])
def test_truncated_file_is_named(tmp_path: Path, left: float) -> None:
    directory, _, record = damaged_rows(tmp_path)
    path = Path(directory.folder.path(record.public_name(SAVE)))
    size = math.floor(left * record.bytes) if 0 < left < 1 else int(left) % record.bytes
    path.write_bytes(path.read_bytes()[:size])

    for known in (record, record._replace(bytes=0, elements=0, schema="")):
        with pytest.raises(DataLossError, match=path.name):
            read(directory, [known])


def test_missing_file_is_named(tmp_path: Path) -> None:
    directory, _, record = damaged_rows(tmp_path)
    Path(directory.folder.path(record.public_name(SAVE))).unlink()

    with pytest.raises(DataLossError, match=f"{record.public_name(SAVE)}' is missing; restore it"):
        read(directory, [record])


def test_foreign_arrow_file_is_refused(tmp_path: Path) -> None:
    directory, _, record = damaged_rows(tmp_path)
    path = directory.folder.path(record.public_name(SAVE))
    table = pa.table({"x": [1, 2]})
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)

    for known in (record._replace(bytes=0), record._replace(bytes=0, schema="")):
        with pytest.raises(DataLossError, match=record.public_name(SAVE)):
            read(directory, [known])
