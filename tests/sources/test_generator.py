from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.element.spec import ArraySpec
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.sources.generator import GeneratorSource
from headrace.testing.conformance import assert_equal, check_source, read_all


def count(stop: int) -> Iterator[int]:
    yield from range(stop)


def pairs() -> Iterator[Any]:
    for index in range(11):
        yield {"x": [index, 0.5], "y": "text", "n": index}


def test_elements_are_yielded_as_the_function_yields_them() -> None:
    check_source(GeneratorSource(count, (23,)), [np.int64(value) for value in range(23)])


def test_python_values_take_the_dtypes_of_the_signature() -> None:
    signature = {
        "x": ArraySpec((None,), np.float32),
        "y": ArraySpec((), str),
        "n": ArraySpec((), np.uint8),
    }
    source = GeneratorSource(pairs, (), signature)

    assert source.element_spec == signature
    check_source(
        source,
        [{"x": np.array([i, 0.5], np.float32), "y": "text", "n": np.uint8(i)} for i in range(11)],
    )


def test_nested_signatures_are_checked_leaf_by_leaf() -> None:
    signature = ({"a": ArraySpec((), np.int32)}, ArraySpec((2,), np.float64))

    source = GeneratorSource(lambda: [({"a": 1}, np.ones(2)), ({"a": 2}, [1, 2])], (), signature)

    assert_equal(
        read_all(source.open(0, 1)),
        [({"a": np.int32(1)}, np.ones(2)), ({"a": np.int32(2)}, np.array([1.0, 2.0]))],
    )


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (300, ArraySpec((), np.uint8)),
        (-1, ArraySpec((), np.uint64)),
        (1.5, ArraySpec((), np.int64)),
        (1.0, ArraySpec((), np.int64)),
        (True, ArraySpec((), np.int64)),
        (1, ArraySpec((), np.bool_)),
        ((1 << 53) + 1, ArraySpec((), np.float64)),
        (1e300, ArraySpec((), np.float32)),
        ([1, 300], ArraySpec((2,), np.int8)),
        (1j, ArraySpec((), np.float64)),
        ([1, 2, 3], ArraySpec((2,), np.int64)),
        (np.float64(1), ArraySpec((), np.float32)),
        (np.zeros(3), ArraySpec((3,), np.float32)),
        ("text", ArraySpec((), bytes)),
        (5, ArraySpec((), str)),
        ({"x": 1}, ArraySpec((), np.int64)),
        (object(), ArraySpec((), np.int64)),
    ],
)
def test_a_mismatching_value_is_named_and_iteration_continues(value: Any, spec: Any) -> None:
    fitting = np.zeros([n or 0 for n in spec.shape], spec.dtype)[()]
    if spec.dtype.kind in "SU":
        fitting = b"" if spec.dtype.kind == "S" else ""
    source = GeneratorSource(
        lambda: iter([{"k": fitting}, {"k": value}, {"k": fitting}]), (), {"k": spec}
    )
    reader = source.open(0, 1)

    first = reader.read(10)
    assert first is not None
    assert first.size == 1
    with pytest.raises(InvalidElementError, match=r"element 1 of the generator.*\['k'\]"):
        reader.read(10)
    position = reader.get_position()
    rest = read_all(reader)

    assert_equal(rest, [{"k": fitting}])
    assert_equal(read_all(source.open(0, 1, position)), rest)


def test_floats_round_to_the_signature() -> None:
    source = GeneratorSource(lambda: [0.1, float("inf"), 3], (), ArraySpec((), np.float32))

    assert_equal(read_all(source.open(0, 1)), [np.float32(0.1), np.float32("inf"), np.float32(3)])


def test_elements_must_have_the_structure_of_the_signature() -> None:
    source = GeneratorSource(lambda: [(1, 2)], (), {"a": ArraySpec((), np.int64)})

    with pytest.raises(InvalidElementError, match="the same structure"):
        source.open(0, 1).read(1)


def faulty() -> Iterator[int]:
    yield 1
    yield 2
    raise KeyError("the cupboard is bare")


def test_an_error_has_its_traceback_and_follows_earlier_elements() -> None:
    reader = GeneratorSource(faulty).open(0, 1)

    chunk = reader.read(10)
    assert chunk is not None
    assert chunk.rows() == [1, 2]
    with pytest.raises(UserFunctionError, match="the cupboard is bare") as caught:
        reader.read(10)

    assert caught.value.position == 2
    assert caught.value.original_type == "KeyError"
    assert "in faulty" in caught.value.original_traceback
    assert isinstance(caught.value.__cause__, KeyError)
    assert reader.read(10) is None
    assert GeneratorSource(faulty).open(0, 1, reader.get_position()).read(10) is None


def test_a_pending_error_is_raised_after_a_restore() -> None:
    reader = GeneratorSource(faulty).open(0, 1, 2)

    with pytest.raises(UserFunctionError):
        reader.read(1)


def test_an_error_in_the_call_is_a_user_function_error() -> None:
    reader = GeneratorSource(count, ()).open(0, 1)

    with pytest.raises(UserFunctionError, match="missing 1 required positional argument"):
        reader.read(1)
    assert reader.read(1) is None


def counted(calls: list[int], stop: int = 10) -> Iterator[int]:
    for index in range(stop):
        calls.append(index)
        yield index


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_the_generator_runs_only_for_requested_elements(limit: int) -> None:
    calls: list[int] = []
    reader = GeneratorSource(counted, (calls,)).open(0, 1)

    chunk = reader.read(limit)

    assert chunk is not None
    assert chunk.rows() == calls == list(range(limit))
    reader.close()


def test_a_generator_may_wait_for_its_consumer() -> None:
    answers = [0]

    def feedback() -> Iterator[int]:
        for _ in range(5):
            yield answers[-1]

    reader = GeneratorSource(feedback).open(0, 1)
    seen = []
    while (chunk := reader.read(1)) is not None:
        seen.append(int(chunk.rows()[0]))
        answers.append(seen[-1] + 1)

    assert seen == [0, 1, 2, 3, 4]


BUFFER = np.zeros(2)
REUSED: dict[str, Any] = {}
LISTED = [np.zeros(2), np.zeros(2)]


def one_buffer() -> Iterator[Any]:
    for index in range(6):
        BUFFER[:] = index
        yield BUFFER


def one_dict() -> Iterator[Any]:
    for index in range(6):
        REUSED["x"] = index
        yield REUSED


def one_buffer_in_a_new_dict() -> Iterator[Any]:
    for element in one_buffer():
        yield {"x": element, "y": (element[:1], 1)}


def a_list_of_arrays() -> Iterator[Any]:
    for index in range(6):
        LISTED[0][:] = index
        yield LISTED


FIRST = {
    one_buffer: lambda row: row[0],
    one_dict: lambda row: row["x"],
    one_buffer_in_a_new_dict: lambda row: row["x"][0],
    a_list_of_arrays: lambda row: row[0][0],
}


@pytest.mark.parametrize("limit", [1, 4, 100])
@pytest.mark.parametrize("generator", list(FIRST))
def test_a_repeatedly_yielded_buffer_is_copied_each_time(generator: Any, limit: int) -> None:
    rows = read_all(GeneratorSource(generator).open(0, 1), limit)

    assert [int(FIRST[generator](row)) for row in rows] == list(range(6))


@pytest.mark.parametrize(
    ("generator", "signature"),
    [
        (one_buffer, ArraySpec((2,), np.float64)),
        (one_dict, {"x": ArraySpec((), np.int64)}),
        (
            one_buffer_in_a_new_dict,
            {
                "x": ArraySpec((2,), np.float64),
                "y": (ArraySpec((1,), np.float64), ArraySpec((), int)),
            },
        ),
    ],
)
def test_a_repeatedly_yielded_buffer_is_copied_with_a_signature(
    generator: Any, signature: Any
) -> None:
    rows = read_all(GeneratorSource(generator, (), signature).open(0, 1))

    assert [int(FIRST[generator](row)) for row in rows] == list(range(6))


@pytest.mark.parametrize("signature", [None, {"x": ArraySpec((3,), np.float64)}])
def test_a_new_array_is_not_copied(signature: Any) -> None:
    addresses = []

    def make() -> Iterator[Any]:
        for _ in range(3):
            addresses.append(0)
            yield {"x": noted()}

    def noted() -> Any:
        array = np.ones(3)
        addresses[-1] = array.ctypes.data
        return array

    rows = read_all(GeneratorSource(make, (), signature).open(0, 1))

    assert [row["x"].ctypes.data for row in rows] == addresses


class Stop(BaseException):
    pass


@pytest.mark.parametrize(
    "exception", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Stop]
)
def test_an_interruption_passes_and_does_not_change_the_position(
    exception: type[BaseException],
) -> None:
    interruptions = [exception("now")]

    def interrupted() -> Iterator[int]:
        for index in range(8):
            if index == 5 and interruptions:
                raise interruptions.pop()
            yield index

    reader = GeneratorSource(interrupted).open(0, 1)
    first = reader.read(3)
    assert first is not None
    with pytest.raises(exception):
        reader.read(4)

    assert reader.get_position() == 3
    assert first.rows() + read_all(reader) == list(range(8))


def test_a_generator_object_that_ends_by_stop_iteration_of_its_own_is_an_error() -> None:
    def careless() -> Iterator[int]:
        yield 1
        next(iter(()))

    reader = GeneratorSource(careless).open(0, 1)
    assert reader.read(1) is not None
    with pytest.raises(UserFunctionError, match="raised at element 1: RuntimeError"):
        reader.read(1)


def test_a_call_that_raises_stop_iteration_is_an_error() -> None:
    def careless() -> list[int]:
        raise StopIteration

    with pytest.raises(UserFunctionError, match="raised at element 0: StopIteration"):
        GeneratorSource(careless).open(0, 1).read(1)


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise StopIteration


def test_stop_iteration_in_a_conversion_is_an_error_of_the_element() -> None:
    reader = GeneratorSource(lambda: [1, Unreadable(), 3]).open(0, 1)

    assert reader.read(1) is not None
    with pytest.raises(InvalidElementError, match=r"element 1 of the generator.*Unreadable"):
        reader.read(5)
    assert read_all(reader) == [3]


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_text_is_reported() -> None:
    def failing() -> Iterator[int]:
        raise UnprintableError
        yield 1

    with pytest.raises(UserFunctionError, match=r"UnprintableError: .no message: __str__ raised"):
        GeneratorSource(failing).open(0, 1).read(1)


def test_a_bare_yield_is_rejected() -> None:
    def forgetful() -> Iterator[Any]:
        yield 1
        yield

    reader = GeneratorSource(forgetful).open(0, 1)
    assert reader.read(5) is not None
    with pytest.raises(InvalidElementError, match=r"element 1 of the generator .*after `yield`"):
        reader.read(5)


def test_closing_closes_the_generator() -> None:
    closed = []

    def watched() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    reader = GeneratorSource(watched).open(0, 1)
    reader.read(1)
    reader.close()
    reader.close()

    assert closed == [True]


def test_a_generator_object_is_rejected_with_a_fix() -> None:
    with pytest.raises(TypeError, match="without calling it"):
        GeneratorSource(count(3))  # type: ignore[arg-type]


def test_a_non_callable_is_rejected() -> None:
    with pytest.raises(TypeError, match="must be callable, got int"):
        GeneratorSource(3)  # type: ignore[arg-type]


def test_a_signature_holds_specs() -> None:
    with pytest.raises(TypeError, match=r"must hold ArraySpec, but component .* pass hr\.Arr"):
        GeneratorSource(count, (), {"a": np.int64})


@pytest.mark.parametrize("returned", [None, 3])
def test_function_that_returns_no_iterable_is_named_with_a_fix(returned: Any) -> None:
    reader = GeneratorSource(lambda: returned).open(0, 1)
    with pytest.raises(UserFunctionError, match=rf"lambda> must .* returned {returned} .*`yield`"):
        reader.read(1)
    assert reader.read(1) is None


def failing_at_two() -> Iterator[Any]:
    yield 0
    yield None  # no element
    yield 2
    raise ValueError("three")


def test_lazy_rows_equal_chunks_with_errors_and_positions() -> None:
    source = GeneratorSource(failing_at_two)
    reader, found = source.open(0, 1), []
    while True:
        before = reader.get_position()
        try:
            for row in reader.rows():
                found.append((before, row))
                before = reader.get_position()
            break
        except (InvalidElementError, UserFunctionError) as error:
            found.append((before, type(error)))
    assert found == [(0, 0), (1, InvalidElementError), (2, 2), (3, UserFunctionError)]
    assert reader.get_position() == 4
    assert reader.read(1) is None


def test_lazy_rows_are_computed_on_request() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            yield number

    reader = GeneratorSource(numbers).open(0, 1)
    rows = reader.rows()
    assert made == []
    assert [next(rows), next(rows)] == [0, 1]
    assert made == [0, 1]
    reader.close()


@pytest.mark.parametrize("signature", [None, ArraySpec((2,), np.int64)])
def test_a_repeatedly_yielded_buffer_is_copied_for_lazy_rows(signature: Any) -> None:
    def buffers() -> Iterator[Any]:
        buffer = np.zeros(2, np.int64)
        for number in range(4):
            buffer[:] = number
            yield buffer

    rows = list(GeneratorSource(buffers, (), signature).open(0, 1).rows())
    assert [row.tolist() for row in rows] == [[n, n] for n in range(4)]


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.bool_])
def test_python_numbers_get_the_widest_dtypes(dtype: Any) -> None:
    values = {np.int64: [-(1 << 63), (1 << 63) - 1], np.float64: [1e308, float("inf")]}
    yielded = values.get(dtype, [True, False])

    found = read_all(GeneratorSource(lambda: yielded, (), ArraySpec((), dtype)).open(0, 1))

    assert found == yielded
    assert {type(value) for value in found} == {dtype}


def test_an_int_beyond_int64_is_rejected_by_its_signature() -> None:
    source = GeneratorSource(lambda: [1 << 63], (), ArraySpec((), np.int64))

    with pytest.raises(InvalidElementError, match="9223372036854775808"):
        source.open(0, 1).read(1)
