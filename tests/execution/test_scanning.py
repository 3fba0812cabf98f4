"""`scan` and `take_while`, and values of the user's in states."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError
from tests.execution.contract import outcomes

from .battery import assert_restores_everywhere

# --- Plans with `scan` and `take_while` -----------------------------------------------------------

Dataset = hr.Dataset


# --- scan ---------------------------------------------------------------------------------------


def test_a_scan_carries_its_value_from_element_to_element():
    totals = Dataset.range(1, 6).scan(10, lambda total, x: (total + x, total * x))
    assert outcomes(totals) == [10, 22, 39, 64, 100]
    nested = (
        Dataset.range(3)
        .enumerate()
        .scan(
            {"n": 0, "last": (0, 0)},
            lambda s, pair: ({"n": s["n"] + 1, "last": pair}, s["last"][0]),
        )
    )
    assert outcomes(nested) == [0, 0, 1]


def test_each_iteration_starts_with_the_unmodified_initial_value():
    first = np.zeros(1, np.int64)

    def count(value, x):
        value += 1
        return value, value

    dataset = Dataset.range(3).scan(first, count)
    first += 50
    assert outcomes(dataset) == outcomes(dataset) == [[1], [2], [3]]
    assert outcomes(dataset.repeat(2)) == [[1], [2], [3], [1], [2], [3]]


def test_the_function_owns_its_arguments_and_a_state_is_a_snapshot():
    kept = []

    def note(value, x):
        kept.append(value)
        for one in kept:
            one += 1  # whatever it held on to
        return value, {"x": value, "y": value}

    def run():
        kept.clear()
        return iter(Dataset.range(6).scan(np.zeros(2, np.int64), note))

    states, elements = [], []
    with run() as iterator:
        for _ in range(6):
            states.append(iterator.get_state())
            elements.append({key: part.copy() for key, part in next(iterator).items()})
        texts = [json.dumps(state["position"]["stream"]) for state in states]
    assert [element["x"].tolist() for element in elements] == [[n, n] for n in range(1, 7)]
    with run() as iterator:
        for number, element in enumerate(iterator):
            assert element["x"].tolist() == element["y"].tolist() == [number + 1] * 2
            element["x"] += 100  # what was yielded is its consumer's
            if number < 5:
                after = iterator.get_state()["position"]["stream"]
                assert json.dumps(after) == texts[number + 1]


def test_a_failing_function_drops_one_element_and_keeps_the_value():
    def odd(total, x):
        if x % 2:
            raise KeyError(int(x))
        return total + x, total

    assert outcomes(Dataset.range(6).scan(0, odd)) == [
        0, ("KeyError", 1), 0, ("KeyError", 3), 2, ("KeyError", 5),
    ]  # fmt: skip
    batches = Dataset.range(6).scan(0, odd).batch(2)
    assert [one for one in outcomes(batches) if isinstance(one, list)] == [[0, 0], [2]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2], r"scan \(test_scanning.py:\d+\): `scan_func` must return a tuple"),
        ((1, 2, 3), "returned tuple of 3"),
        ((1, None), "returned None as the output element"),
        (None, "did the function forget `return`"),
        ((object(), 1), "not an element"),
    ],
)
def test_an_invalid_scan_result_is_reported_with_its_step(returned, message):
    dataset = Dataset.range(3).scan(0, lambda value, x: returned)
    with pytest.raises(InvalidElementError, match=message):
        list(dataset)


def test_a_scan_is_called_once_per_requested_element():
    calls = []

    def note(value, x):
        calls.append(int(x))
        return value + 1, x

    with iter(Dataset.range(5000).scan(0, note).take(1000)) as iterator:
        for count in range(1, 501):
            next(iterator)
            assert len(calls) == count


def test_a_state_of_a_scan_continues_without_calls_for_earlier_elements():
    calls = []

    def note(value, x):
        calls.append(int(x))
        return value + x, value

    dataset = Dataset.range(100).map(lambda x: x).scan(np.int32(0), note)
    with iter(dataset) as iterator:
        for _ in range(50):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
    calls.clear()
    with iter(dataset) as iterator:
        iterator.set_state(state)
        element = next(iterator)
    assert (element.dtype, int(element), calls) == (np.int64, sum(range(50)), [50])


@pytest.mark.parametrize("first", [b"a", "ü", (np.zeros((2, 0)), {"k": np.float16(1)}), None])
def test_any_element_may_be_the_value_of_a_scan(first):
    assert_restores_everywhere(lambda: Dataset.range(7).scan(first, lambda value, x: (value, x)))


def test_a_scan_knows_its_number_of_elements_and_finds_its_spec():
    dataset = Dataset.range(7).scan(np.float32(0), lambda value, x: (value, (value, x)))
    assert dataset.cardinality() == 7
    assert dataset.element_spec == (hr.ArraySpec((), np.float32), hr.ArraySpec((), np.int64))
    with pytest.raises(TypeError, match="`scan_func` must be a function"):
        Dataset.range(3).scan(0, 5)


# --- take_while -----------------------------------------------------------------------------------


def plain_below_five(x):
    return bool(x < 5)


@pytest.mark.parametrize("predicate", [plain_below_five, lambda x: x < 5])
def test_take_while_yields_elements_up_to_the_first_rejected_one(predicate):
    numbers = [0, 3, 5, 1, 9, 2]
    dataset = Dataset.from_tensor_slices(np.array(numbers)).take_while(predicate)
    assert outcomes(dataset) == [0, 3]
    assert outcomes(dataset.repeat(2)) == [0, 3, 0, 3]
    assert outcomes(Dataset.range(5000).take_while(lambda x: x < 3000)) == list(range(3000))
    assert outcomes(Dataset.range(0).take_while(predicate)) == []
    assert dataset.cardinality() == hr.UNKNOWN_CARDINALITY
    assert dataset.element_spec == hr.ArraySpec((), np.int64)


def test_take_while_stays_ended_even_if_the_predicate_holds_again():
    asked = []

    def is_small(x):
        asked.append(int(x))
        return len(asked) != 3

    with iter(Dataset.range(9).take_while(is_small)) as iterator:
        assert [int(x) for x in iterator] == [0, 1]
        assert list(iterator) == []
        assert asked == [0, 1, 2]


def test_a_failing_predicate_drops_one_element():
    def is_small(x):
        if x == 2:
            raise KeyError
        return x < 4

    assert outcomes(Dataset.range(9).take_while(is_small)) == [0, 1, ("KeyError", 2), 3]


# Results of a predicate: only values with a clear truth value are accepted.


def all_readings(dataset):
    """The elements, read one by one and in chunks."""
    yield dataset
    yield dataset.batch(1).unbatch()


@pytest.mark.parametrize("step", ["filter", "take_while"])
@pytest.mark.parametrize(
    "verdict",
    [None, "False", b"", [], (1,), {}, object(), np.str_("x")],
    ids=lambda value: type(value).__name__,
)
def test_a_predicate_without_a_truth_value_is_an_error_that_names_it(step, verdict):
    for dataset in all_readings(hr.Dataset.range(5)):
        with pytest.raises(UserFunctionError) as caught:
            list(getattr(dataset, step)(lambda x: verdict))
        words = str(caught.value)
        assert re.search(rf"<lambda>.* of {step} .*for element 0", words)
        assert repr(verdict) in words
        assert "return a bool" in words


def test_a_function_without_return_is_reported_with_its_result():
    def is_even(x):
        x % 2 == 0  # noqa: B015 - the mistake

    with pytest.raises(
        UserFunctionError, match=r"is_even.*it returned None, which is not a truth value"
    ):
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
def test_bools_and_numbers_of_python_and_numpy_are_predicate_results(odd):
    for dataset in all_readings(hr.Dataset.range(6)):
        assert [int(x) for x in dataset.filter(odd)] == [1, 3, 5]
    for dataset in all_readings(hr.Dataset.range(1, 6)):
        assert [int(x) for x in dataset.take_while(odd)] == [1]


def test_after_a_predicate_error_the_next_element_follows():
    verdicts = iter([True, None, True])
    got = []
    with iter(hr.Dataset.range(3).filter(lambda x: next(verdicts))) as iterator:
        got.append(int(next(iterator)))
        with pytest.raises(UserFunctionError):
            next(iterator)
        got.append(int(next(iterator)))
    assert got == [0, 2]
