"""A rewritten plan has the same elements, and a function is lifted only where that is proved."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.execution.build import start
from headrace.plan.elements import Gather
from headrace.plan.splits import split_sizes
from headrace.plan.traverse import walk
from headrace.rewrites.columns import trace
from headrace.rewrites.optimize import optimize

Dataset = hr.Dataset
SCALE = 3
TABLE = np.arange(10)
INT = ArraySpec((), np.int64)
FLOAT = ArraySpec((), np.float32)


def execute(plan):
    iterator = start(plan, seed=5)
    rows = []
    while (chunk := iterator.next_chunk(7)) is not None:
        rows += chunk.rows()
    iterator.close()
    return rows


ELEMENTWISE = {
    "square": (lambda x: x * x, INT, np.int64),
    "polynomial": (lambda x: 3 * x**1 - 2 if False else 3 * x - 2, INT, np.int64),
    "division": (lambda x: x / 2, INT, np.float64),
    "weak promotion": (lambda x: x * 2.5 + 1, FLOAT, np.float32),
    "comparison": (lambda x: (x > 3) & (x < 9), INT, np.bool_),
    "ufunc": (lambda x: np.sqrt(np.maximum(x, 4)), INT, np.float64),
    "cast": (lambda x: x.astype(np.float32) / 255, INT, np.float32),
    "global number": (lambda x: x * SCALE, INT, np.int64),
    "negative": (lambda x: -abs(x), INT, np.int64),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_arithmetic_is_applied_to_columns_with_the_same_bits(name):
    fn, spec, dtype = ELEMENTWISE[name]
    assert trace(fn, spec) == ArraySpec((), dtype)
    values = np.arange(-20, 50).astype(spec.dtype)
    by_element = [np.asarray(fn(value)) for value in values]
    assert {result.dtype for result in by_element} == {np.dtype(dtype)}
    assert np.array_equal(fn(values), np.stack(by_element))


def test_structures_are_lifted_component_by_component():
    spec = {"a": ArraySpec((2,), np.int64), "b": ArraySpec((2,), np.float32)}
    lifted = trace(lambda d: {"sum": d["a"] + d["b"], "a": d["a"]}, spec)
    assert lifted == {"sum": ArraySpec((2,), np.float64), "a": ArraySpec((2,), np.int64)}


NOT_ELEMENTWISE = {
    "branch": lambda x: x if x > 3 else -x,
    "reduction": lambda x: np.sum(x),
    "inexact": lambda x: np.exp(x),
    "chance": lambda x: x + np.random.rand(),
    "builtin": lambda x: int(x) + 1,
    "print": lambda x: print(x) or x,
    "constant": lambda x: 7,
    "array": lambda x: x + TABLE,
    "attribute": lambda x: x * x.ndim,
    "inner function": lambda x: (lambda y: y * y)(x),
    "comprehension": lambda x: [x for _ in range(2)],
    "module": lambda x: x * math.pi,
    "format": lambda x: f"{x}",
    "index": lambda x: x[0],
    "reduce method": lambda x: np.add.reduce(x),
    "list": lambda x: [x, x],
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_everything_else_is_called_with_elements(name):
    assert trace(NOT_ELEMENTWISE[name], INT) is None


def test_a_function_with_an_effect_is_called_with_elements():
    seen = {}

    def note(x):
        seen["last"] = x
        return x * 2

    def count(x):
        nonlocal calls
        calls += 1
        return x

    calls = 0
    assert trace(note, INT) is None
    assert trace(count, INT) is None
    assert calls == 0


def test_components_of_different_shapes_are_not_lifted():
    spec = (ArraySpec((4,), np.float32), ArraySpec((), np.float32))
    assert trace(lambda a, b: a * b, spec) is None
    rows = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    scales = np.array([2, 3], np.float32)
    dataset = Dataset.from_tensor_slices((rows, scales)).map(lambda a, b: a * b)
    assert np.array_equal(np.stack(list(dataset)), rows * scales[:, None])


def test_the_gather_rises_above_every_step_that_does_not_look():
    dataset = (
        Dataset.from_tensor_slices(np.arange(12))
        .shuffle(5, seed=1).repeat(2).skip(1).take(20).shard(2, 0).batch(3)
    )  # fmt: skip
    rewritten = optimize(dataset.plan)
    assert isinstance(rewritten, Gather)
    assert sum(isinstance(node, Gather) for node in walk(rewritten)) == 1


STEPS = {
    "shuffle": lambda ds: ds.shuffle(4, seed=2),
    "repeat": lambda ds: ds.repeat(2),
    "take": lambda ds: ds.take(7),
    "skip": lambda ds: ds.skip(2),
    "shard": lambda ds: ds.shard(3, 1),
    "batch": lambda ds: ds.batch(2, drop_remainder=True),
    "unbatch": lambda ds: ds.batch(4).unbatch(),
    "square": lambda ds: ds.map(lambda x: x * x),
    "branch": lambda ds: ds.map(lambda x: x if np.sum(x) % 2 else -x),
    "even": lambda ds: ds.filter(lambda x: np.sum(x) % 2 == 0),
    "small": lambda ds: ds.filter(lambda x: x < 50) if ds.element_spec.shape == () else ds,
    "cache": lambda ds: ds.cache(),
    "concatenate": lambda ds: ds.concatenate(ds),
}


@given(names=st.lists(st.sampled_from(sorted(STEPS)), max_size=6), size=st.integers(1, 30))
def test_a_rewritten_plan_has_the_same_elements(names, size):
    dataset = Dataset.range(size)
    for name in names:
        with np.errstate(over="ignore"):
            if dataset.cardinality() == 0 or not execute(dataset.plan):
                break
        dataset = STEPS[name](dataset)
    # NumPy warns of an overflow in a scalar and not in a column; the bits are the same.
    with np.errstate(over="ignore"):
        before, after = execute(dataset.plan), execute(optimize(dataset.plan))
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a, b)
        assert a.dtype == b.dtype
    assert split_sizes(optimize(dataset.plan)) == split_sizes(dataset.plan)
