"""What a predicate may return: something true or false, and nothing that only passes for it."""

from __future__ import annotations

import re

import numpy as np
import pytest

import headrace as hr
from headrace.errors import UserFunctionError


def ways(dataset):
    """The elements, read one by one and in chunks."""
    yield dataset
    yield dataset.batch(1).unbatch()


@pytest.mark.parametrize("step", ["filter", "take_while"])
@pytest.mark.parametrize(
    "verdict",
    [None, "False", b"", [], (1,), {}, object(), np.str_("x")],
    ids=lambda value: type(value).__name__,
)
def test_a_predicate_that_returns_nothing_true_or_false_is_an_error_that_names_it(step, verdict):
    for dataset in ways(hr.Dataset.range(5)):
        with pytest.raises(UserFunctionError) as caught:
            list(getattr(dataset, step)(lambda x: verdict))
        words = str(caught.value)
        assert re.search(rf"<lambda>.* of {step} .*for element 0", words)
        assert repr(verdict) in words
        assert "return a bool" in words


def test_a_function_without_return_is_named_with_what_it_returned():
    def is_even(x):
        x % 2 == 0  # noqa: B015 - the mistake

    with pytest.raises(UserFunctionError, match=r"is_even.*it returned None, which is neither"):
        list(hr.Dataset.range(5).filter(is_even))


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x % 2 == 1,
        lambda x: bool(x % 2),
        lambda x: x % 2,
        lambda x: int(x) % 2,
        lambda x: float(x) % 2,
        lambda x: np.float32(x % 2),
        lambda x: np.array(x % 2 == 1),
        lambda x: np.array([x % 2]),
    ],
)
def test_bools_and_numbers_of_python_and_numpy_are_verdicts(odd):
    for dataset in ways(hr.Dataset.range(6)):
        assert [int(x) for x in dataset.filter(odd)] == [1, 3, 5]
    for dataset in ways(hr.Dataset.range(1, 6)):
        assert [int(x) for x in dataset.take_while(odd)] == [1]


def test_the_element_after_one_without_a_verdict_comes_next():
    verdicts = iter([True, None, True])
    got = []
    with iter(hr.Dataset.range(3).filter(lambda x: next(verdicts))) as iterator:
        got.append(int(next(iterator)))
        with pytest.raises(UserFunctionError):
            next(iterator)
        got.append(int(next(iterator)))
    assert got == [0, 2]
