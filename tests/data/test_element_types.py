"""The element type of a dataset, checked by mypy in `make check`, and the elements themselves."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import headrace as hr


def _make_features(number: np.int64) -> dict[str, NDArray[Any]]:
    return {"number": np.array([number])}


def _take_even(dataset: hr.Dataset[np.int64]) -> hr.Dataset[np.int64]:
    return dataset.filter(lambda number: number % 2 == 0)


def test_elements_of_range_have_its_output_type() -> None:
    for number in assert_type(hr.Dataset.range(3), hr.Dataset[np.int64]):
        assert isinstance(assert_type(number, np.int64), np.int64)
    for real in hr.Dataset.range(3, output_type=np.float32):
        assert isinstance(assert_type(real, np.float32), np.float32)


def test_elements_after_a_map_have_the_type_of_its_result() -> None:
    features = hr.Dataset.range(3).map(_make_features)
    assert_type(features.shuffle(2).repeat(2).take(1), hr.Dataset[dict[str, NDArray[Any]]])
    assert_type(features.unique().take(1).get_single_element(), dict[str, NDArray[Any]])
    for element in features:
        assert assert_type(element, dict[str, NDArray[Any]]).keys() == {"number"}


def test_python_numbers_from_a_map_have_no_static_type() -> None:
    numbers = hr.Dataset.range(3).map(lambda number: int(number))
    assert_type(numbers, hr.Dataset[Any])
    assert all(isinstance(number, np.int64) for number in numbers)


def test_composed_datasets_combine_the_types_of_their_inputs() -> None:
    numbers = hr.Dataset.range(4)
    assert_type(numbers.apply(_take_even), hr.Dataset[np.int64])
    assert_type(numbers.flat_map(lambda n: hr.Dataset.range(int(n))), hr.Dataset[np.int64])
    for index, number in numbers.apply(_take_even).enumerate():
        assert isinstance(assert_type(index, np.int64), np.int64)
        assert isinstance(assert_type(number, np.int64), np.int64)
    assert_type(iter(numbers).get_next_as_optional(), hr.Optional[np.int64])
