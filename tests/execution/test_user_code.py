"""Calls of users' functions: when, with which arguments, and their errors."""

from __future__ import annotations

import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidElementError, OutOfRangeError, UserFunctionError
from headrace.plan.user_function import UserFunction
from tests.execution.contract import outcomes

Dataset = hr.Dataset
Pair = namedtuple("Pair", "a b")


class Recorder:
    """A function that remembers what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, x):
        self.calls.append(int(x))
        return x


# --- calls for requested elements -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda fn: Dataset.range(5000).map(fn),
        lambda fn: Dataset.range(5000).map(lambda x: x + 1).map(lambda x: x - 1).map(fn),
        lambda fn: Dataset.from_generator(lambda: map(fn, range(5000))),
        lambda fn: Dataset.range(5000).map(fn).map(lambda x: x),
        lambda fn: Dataset.range(5000).map(fn).filter(lambda x: True),
        lambda fn: Dataset.range(5000).filter(lambda x: fn(x) >= 0),
        lambda fn: Dataset.from_generator(lambda: map(fn, range(5000))).map(lambda x: x * 2),
        lambda fn: Dataset.range(5000).map(fn).enumerate(),
        lambda fn: Dataset.zip(Dataset.range(6000), Dataset.range(5000).map(fn)),
        lambda fn: Dataset.range(5000).flat_map(lambda x: Dataset.range(1).map(lambda y: fn(x))),
        lambda fn: Dataset.range(1).concatenate(Dataset.range(5000).map(fn)).skip(1),
        lambda fn: Dataset.range(50).batch(5).map(lambda b: (fn(b[0]), b)[1]).repeat(),
        lambda fn: Dataset.range(5000).scan(0, lambda s, x: (s, fn(x))),
        lambda fn: Dataset.range(5000).map(fn).scan(0, lambda s, x: (s, x)),
        lambda fn: Dataset.range(5000).take_while(lambda x: fn(x) >= 0),
        lambda fn: Dataset.range(5000).map(fn).take_while(lambda x: x >= 0),
        lambda fn: Dataset.range(5000).map(fn).padded_batch(1),
        lambda fn: Dataset.range(5000).map(fn).group_by_window(lambda x: x, lambda k, w: w, 1),
        lambda fn: Dataset.range(5000).group_by_window(fn, lambda k, w: w, 1),
        lambda fn: (
            Dataset.range(1)
            .repeat(5000)
            .group_by_window(abs, lambda k, w: w.map(fn).concatenate(w.map(fn)), 1)
        ),
        lambda fn: (
            Dataset.range(1, 5000)
            .map(fn)
            .bucket_by_sequence_length(lambda x: x, [7], [1, 1], no_padding=True)
        ),
        lambda fn: Dataset.range(5000).batch_by_cost(1, lambda x: fn(x) * 0 + 1),
        lambda fn: Dataset.range(5000).map(fn).map(lambda x: [x]).pack_sequences(1),
        lambda fn: (
            Dataset.range(5000)
            .map(fn)
            .map(lambda x: [x])
            .pack_sequences(1, strategy="concat_then_split")
        ),
        lambda fn: Dataset.sample_from_datasets([Dataset.range(5000).map(fn)] * 2),
        lambda fn: Dataset.choose_from_datasets(
            [Dataset.range(5000)], Dataset.range(1).repeat().map(fn)
        ),
    ],
)
def test_a_thousand_elements_need_a_thousand_calls(make):
    fn = Recorder()
    with iter(make(fn)) as iterator:
        for count in range(1, 1001):
            next(iterator)
            assert len(fn.calls) == count


def test_a_batch_needs_one_call_per_element():
    fn = Recorder()
    with iter(Dataset.range(5000).map(fn).batch(10)) as iterator:
        next(iterator)
        next(iterator)
    assert fn.calls == list(range(20))


def test_a_filter_reads_no_element_after_the_one_it_keeps():
    fn, predicate = Recorder(), Recorder()
    dataset = Dataset.range(5000).map(fn).filter(lambda x: predicate(x) % 10 == 9)
    with iter(dataset) as iterator:
        assert int(next(iterator)) == 9
    assert fn.calls == predicate.calls == list(range(10))


def test_a_generator_may_depend_on_the_consumer_of_its_elements():
    feedback = [0]

    def play():
        while len(feedback) < 7:
            yield feedback[-1]

    got = []
    for element in Dataset.from_generator(play).map(abs):
        got.append(int(element))
        feedback.append(int(element) + 1)
    assert got == [0, 1, 2, 3, 4, 5]


def test_a_failing_element_needs_one_call():
    calls = []

    def sometimes(x):
        calls.append(int(x))
        if x == 5 and calls.count(5) == 1:
            raise ValueError("only the first time")
        return x

    got = outcomes(Dataset.range(8).map(sometimes))
    assert got == [0, 1, 2, 3, 4, ("ValueError", 5), 6, 7]
    assert calls == list(range(8))
    calls.clear()
    with iter(Dataset.range(8).map(sometimes).batch(8)) as iterator:
        with pytest.raises(UserFunctionError, match="element 5"):
            next(iterator)
        assert next(iterator).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert calls == list(range(8))


# --- arguments ------------------------------------------------------------------------------------


def test_only_plain_tuples_are_passed_as_several_arguments():
    pairs = Dataset.range(4).map(lambda x: Pair(x, x + 1))
    assert outcomes(pairs.map(lambda pair: pair.a * pair.b)) == [0, 2, 6, 12]
    assert len(outcomes(pairs.filter(lambda pair: bool(pair.a > 1)))) == 2
    assert outcomes(pairs.map(lambda p: p.a + p.b, num_parallel_calls=2)) == [1, 3, 5, 7]
    assert outcomes(pairs.flat_map(lambda pair: Dataset.range(int(pair.a)))) == [
        0, 0, 1, 0, 1, 2,
    ]  # fmt: skip


def test_none_is_rejected_as_an_element():
    with pytest.raises(InvalidElementError, match=r"element 0 of map \(test_user.*None.*return"):
        list(Dataset.range(3).map(lambda x: None))


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_in_a_column_call_is_raised_for_one_element():
    dataset = Dataset.range(2000).map(lambda x: 10 // (x - 1000))
    want = [10 // (x - 1000) for x in range(1000)]
    rest = [10 // (x - 1000) for x in range(1001, 2000)]
    with np.errstate(all="raise"):
        got = outcomes(dataset)
    assert got == [*want, ("FloatingPointError", 1000), *rest]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcomes(dataset) == [*want, ("RuntimeWarning", 1000), *rest]
        kept = outcomes(Dataset.range(2000).filter(lambda x: 10 // (x - 1000) == 10))
    assert kept == [("RuntimeWarning", 1000), 1001]


@pytest.mark.parametrize("error", [StopIteration, OutOfRangeError])
@pytest.mark.parametrize(
    "make",
    [
        lambda fn: Dataset.range(5).map(fn),
        lambda fn: Dataset.range(5).map(fn, num_parallel_calls=2),
        lambda fn: Dataset.range(5).filter(lambda x: fn(x) >= 0),
        lambda fn: Dataset.range(5).flat_map(lambda x: Dataset.from_tensors(fn(x))),
    ],
)
def test_an_error_of_a_function_cannot_end_the_data(make, error):
    def fn(x):
        if x == 2:
            raise error
        return x

    assert outcomes(make(fn)) == [0, 1, (error.__name__, 2), 3, 4]


def test_an_error_without_text_is_reported_completely():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fn(x):
        if x == 2:
            raise MuteError
        return x

    for threads in (None, 2):
        got = outcomes(Dataset.range(5).map(fn, num_parallel_calls=threads))
        assert got == [0, 1, ("MuteError", 2), 3, 4]


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("threads", [None, 2])
def test_failed_elements_count_in_positions_of_later_errors(threads, ahead):
    generated = Dataset.from_generator(lambda: iter(range(1, 9)))
    failing = generated.map(lambda x: 10 // int(x % 3), num_parallel_calls=threads)
    got = outcomes(failing.prefetch(ahead))
    assert [at for kind, at in filter(lambda x: type(x) is tuple, got)] == [2, 5]


def test_positions_are_those_of_the_whole_stream_where_known():
    def fail(x):
        return 1 // 0 if x == 1 else x

    dataset = Dataset.range(3).map(fail).repeat(2)
    error = ("ZeroDivisionError", 1)
    assert outcomes(dataset) == [0, error, 2, 0, ("ZeroDivisionError", 4), 2]
    with iter(dataset) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(dataset) as iterator:
        iterator.set_state(state)
        with pytest.raises(UserFunctionError) as raised:
            next(iterator)
    assert raised.value.position == 1


def test_ragged_rows_are_rejected_with_step_and_line():
    dataset = Dataset.range(4).map(lambda x: np.zeros(int(x))).batch(4)
    with pytest.raises(InvalidElementError, match=r"batch \(test_user_code.py:\d+\) cannot stack"):
        list(dataset)


def test_unbatch_compares_lengths():
    dataset = Dataset.range(2).map(lambda x: {"a": np.zeros(3), "b": np.zeros(4)}).unbatch()
    with pytest.raises(InvalidElementError, match=r"unbatch \(.*'a'.*3 rows.*'b'.*4 rows"):
        list(dataset)
    with pytest.raises(InvalidElementError, match="no axis"):
        list(Dataset.range(3).map(lambda x: {"a": np.zeros(3), "b": x}).unbatch())


def test_an_element_that_cannot_be_gathered_fails_alone():
    class Rows(hr.IndexedSource):
        size = 10

        def gather(self, indices):
            if 4 in indices:
                raise OSError("row 4 is damaged")
            return np.asarray(indices) * 2

    got = []
    with iter(Dataset.from_source(Rows()).map(abs)) as iterator:
        while True:
            try:
                got.append(int(next(iterator)))
            except StopIteration:
                break
            except OSError as error:
                got.append(str(error))
    assert got == [0, 2, 4, 6, "row 4 is damaged", 10, 12, 14, 16, 18]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda rows: rows, [[0, 1, 2], "row 4 is damaged", [6, 7, 8], [9]]),
        (lambda rows: rows.map(lambda x: x), [[0, 1, 2], "row 4 is damaged", [3, 5, 6], [7, 8, 9]]),
    ],
)
def test_a_batch_over_a_source_fails_whole_but_over_a_step_is_filled(between, expected):
    class Rows(hr.IndexedSource):
        size = 10

        def gather(self, indices):
            if 4 in indices:
                raise OSError("row 4 is damaged")
            return np.asarray(indices).copy()

    got = []
    with iter(between(Dataset.from_source(Rows())).batch(3)) as iterator:
        while True:
            try:
                got.append(next(iterator).tolist())
            except StopIteration:
                break
            except OSError as error:
                got.append(str(error))
    # Which of the batches waits for the error is not said here.
    assert sorted(got, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("fn", "is_arity"),
    [
        (lambda x: x, True),
        (lambda a, b, c: a, True),
        (lambda a, b: len(1, 2), False),
        (lambda a, b: int(a) + "x", False),
    ],
)
def test_an_arity_error_explains_how_tuples_are_passed(fn, is_arity):
    pairs = Dataset.from_tensor_slices((np.arange(2), np.arange(2)))
    with pytest.raises(UserFunctionError, match="raised TypeError") as caught:
        list(pairs.map(fn))
    assert ("a tuple is passed as one argument per component" in str(caught.value)) == is_arity


def test_positions_count_elements_dropped_by_a_filter():
    def fails(x):
        return 1 // 0 if x == 8 else x

    kept = hr.Dataset.range(20).filter(lambda x: bool(x) and int(x) % 4 == 0)
    for dataset in (kept.map(fails), kept.filter(fails), kept.map(str).map(int).map(fails)):
        assert outcomes(dataset) == [4, ("ZeroDivisionError", 8), 12, 16]


# --- elements in error messages -------------------------------------------------------------------


def fails(*parts):
    raise ValueError("no")


class WithoutRepr:
    def __repr__(self):
        raise AssertionError("code of the user's ran")


NamedPair = namedtuple("NamedPair", "a b")
PATHS = ["data/first.jpg", "data/second.jpg"]


@pytest.mark.parametrize(
    "step",
    [
        lambda data: data.map(fails),
        lambda data: data.map(fails, num_parallel_calls=2),
        lambda data: data.filter(fails),
        lambda data: data.flat_map(fails),
        lambda data: data.scan(0, fails),
        lambda data: data.group_by_window(fails, lambda key, window: window, 2),
    ],
)
def test_error_of_a_function_shows_the_element(step):
    words = r"for element 0: no\nThe element: .*data/first\.jpg"
    with pytest.raises(UserFunctionError, match=words):
        next(iter(step(Dataset.from_tensor_slices(PATHS))))


@pytest.mark.parametrize(
    ("element", "shown"),
    [
        (np.arange(3, dtype=np.int16), "[0, 1, 2]"),
        (np.zeros((300, 200), np.uint8), "array of shape (300, 200), uint8"),
        (np.float32(0.5), "0.5"),
        ({"a": "a.jpg", "b": np.zeros(99)}, "{'a': 'a.jpg', 'b': array of shape (99,), float64}"),
        ((1, "x"), "(1, 'x')"),
        (b"\0" * 1000, f"{bytes(60)!r}..."[:200]),
        (WithoutRepr(), "<WithoutRepr>"),
        (Path("data/a.jpg"), "'data/a.jpg'"),
        ({WithoutRepr: 1, "b": 2}, "{<type>: 1, 'b': 2}"),  # keys that cannot be sorted
        (dict.fromkeys(range(10**5)), "{0: None, 1: None, 2: None, 3: None, "),
        (NamedPair("x", np.zeros(99)), "NamedPair(a='x', b=array of shape (99,), float64)"),
    ],
)
def test_elements_are_shown_shortened(element, shown):
    error = UserFunction(fails, "map", contain_exits=True).wrap_error(ValueError("no"), 4, element)
    line = str(error).split("\n")[1].removeprefix("The element: ")
    assert len(line) <= 200
    assert line.startswith(shown[:150])


def test_long_text_is_truncated():
    call = UserFunction(fails, "map", contain_exits=True)
    error = call.wrap_error(ValueError("no"), 4, ["x" * 500] * 9)
    assert len(str(error).split("\n")[1]) <= len("The element: ") + 200
