from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.element.spec import ArraySpec
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.sources.generator import GeneratorSource
from tests.sources.conformance import assert_same, check_source, read_all


def count(stop: int) -> Iterator[int]:
    yield from range(stop)


def pairs() -> Iterator[Any]:
    for index in range(11):
        yield {"x": [index, 0.5], "y": "text", "n": index}


def test_elements_come_as_the_function_yields_them() -> None:
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

    assert_same(
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
def test_a_value_that_does_not_fit_is_named_and_the_next_one_comes(value: Any, spec: Any) -> None:
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

    assert_same(rest, [{"k": fitting}])
    assert_same(read_all(source.open(0, 1, position)), rest)


def test_floats_round_to_the_signature() -> None:
    source = GeneratorSource(lambda: [0.1, float("inf"), 3], (), ArraySpec((), np.float32))

    assert_same(read_all(source.open(0, 1)), [np.float32(0.1), np.float32("inf"), np.float32(3)])


def test_elements_must_have_the_structure_of_the_signature() -> None:
    source = GeneratorSource(lambda: [(1, 2)], (), {"a": ArraySpec((), np.int64)})

    with pytest.raises(InvalidElementError, match="different structure"):
        source.open(0, 1).read(1)


def faulty() -> Iterator[int]:
    yield 1
    yield 2
    raise KeyError("the cupboard is bare")


def test_an_error_of_the_function_comes_with_its_traceback_after_the_elements_before_it() -> None:
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


def test_an_error_that_is_still_to_come_comes_after_restoring() -> None:
    reader = GeneratorSource(faulty).open(0, 1, 2)

    with pytest.raises(UserFunctionError):
        reader.read(1)


def test_an_error_in_the_call_is_the_users() -> None:
    reader = GeneratorSource(count, ()).open(0, 1)

    with pytest.raises(UserFunctionError, match="missing 1 required positional argument"):
        reader.read(1)
    assert reader.read(1) is None


def test_slow_elements_come_one_at_a_time() -> None:
    class Clock:
        now = 0.0

    def slow() -> Iterator[int]:
        for index in range(3):
            Clock.now += 10.0
            yield index

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.sources.generator.time.perf_counter", lambda: Clock.now)
        reader = GeneratorSource(slow).open(0, 1)
        sizes = [chunk.size for chunk in iter(lambda: reader.read(100), None)]

    assert sizes == [1, 1, 1]


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


def test_a_generator_object_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="without calling it"):
        GeneratorSource(count(3))  # type: ignore[arg-type]


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="must be callable, got int"):
        GeneratorSource(3)  # type: ignore[arg-type]


def test_a_signature_holds_specs() -> None:
    with pytest.raises(TypeError, match=r"output_signature must hold ArraySpec, but component"):
        GeneratorSource(count, (), {"a": np.int64})
