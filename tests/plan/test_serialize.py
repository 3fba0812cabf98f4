"""Plans as bytes: what travels, what cannot, and what the refusal says."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
import warnings

import numpy as np
import pytest

import headrace as hr
from headrace import versions
from headrace.errors import FailedPreconditionError
from headrace.plan.serialize import dump_plan, load_plan
from headrace.plan.source import Source
from headrace.plan.traverse import element_spec, outline, walk

Dataset = hr.Dataset


def travelled(dataset):
    return load_plan(dump_plan(dataset.plan))


def test_a_plan_is_sent_with_its_functions():
    factor = 3
    plan = travelled(Dataset.range(4).shuffle(3).map(lambda x: f"{x * factor}").batch(2))
    (found,) = [node.fn for node in walk(plan) if node.kind == "map"]
    assert [found(x) for x in range(3)] == ["0", "3", "6"]


def test_a_received_plan_is_the_same():
    both = Dataset.zip({"a": Dataset.range(4), "b": Dataset.from_tensor_slices(np.ones(4))})
    dataset = both.shuffle(3).concatenate(both).batch(2).enumerate()
    plan = travelled(dataset)
    assert outline(plan) == outline(dataset.plan)
    assert element_spec(plan) == dataset.element_spec
    assert [node.number for node in walk(plan)] == [None] * len(list(walk(dataset.plan)))


def test_a_step_that_occurs_twice_occurs_twice_after_loading():
    half = Dataset.range(4).shuffle(3)
    plan = travelled(half.concatenate(half))
    assert plan.first is plan.second


def test_a_shared_cache_is_shared_after_loading():
    cached = Dataset.range(4).cache()
    plan = travelled(cached.take(2).concatenate(cached))
    keys = {id(node.key) for node in walk(plan) if node.kind == "cache"}
    assert len(keys) == 1
    assert "CacheKey()" in outline(plan)


def test_a_plan_supports_copy():
    plan = Dataset.range(4).shuffle(3, seed=4).plan
    for twin in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert twin is not plan
        assert outline(twin) == outline(plan)


def test_a_dataset_in_a_closure_is_sent_without_a_warning():
    inner = Dataset.range(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = travelled(Dataset.range(2).flat_map(lambda x: inner))
    assert plan.fn(0).cardinality() == 3


class Locked(Source):
    size = 1

    def __init__(self):
        self.lock = threading.Lock()

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


LOCK = threading.Lock()


def guarded_by_a_closure():
    lock = threading.Lock()

    def guarded(x):
        with lock:
            return x

    return guarded


def written(text, **names):
    scope = {"__name__": "__main__", **names}
    exec(text, scope)
    return scope["guarded"]


def with_an_empty_cell():
    def guarded(x):
        return later, lock

    lock = threading.Lock()
    if lock.locked():
        later = 3
    return guarded


REFUSED = {
    "a closure": (guarded_by_a_closure(), r"guarded:\d+ of map \(.*\) refers to `lock`, a lock"),
    "a global": (
        written("def guarded(x):\n  return LOCK", LOCK=LOCK),
        r"guarded:1 of map \(.*\) refers to `LOCK`, a lock that cannot be pickled",
    ),
    "a global of a function within": (
        written("def guarded(x):\n  return [LOCK for y in x]", LOCK=LOCK),
        r"guarded:1 of map \(.*\) refers to `LOCK`, a lock that cannot be pickled",
    ),
    "a closure beside an empty one": (with_an_empty_cell(), "refers to `lock`, a lock"),
    "a default": (
        written("def guarded(x, lock=LOCK):\n  return x", LOCK=LOCK),
        r"guarded:1 of map \(.*\) refers to a function that cannot be pickled",
    ),
    "a partial": (
        functools.partial(guarded_by_a_closure()),
        r"the function partial of map \(.*\) refers to `lock`, a lock",
    ),
    "a partial's argument": (
        functools.partial(max, LOCK),
        r"the function partial of map \(.*\) refers to a partial that cannot be pickled",
    ),
    "an object that can be called": (
        type("Guard", (), {"__call__": max, "__init__": lambda s: setattr(s, "lock", LOCK)})(),
        "refers to a Guard that cannot be pickled",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unpicklable_object_is_named(name):
    fn, words = REFUSED[name]
    with pytest.raises(FailedPreconditionError, match=f"(?s)cannot be sent.*{words}"):
        dump_plan(Dataset.range(3).map(abs).map(fn).batch(2).plan)


def test_an_open_file_is_rejected_and_not_copied():
    with open(__file__, encoding="utf-8") as text:
        plan = Dataset.range(3).map(lambda x: text.readline()).plan
        with pytest.raises(FailedPreconditionError, match=r"`text`.*the open file '.*\.py'"):
            dump_plan(plan)


def test_a_function_that_prints_is_sent(monkeypatch):
    out = sys.__stdout__
    monkeypatch.setattr(sys, "stdout", out)
    assert load_plan(dump_plan(Dataset.range(3).map(lambda x: print(x, file=out)).plan))


def test_a_cached_function_of_a_script_is_pickled_without_its_results():
    @functools.lru_cache(maxsize=3)
    def load(x):
        return [x]

    loaded = load(1)
    fn = load_plan(dump_plan(hr.Dataset.range(3).map(lambda x: load(1)).plan)).fn
    assert fn(0) == loaded
    assert fn(0) is fn(1)
    assert fn(0) is not loaded


def test_a_source_that_cannot_be_pickled_is_named():
    with pytest.raises(FailedPreconditionError, match=r"FromSource.source: a Locked that cannot"):
        dump_plan(Dataset.from_source(Locked()).map(abs).plan)


class Twin:
    """Cannot be pickled a second time."""

    times = 0

    def __reduce__(self):
        Twin.times += 1
        if Twin.times == 1:
            raise ValueError("once only")
        return Twin, ()


def test_an_error_that_does_not_recur_is_passed_on():
    with pytest.raises(FailedPreconditionError, match=r"cannot be sent.*once only"):
        dump_plan(Dataset.range(3).map(functools.partial(max, Twin())).plan)


@pytest.mark.parametrize("value", [3, "plan", Dataset])
def test_data_that_is_not_a_plan_is_rejected(value):
    header, _, _ = dump_plan(Dataset.range(1).plan).partition(b"\n")
    with pytest.raises(FailedPreconditionError, match="expected a pickled plan, found"):
        load_plan(header + b"\n" + pickle.dumps(value))


def test_a_plan_of_another_python_version_is_rejected_before_unpickling():
    mine = ".".join(map(str, sys.version_info[:2]))
    data = dump_plan(Dataset.range(1).plan).replace(mine.encode(), b"3.99", 1)
    header, _, _ = data.partition(b"\n")
    words = rf"pickled by Python 3\.99.*runs Python {mine}"
    with pytest.raises(FailedPreconditionError, match=words):
        load_plan(header + b"\n" + b"not a pickle")


def test_a_plan_of_the_release_before_is_read():
    header, _, pickled = dump_plan(Dataset.range(3).plan).partition(b"\n")
    fields = header.split()
    fields[1] = b"%d" % versions.OLDEST_PLAN_FORMAT
    assert list(Dataset._from_plan(load_plan(b" ".join(fields) + b"\n" + pickled))) == [0, 1, 2]


def test_a_plan_of_another_format_is_rejected_before_unpickling():
    for data in (pickle.dumps(3), b"headrace-plan 99 3.11 9.9\nnot a pickle"):
        with pytest.raises(FailedPreconditionError, match="plans of formats 3 to 4, but got"):
            load_plan(data)
