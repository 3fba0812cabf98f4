"""The wire frame and files of frames: round trips, memory that is not copied, damage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.element.chunk import Chunk
from headrace.element.frame_file import FrameReader, FrameWriter
from headrace.element.stack import stack
from headrace.element.wire import decode, encode, frame_bytes
from headrace.errors import DataLossError, FailedPreconditionError, InvalidElementError
from tests.element.strategies import array_of, arrays, dtypes, elements, leaves, same, seeds


def through(chunk: Chunk) -> Chunk:
    """Send a chunk as a transport does: as raw, writable memory."""
    return decode([memoryview(bytearray(buffer)) for buffer in encode(chunk)])


@given(st.lists(elements, max_size=4))
def test_rows_of_any_kind_arrive_as_they_were(rows: list[Any]) -> None:
    assert same(tuple(through(Chunk.of_rows(rows)).rows()), tuple(rows))


@given(elements, st.integers(1, 4))
def test_columns_arrive_as_they_were(element: Any, size: int) -> None:
    batch = stack([element] * size)
    arrived = through(Chunk.of_columns(batch, size))
    assert arrived.is_columnar
    assert same(arrived.columns(), batch)
    assert same(tuple(through(Chunk.of_rows([element] * size)).rows()), (element,) * size)


@given(dtypes, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1), seeds)
def test_ragged_arrays_arrive_as_they_were(
    dtype: np.dtype[Any], shapes: list[tuple[int, ...]], seed: int
) -> None:
    rows = [{"x": array_of(dtype, shape, seed + i)} for i, shape in enumerate(shapes)]
    assert same(tuple(through(Chunk.of_rows(rows)).rows()), tuple(rows))


@given(st.lists(leaves, min_size=1, max_size=4), st.lists(arrays, min_size=1, max_size=4))
def test_leaves_of_different_kind_arrive_as_they_were(some: list[Any], more: list[Any]) -> None:
    for rows in (some, more):
        assert same(tuple(through(Chunk.of_rows(rows)).rows()), tuple(rows))


def test_large_arrays_and_bytes_are_sent_without_a_copy() -> None:
    image, blob = np.ones((200, 300), np.uint8), b"x" * 50_000
    rows = [{"image": image, "blob": blob, "label": np.int8(i)} for i in range(2)]
    buffers = encode(Chunk.of_rows(rows))
    assert sum(np.shares_memory(np.frombuffer(b, np.uint8), image) for b in buffers[1:]) == 2
    assert sum(buffer is blob for buffer in buffers) == 2
    assert same(tuple(decode(buffers).rows()), tuple(rows))


def test_contiguous_columns_are_not_copied_and_others_are_put_in_c_order() -> None:
    plain, strided = np.arange(12).reshape(3, 4), np.arange(12).reshape(4, 3).T
    buffers = encode(Chunk.of_columns((plain, strided), 3))
    assert len(buffers) == 3
    assert np.shares_memory(np.frombuffer(buffers[1], np.uint8), plain)
    assert not np.shares_memory(np.frombuffer(buffers[2], np.uint8), strided)
    assert same(decode(buffers).columns(), (plain, np.ascontiguousarray(strided)))


@pytest.mark.parametrize("rows", [lambda a: a[::2], lambda a: np.broadcast_to(a[0], (3, 9000))])
def test_large_separate_rows_are_sent_without_a_copy(rows: Any) -> None:
    array = np.arange(6 * 9000.0).reshape(6, 9000)
    columns = {"x": rows(array), "label": np.arange(3)}
    buffers = encode(Chunk.of_columns(columns, 3))
    assert sum(np.shares_memory(np.frombuffer(b, np.uint8), array) for b in buffers[1:]) == 3
    expected = [{"x": columns["x"][i], "label": np.int64(i)} for i in range(3)]
    assert same(tuple(decode(buffers).rows()), tuple(expected))


@pytest.mark.parametrize("writable", [True, False])
def test_arrays_are_views_with_the_writability_of_the_buffers(writable: bool) -> None:
    batch = np.arange(6.0).reshape(2, 3)
    kind = bytearray if writable else bytes
    buffers = [kind(buffer) for buffer in encode(Chunk.of_columns(batch, 2))]
    made = decode(buffers).columns()
    assert np.shares_memory(made, np.frombuffer(buffers[1], np.uint8))
    assert made.flags.writeable == writable


def test_small_elements_share_buffers() -> None:
    rows = [(np.int64(i), np.zeros(3), "é", b"x") for i in range(1000)]
    assert len(encode(Chunk.of_rows(rows))) == 1 + 1 + 1 + 2 + 2


def test_empty_chunks_and_elements_are_sent() -> None:
    assert through(Chunk.of_rows([])).rows() == []
    assert through(Chunk.of_rows([None] * 3)).rows() == [None] * 3
    assert through(Chunk.of_columns({"a": np.zeros((0, 3), "f4")}, 0)).rows() == []
    assert len(through(Chunk.of_columns(np.zeros((5, 0)), 5)).rows()) == 5


def test_lone_surrogates_are_sent() -> None:
    assert through(Chunk.of_rows(["\ud800", "\0"])).rows() == ["\ud800", "\0"]


@pytest.mark.parametrize(
    "wrong",
    [object(), {1}, np.array([1, None], object), np.zeros(1, [("x", object)])],
    ids=["object", "set", "mixed", "record"],
)
def test_other_objects_are_not_sent(wrong: Any) -> None:
    with pytest.raises(InvalidElementError, match=r"holds|contains|cannot be sent"):
        encode(Chunk.of_rows([{"a": wrong}] * 2))
    with pytest.raises(InvalidElementError, match=r"holds|contains|leading axis"):
        encode(Chunk.of_columns({"a": wrong}, 1))


def test_a_dtype_of_a_missing_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = encode(Chunk.of_rows([np.float32(1)]))
    buffers[0] = bytes(buffers[0]).replace(b"\xa3<f4", b"\xaafloat4_abc")
    with pytest.raises(DataLossError, match="float4_abc"):
        decode(buffers)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(FailedPreconditionError, match="package ml_dtypes"):
        decode(buffers)


# --- frames that are not whole ---------------------------------------------------------------

SAMPLE = [
    {"x": np.arange(3 + i), "s": "é" * i, "y": (np.int8(i), None), "z": np.zeros(2)}
    for i in range(5)
]


@given(st.data())
def test_a_truncated_frame_is_rejected(data: st.DataObject) -> None:
    buffers = [bytes(buffer) for buffer in encode(Chunk.of_rows(SAMPLE))]
    index = data.draw(st.sampled_from([i for i, b in enumerate(buffers) if b]))
    cut = data.draw(st.integers(0, len(buffers[index]) - 1))
    with pytest.raises(DataLossError):
        decode([*buffers[:index], buffers[index][:cut], *buffers[index + 1 :]])
    with pytest.raises(DataLossError):
        decode(buffers[:index])


@given(st.data())
def test_a_modified_frame_is_rejected_or_decoded(data: st.DataObject) -> None:
    buffers = [bytearray(buffer) for buffer in encode(Chunk.of_rows(SAMPLE))]
    for _ in range(data.draw(st.integers(1, 4))):
        buffer = data.draw(st.sampled_from([b for b in buffers if b]))
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    try:
        chunk = decode(buffers)
    except (DataLossError, FailedPreconditionError):
        return
    assert len(chunk.rows()) == len(chunk)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_garbage_is_rejected(buffers: list[bytes]) -> None:
    with pytest.raises(DataLossError):
        decode(buffers)


values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-2, 5),
        st.sampled_from([2**40, 2**62, 2**63 - 1, "<i8", "B", "T", "O", "V0", "bfloat16", "i4,i4"]),
    ),
    lambda children: st.lists(children, max_size=4),
    max_leaves=8,
)
huge = st.sampled_from([0, 1, 2, 3, 2**31, 2**40, 2**62])
columns = st.one_of(
    st.tuples(st.integers(0, 3), st.sampled_from(["<i8", "|V0", "B", "T"]), st.lists(huge)),
    st.tuples(st.integers(0, 3), values, values),
    values,
)
nodes = st.one_of(st.integers(0, 1), values, st.just([3, [], [0, 0]]))


@given(
    huge,
    st.integers(0, 1),
    st.lists(st.tuples(huge, nodes, st.lists(columns, max_size=2)), max_size=3),
    st.lists(st.integers(0, 3).map(lambda n: bytes(8 * n)), max_size=4),
)
def test_a_malicious_header_cannot_claim_more_than_its_buffers(
    size: int, form: int, parts: list[Any], buffers: list[bytes]
) -> None:
    try:
        chunk = decode([msgspec.msgpack.encode([1, size, form, parts]), *buffers])
    except DataLossError:
        return
    assert len(chunk) <= sum(map(len, buffers))
    assert len(chunk.rows()) == len(chunk)


@pytest.mark.parametrize("size", [10, 2**40, 2**62])
def test_elements_without_memory_are_limited_in_number(size: int) -> None:
    for node, column in ((1, []), (0, [[0, "<f8", [0]]]), (0, [[0, "|V0", []]])):
        header = msgspec.msgpack.encode([1, size, 0, [[size, node, column]]])
        with pytest.raises(DataLossError):
            decode([header, b""])


def test_a_deep_structure_is_rejected() -> None:
    node: Any = 0
    for _ in range(150):
        node = [3, [], [node]]
    header = msgspec.msgpack.encode([1, 1, 0, [[1, node, [[0, "<i8", []]]]]])
    with pytest.raises(DataLossError, match="deep"):
        decode([header, bytes(8)])
    with pytest.raises(DataLossError):
        decode([b"\x91" * 100_000, bytes(8)])


def test_the_size_estimate_is_close() -> None:
    batch = {"x": np.zeros((100, 50)), "s": np.array([b"y" * 30] * 100, object)}
    rows = [{"x": np.zeros(50), "s": b"y" * 30}] * 100
    for chunk in (Chunk.of_columns(batch, 100), Chunk.of_rows(rows)):
        truth = sum(len(bytes(buffer)) for buffer in encode(chunk))
        assert 0.8 * truth < frame_bytes(chunk) < 1.2 * truth
    assert frame_bytes(Chunk.of_rows([])) == 0
    assert frame_bytes(Chunk.of_columns(None, 3)) == 0


# --- files of frames: every chunk is found again by number, and no damage passes for data ---------


PLACES = np.array([7, 8, 9], np.uint64)


def chunks() -> list[Chunk]:
    return [
        Chunk.of_rows([b"a", b"", b"long enough"]),
        Chunk.of_columns(np.arange(4), 4),
        Chunk.of_columns(np.array([4, 5, 6]), 3, None, PLACES),
        Chunk.of_rows([{"x": np.zeros(2)}]),
    ]


def written(path: Path) -> Path:
    with path.open("wb") as file:
        file.write(b"whose it is")
        writer = FrameWriter(file)
        for chunk in chunks():
            writer.append(chunk)
        writer.finish()
    return path


def opened(file) -> FrameReader:
    file.seek(len(b"whose it is"))
    return FrameReader(file, "the file")


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_elements_are_found_by_number(tmp_path, limit):
    rows = [repr(row) for chunk in chunks() for row in chunk.rows()]
    with written(tmp_path / "frames").open("rb") as file:
        reader = opened(file)
        for start in (0, 3, 10, 5, 2):
            chunk = reader.read(start, limit)
            assert [repr(row) for row in chunk.rows()] == rows[start : start + chunk.size]
            assert 1 <= chunk.size <= limit
        assert reader.read(len(rows), limit) is None


def test_element_numbers_are_stored_with_their_elements(tmp_path):
    with written(tmp_path / "frames").open("rb") as file:
        reader = opened(file)
        assert reader.read(8, 9).metadata.tolist() == [8, 9]
        assert reader.read(0, 9).metadata is None


def test_elements_read_from_a_file_are_writable(tmp_path):
    with written(tmp_path / "frames").open("rb") as file:
        reader = opened(file)
        reader.read(3, 2).columns()[:] = -1
        assert reader.read(3, 9).columns().tolist()[2:] == [2, 3]


def test_a_truncated_file_is_rejected_by_name(tmp_path):
    whole = written(tmp_path / "frames").read_bytes()
    path = tmp_path / "cut"
    for size in range(len(b"whose it is"), len(whole)):
        path.write_bytes(whole[:size])
        with (
            path.open("rb") as file,
            pytest.raises(DataLossError, match=r"^the file is (cut off|damaged: .*); remove it"),
        ):
            opened(file)
