"""A function is called with whole columns only where each element comes out the same, bit for bit.

The oracle is a plain Python loop over the elements.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.element.normalize import normalize
from headrace.element.spec import ArraySpec
from headrace.element.stack import unstack
from headrace.element.structure import flatten
from headrace.errors import InvalidElementError
from headrace.execution.elementwise import call_on_columns, may_raise_on_warnings
from headrace.plan.elementwise import Filter, Map
from headrace.rewrites.columns import infer_columnar_spec, mark_columnar
from tests.rewrites.functions import compile_function, random_case

INT = ArraySpec((), np.int64)
FLOAT = ArraySpec((), np.float64)
NUMBERS = np.array([0, 1, 2, 5, 9, 300])

# Names like those of attributes of arrays, which admit nothing.
shape = size = ndim = 7
K = 3


@pytest.fixture(autouse=True)
def no_warnings():
    """Warnings are errors in these tests, and where they are, columns are not used."""
    with np.errstate(all="ignore"):
        yield


def by_rows(fn, columns, size) -> list[Any]:
    """Return what a loop makes of the elements: the result of each, or the error."""
    made = []
    for row in unstack(columns, size):
        try:
            result = normalize(fn(*row) if type(row) is tuple else fn(row))
            if result is None:
                raise InvalidElementError("None is not an element")
            made.append(result)
        except Exception as error:
            made.append(error)
    return made


def assert_same(expected, found) -> None:
    """Assert equal types, dtypes, shapes and bits; any NaN is as good as another."""
    leaves, structure = flatten(expected)
    others, other_structure = flatten(found)
    assert structure == other_structure
    for a, b in zip(leaves, others, strict=True):
        assert type(a) is type(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind == "f":
            # Equal numbers with equal signs have equal bits; a long double also has padding.
            assert np.array_equal(a, b, equal_nan=True)
            numbers = ~np.isnan(a)
            assert np.array_equal(np.signbit(a[numbers]), np.signbit(b[numbers]))
        else:
            assert a.tobytes() == b.tobytes()


def assert_columns_give_the_elements(fn, columns, size) -> bool:
    """Assert that columns, if they are used at all, give what a loop does; say whether they are."""
    result = call_on_columns(fn, columns, size)
    if result is not None:
        found = unstack(result, size)
        for expected, row in zip(by_rows(fn, columns, size), found, strict=True):
            assert not isinstance(expected, Exception), expected
            assert_same(expected, row)
    return result is not None


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_random_functions_give_the_same_elements_on_columns_as_in_a_loop(seed):
    for case in [random_case(seed * 16 + i) for i in range(16)]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_columns_give_the_elements(case.fn, case.columns, case.size)


def test_many_of_the_random_functions_are_called_with_columns():
    cases = [random_case(seed) for seed in range(300)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        used = [call_on_columns(c.fn, c.columns, c.size) is not None for c in cases]
    assert 100 < sum(used) < 250


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_a_plan_over_a_random_function_has_its_elements_and_its_errors(seed):
    case = random_case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = by_rows(case.fn, case.columns, case.size)
        iterator = iter(hr.Dataset.from_tensor_slices(case.columns).map(case.fn))
        for position, result in enumerate(expected):
            if isinstance(result, Exception):
                with pytest.raises(hr.errors.HeadraceError) as caught:
                    next(iterator)
                if isinstance(caught.value, hr.errors.UserFunctionError):
                    assert caught.value.position == position
                    assert caught.value.original_type == type(result).__name__
            else:
                assert_same(result, next(iterator))
        assert next(iterator, None) is None
        iterator.close()


def swallows(x):
    try:
        if x > 5:
            return x * 2
    except Exception:
        pass
    return x * 1


def in_a_with(x):
    with np.errstate(all="ignore"):
        return x * 2


def loops(x):
    for _ in (1, 2):
        x = x * 2
    return x


def adds_in_place(x):
    x += 1
    return x


def keyword_only(x, *, k=2):
    return x * k


def yields(x):
    yield x


def reads_what_is_not_there(x):
    return x * absent  # noqa: F821


HOSTILE = {
    "a handler hides what a tracer raises": swallows,
    "with": in_a_with,
    "loop": loops,
    "in place": adds_in_place,
    "keyword-only default": keyword_only,
    "generator": yields,
    "unbound name": reads_what_is_not_there,
    "attribute named like a global": lambda x: x / x.shape[0],
    "x.size": lambda x: x * x.size,
    "x.ndim": lambda x: x * x.ndim,
    "np.shape": lambda x: x * len(np.shape(x)),
    "np.size": lambda x: x * np.size(x),
    "np.ndim": lambda x: x * np.ndim(x),
    "f-string as a key": lambda x: {f"{x}": x},
    "format as a key": lambda x: {"%s" % (x,): x},  # noqa: UP031
    "format of a dict": lambda x: {"%s" % {"a": x}: x},  # noqa: UP031
    "repr": lambda x: {repr(x): x},
    "complex constant": lambda x: x * 1j,
    "complex type": lambda x: np.square(x * np.complex64(1 + 2j)),
    "chained comparison": lambda x: 1 < x < 9,
    "and": lambda x: x and 1,
    "or": lambda x: x or 1,
    "not": lambda x: not x,
    "is": lambda x: x * 2 if x is NUMBERS else x,
    "in": lambda x: x * 2 if x in (1, 2) else x,
    "conditional": lambda x: x if x else -x,
    "power": lambda x: x**2,
    "matrix product": lambda x: x @ x,
    "item": lambda x: x[()],
    "other branch": lambda x: x if K > 5 else np.exp(x),
    "comprehension": lambda x: [x + i for i in (1, 2)][-1],
    "generator expression": lambda x: next(x + i for i in (1,)),
    "method of a ufunc": lambda x: np.add.reduce(x),
    "argument of a ufunc": lambda x: np.add(x, 1, dtype="f4"),
    "constant": lambda x: 7,
    "constant beside": lambda x: (x, 7),
    "None": lambda x: None,
    "None beside": lambda x: (x, None),
    "nothing": lambda x: (),
    "list": lambda x: [x, x],
    "key that is no str or int": lambda x: {1.5: x},
    "bool as a key": lambda x: {True: x},
    "dtype with another byte order": lambda x: x.astype(">i4"),
    "complex dtype": lambda x: x.astype("complex64"),
    "object dtype": lambda x: x.astype(object),
    "structured dtype": lambda x: x.astype("i4,f4"),
    "no dtype": lambda x: x.astype(None),
    "astype with copy": lambda x: x.astype("int64", copy=False),
    "an integer that is rounded twice": lambda x: x.astype("float32") + (2**60 + 2**36 + 1),
    "int": lambda x: int(x),
    "float": lambda x: float(x),
    "numpy's int": lambda x: np.int8(x),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_unproved_function_is_called_with_elements(name):
    assert infer_columnar_spec(HOSTILE[name], INT) is None
    assert call_on_columns(HOSTILE[name], NUMBERS, len(NUMBERS)) is None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plan_with_an_adversarial_function_equals_a_loop(name):
    fn = HOSTILE[name]
    expected = by_rows(fn, NUMBERS, len(NUMBERS))
    if any(isinstance(result, Exception) for result in expected) or fn is yields:
        return
    found = list(hr.Dataset.from_tensor_slices(NUMBERS).map(fn))
    for a, b in zip(expected, found, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("target", ["u1", "int8", "uint32", np.int64, int])
@pytest.mark.parametrize("source", ["f2", "f4", "f8"])
def test_floats_are_converted_to_integers_only_by_rows(source, target):
    assert infer_columnar_spec(lambda x: x.astype(target), ArraySpec((), source)) is None


@pytest.mark.parametrize(
    "dtype", ["c8", "M8[s]", "m8[s]", "g", ">i4", ">f8", "i4,f4", "S", "U"], ids=str
)
def test_columns_of_other_kinds_are_called_with_elements(dtype):
    assert infer_columnar_spec(lambda x: x, ArraySpec((), dtype)) is None
    column = np.zeros(3, object if dtype in "SU" else dtype)
    assert call_on_columns(lambda x: x, column, 3) is None


class Pair(NamedTuple):
    a: Any
    b: Any

    def __getitem__(self, index):
        return np.sum(tuple(self)[index])


def test_a_namedtuple_is_passed_whole_and_by_rows():
    def add(pair):
        return pair[0] + 1

    assert infer_columnar_spec(add, Pair(INT, INT)) is None
    assert call_on_columns(add, Pair(NUMBERS, NUMBERS), len(NUMBERS)) is None


PROVED = {
    "square": lambda x: x * x,
    "walrus": lambda x: (y := x + 1) * y,
    "abs": lambda x: abs(x),
    "plus": lambda x: +x,
    "builtin dtype": lambda x: x.astype(float),
    "keyword dtype": lambda x: x.astype(dtype=np.float32),
    "global": lambda x: x * K,
    "default": lambda x, k=2.5: x * k,
    "branch on a number": lambda x: x * 2 if K > 2 else x[0],
    "dict": lambda x: {"a": x, "b": (x + 1, -x), 1: x},
    "any arguments": lambda *x: x[0] + 1,
    "any function": lambda x: np.minimum(np.absolute(x), 255) / 255,
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("name", PROVED)
@pytest.mark.parametrize("dtype", ["i8", "f4"])
def test_arithmetic_stays_in_columns(name, dtype):
    column = NUMBERS.astype(dtype)
    assert infer_columnar_spec(PROVED[name], ArraySpec((), dtype)) is not None
    assert assert_columns_give_the_elements(PROVED[name], column, len(column))


def test_a_map_and_a_filter_are_marked_in_the_plan():
    numbers = hr.Dataset.range(5).plan
    assert mark_columnar(Map(input=numbers, fn=lambda x: x * x)).output_spec == INT
    assert mark_columnar(Filter(input=numbers, predicate=lambda x: x > 2)).columnar
    assert not mark_columnar(Filter(input=numbers, predicate=lambda x: x % 2)).columnar


def test_a_rebound_closure_variable_is_read_again():
    def around():
        k = 2

        def set_to(value):
            nonlocal k
            k = value

        return (lambda x: x * k), set_to

    fn, set_to = around()
    assert np.array_equal(call_on_columns(fn, NUMBERS, 6), NUMBERS * 2)
    set_to(3)
    assert np.array_equal(call_on_columns(fn, NUMBERS, 6), NUMBERS * 3)
    set_to(2.5)
    assert call_on_columns(fn, NUMBERS, 6).dtype == np.float64
    set_to(NUMBERS)
    assert call_on_columns(fn, NUMBERS, 6) is None


def test_a_rebound_module_global_takes_another_branch():
    fn = compile_function("def f(x):\n    return x * 2 if K > 2 else np.sqrt(x).astype('int64')")
    assert np.array_equal(call_on_columns(fn, NUMBERS, 6), NUMBERS * 2)
    fn.__globals__["K"] = 1
    assert call_on_columns(fn, NUMBERS, 6) is None
    fn.__globals__["K"] = 9
    assert np.array_equal(call_on_columns(fn, NUMBERS, 6), NUMBERS * 2)
    fn.__globals__["np"] = None
    assert call_on_columns(fn, NUMBERS, 6) is None


def test_a_function_whose_code_or_defaults_change_is_proved_again():
    def fn(x, k=2):
        return x * k

    assert np.array_equal(call_on_columns(fn, NUMBERS, 6), NUMBERS * 2)
    fn.__defaults__ = (5,)
    assert np.array_equal(call_on_columns(fn, NUMBERS, 6), NUMBERS * 5)
    fn.__code__ = swallows.__code__
    assert call_on_columns(fn, NUMBERS, 6) is None


def test_a_replaced_function_of_numpy_is_not_trusted(monkeypatch):
    def fn(x):
        return np.square(x)

    assert call_on_columns(fn, NUMBERS, 6) is not None
    monkeypatch.setattr(np, "square", lambda x: np.sum(x))
    assert call_on_columns(fn, NUMBERS, 6) is None


def test_no_two_arrays_of_a_result_share_memory():
    first, second = call_on_columns(lambda x: ((y := x + 1), y), NUMBERS, 6)
    assert not np.shares_memory(first, second)
    made = call_on_columns(lambda d: {"a": d["a"], "b": d["a"]}, {"a": NUMBERS}, 6)
    assert not np.shares_memory(made["a"], made["b"])


def test_a_result_has_fresh_containers():
    columns = {"a": NUMBERS}
    made = call_on_columns(lambda d: d, columns, 6)
    assert made is not columns
    assert made["a"] is NUMBERS


def test_the_element_is_not_modified():
    column = NUMBERS.copy()
    assert call_on_columns(adds_in_place, column, 6) is None
    assert np.array_equal(column, NUMBERS)


def test_components_of_different_shapes_are_processed_by_rows():
    columns = (np.ones((3, 3)), np.arange(3.0))
    assert call_on_columns(lambda a, b: a * b, columns, 3) is None


def test_a_result_of_another_spec_than_expected_is_dropped():
    verdict = ArraySpec((), np.bool_)
    assert call_on_columns(lambda x: x > 2, NUMBERS, 6, verdict) is not None
    assert call_on_columns(lambda x: x * 2, NUMBERS, 6, verdict) is None
    rows = np.ones((2, 3))
    assert call_on_columns(lambda x: x * 2, rows, 2, ArraySpec((None,), float)) is not None
    assert call_on_columns(lambda x: x * 2, rows, 2, ArraySpec((4,), float)) is None


def test_an_integer_that_overflows_is_processed_by_rows():
    column = np.arange(4, dtype=np.uint8)
    assert call_on_columns(lambda x: x + 300, column, 4) is None
    assert assert_columns_give_the_elements(lambda x: x < 300, column, 4)
    assert assert_columns_give_the_elements(lambda x: x < 2**70, column, 4)


RAISES = {
    "overflow": lambda x: x * (2**62),
    "division": lambda x: 10 // (x - 1),
    "root": lambda x: np.sqrt(x - 5),
}


@pytest.mark.parametrize("name", RAISES)
def test_if_warnings_raise_elements_are_computed_one_by_one(name):
    with np.errstate(all="raise"):
        assert call_on_columns(RAISES[name], NUMBERS, 6) is None
    with np.errstate(all="warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call_on_columns(RAISES[name], NUMBERS, 6) is None
        warnings.simplefilter("ignore")
        assert call_on_columns(RAISES[name], NUMBERS, 6) is not None


def test_the_first_filter_that_matches_decides_whether_a_warning_raises():
    with np.errstate(all="warn"), warnings.catch_warnings():
        warnings.resetwarnings()
        assert not may_raise_on_warnings()
        warnings.simplefilter("error", DeprecationWarning)
        assert not may_raise_on_warnings()
        warnings.simplefilter("error", RuntimeWarning)
        assert may_raise_on_warnings()
        warnings.filterwarnings("ignore", message="overflow")
        assert may_raise_on_warnings()
        warnings.simplefilter("ignore", RuntimeWarning)
        assert not may_raise_on_warnings()


@pytest.mark.parametrize("mode", ["raise", "call", "log"])
def test_modes_that_run_code_may_raise(mode):
    with np.errstate(divide=mode):
        assert may_raise_on_warnings()


def test_an_error_within_a_chunk_drops_one_element_and_has_its_position():
    def divide(x):
        return 10 // (x - 1000)

    dataset = hr.Dataset.range(2000).map(divide)
    with np.errstate(all="raise"):
        iterator = iter(dataset)
        for position in range(1000):
            assert next(iterator) == 10 // (position - 1000)
        with pytest.raises(hr.errors.UserFunctionError) as caught:
            next(iterator)
        assert caught.value.position == 1000
        assert caught.value.original_type == "FloatingPointError"
        assert len(list(iterator)) == 999
        iterator.close()
