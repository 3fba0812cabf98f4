from __future__ import annotations

import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.element.spec import ArraySpec
from headrace.element.structure import flatten
from headrace.plan.source import INFINITE, IndexedSource
from headrace.sources.memory import RangeSource, SlicesSource, TensorsSource
from headrace.testing.conformance import assert_equal, check_source, read_all


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("start", "stop", "step", "dtype"),
    [
        (0, 23, 1, np.int64),
        (5, -6, -3, np.int64),
        (-4, 4, 3, np.int8),
        (0, 10, 1, np.float32),
        (3, 3, 1, np.int64),
        (4, 0, 1, np.int64),
        ((1 << 63) - 3, (1 << 63) - 1, 1, np.int64),
    ],
)
def test_a_range_equals_that_of_python(start: int, stop: int, step: int, dtype: Any) -> None:
    source = RangeSource(start, stop, step, dtype)

    assert isinstance(source, IndexedSource)
    assert source.element_spec == ArraySpec((), dtype)
    check_source(source, [np.dtype(dtype).type(value) for value in range(start, stop, step)])


def test_a_range_without_stop_is_infinite() -> None:
    source = RangeSource(7, None, 2)

    reader = source.open(10, INFINITE)
    chunk = reader.read(3)

    assert source.size == INFINITE
    assert chunk is not None
    assert chunk.rows() == [27, 29, 31]
    assert reader.get_position() == 13


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 0), "step must not be 0"),
        ((0, 300, 1, np.uint8), "holds 299, which dtype uint8"),
        ((-1, 3, 1, np.uint64), "holds -1"),
        ((0, 3, 1, np.bool_), "integers or floats, got bool"),
    ],
)
def test_an_invalid_range_is_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RangeSource(*arguments)


def test_a_range_takes_integers_only() -> None:
    with pytest.raises(TypeError, match=r"stop must be an int, got 1\.5"):
        RangeSource(0, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "components",
    [
        np.arange(24, dtype=np.int16).reshape(12, 2),
        {"x": np.linspace(0, 1, 9, dtype=np.float32), "y": (np.eye(9), list(range(9)))},
        Pair(["a", "bc", "d\0"], [b"x", b"", b"z\0"]),
        np.asfortranarray(np.arange(20.0).reshape(5, 4)),
        np.zeros((0, 3)),
    ],
)
def test_slices_are_rows_of_every_component(components: Any) -> None:
    source = SlicesSource(components)
    arrays, rows = source.components, []
    for index in range(source.size):
        if isinstance(arrays, dict):
            rows.append({"x": arrays["x"][index], "y": tuple(a[index] for a in arrays["y"])})
        elif isinstance(arrays, Pair):
            rows.append(Pair(arrays.left[index], arrays.right[index]))
        else:
            rows.append(arrays[index])

    assert isinstance(source, IndexedSource)
    check_source(source, rows)


def test_lists_of_text_are_slices_of_str() -> None:
    source = SlicesSource(["one", "three"])

    assert source.element_spec == ArraySpec((), str)
    assert read_all(source.open(0, 2)) == ["one", "three"]


def test_components_of_different_lengths_are_named() -> None:
    with pytest.raises(ValueError, match=r"component \['a'\]: 3, component \['b'\]: 4"):
        SlicesSource({"a": np.zeros(3), "b": np.zeros(4)})


@pytest.mark.parametrize("value", [3, np.float32(1), "text", b"bytes"])
def test_scalars_have_no_slices(value: Any) -> None:
    with pytest.raises(ValueError, match=r"component \[1\]: it has no axis"):
        SlicesSource((np.zeros(2), value))


def test_an_empty_structure_has_no_slices() -> None:
    with pytest.raises(ValueError, match="no array"):
        SlicesSource({})


@pytest.mark.parametrize("count", [4, 2000])
def test_gathered_runs_are_copies(count: int) -> None:
    array = np.arange(5000)
    gathered = SlicesSource(array).gather(np.arange(2, 2 + count))

    assert gathered.tolist() == list(range(2, 2 + count))
    gathered[:] = -1
    assert array.tolist() == list(range(5000))


@pytest.mark.parametrize("length", [3, 5000])
@pytest.mark.parametrize(
    "indices",
    [
        np.arange(2, 6),
        np.arange(2, 8).reshape(2, 3),
        np.array([3]),
        np.array(4),
        np.array([5, 4]),
        np.array([1, 3, 5]),
        np.array([], np.int64),
    ],
    ids=str,
)
def test_borrowed_slices_equal_copied_slices(length: int, indices: Any) -> None:
    array = np.arange(9.0 * length).reshape(9, length)
    source = SlicesSource({"x": array, "y": np.arange(9)})

    lent = source.gather_borrowed(indices)

    assert_equal([lent], [source.gather(indices)])
    if np.shares_memory(lent["x"], array):
        assert not lent["x"].flags.writeable


@pytest.mark.parametrize("indices", [np.arange(2, 6), np.arange(2, 8).reshape(2, 3)], ids=str)
def test_runs_of_large_slices_are_borrowed_without_a_copy(indices: Any) -> None:
    array = np.arange(9 * 5000.0).reshape(9, 5000)
    source = SlicesSource(array)

    for lent in (source.gather_borrowed(indices), source.gather_run_borrowed(2, 6)):
        assert np.shares_memory(lent, array)
        with pytest.raises(ValueError, match="read-only"):
            lent[...] = -1
    assert array.flags.writeable


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (0,)])
def test_tensors_are_borrowed_without_a_copy(shape: tuple[int, ...]) -> None:
    array, indices = np.arange(6.0).reshape(2, 3), np.zeros(shape, np.int64)
    source = TensorsSource({"x": array, "y": 3, "z": "text"})

    lent = source.gather_borrowed(indices)

    assert_equal([lent], [source.gather(indices)])
    assert np.shares_memory(lent["x"], array) == bool(indices.size)
    assert not lent["x"].flags.writeable


def test_indices_that_only_resemble_a_run_are_gathered() -> None:
    indices = np.arange(2000)
    indices[[5, 6]] = 6, 5

    assert SlicesSource(np.arange(5000)).gather(indices).tolist() == indices.tolist()


@pytest.mark.parametrize(
    "element", [{"x": [1, 2], "y": "text", "z": b"b"}, 3.5, np.eye(2), (np.float16(1), None)]
)
def test_tensors_are_one_element(element: Any) -> None:
    source = TensorsSource(element)

    check_source(source, [source.element])


def test_each_read_of_tensors_returns_a_writable_copy() -> None:
    array, given = np.zeros(3), {}
    given["x"] = array
    source = TensorsSource(given)
    given["y"] = array
    for _ in range(2):
        (element,) = read_all(source.open(0, 1))
        assert list(element) == ["x"]
        assert element["x"].tolist() == [0, 0, 0]
        element["x"] += 1

    assert array.tolist() == [0, 0, 0]


def test_a_dict_of_slices_is_not_shared() -> None:
    given = {"x": np.arange(3)}
    source = SlicesSource(given)
    given["y"] = np.arange(3)

    assert [list(row) for row in read_all(source.open(0, 3))] == [["x"]] * 3


def test_slices_are_copies_however_they_are_read() -> None:
    array = np.arange(6).reshape(3, 2)
    for row in read_all(SlicesSource(array).open(0, 3)):
        row[:] = -1

    assert array.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_windows_of_an_array_are_gathered_without_a_copy_of_all_of_them() -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(100_000.0), 128)
    source = SlicesSource(windows)
    tracemalloc.start()
    try:
        for indices in (np.array([5, 99_000, 7]), np.arange(64), np.zeros((2, 3), np.int64)):
            found = source.gather(indices)
            assert np.array_equal(found, windows[indices])
            assert found.flags.c_contiguous
            assert found.flags.writeable
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 < windows.nbytes


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 5), (0, INFINITE)])
def test_ranges_outside_a_source_are_rejected(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="cannot open indices"):
        SlicesSource(np.zeros(4)).open(start, stop)


@pytest.mark.parametrize("position", [5, 0, "2", 1.5])
def test_positions_outside_a_range_are_rejected(position: Any) -> None:
    with pytest.raises(ValueError, match="position must be an index from 1 to 4"):
        RangeSource(0, 4).open(1, 4, position)


def test_readers_require_a_limit_of_at_least_one() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        RangeSource(0, 4).open(0, 4).read(0)


@pytest.mark.parametrize(
    "source",
    [
        RangeSource(0, 50),
        RangeSource(7, -43, -1, np.int16),
        RangeSource(3, 200, 4, np.float32),
        RangeSource((1 << 63) - 11, (1 << 63) - 1, 3),
        SlicesSource({"x": np.arange(100.0).reshape(50, 2), "y": np.arange(50)}),
    ],
)
def test_a_run_equals_gather_in_its_own_memory(source) -> None:
    stop = source.size
    for first, last in ((0, stop), (1, 2), (stop - 2, stop), (2, 2)):
        run = source.gather_run(first, last)
        assert_equal([run], [source.gather(np.arange(first, last))])
        for leaf in flatten(run)[0]:
            assert leaf.flags.owndata or not leaf.size
