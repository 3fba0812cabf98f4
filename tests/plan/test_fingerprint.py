"""Fingerprints: equal for plans that say the same, different for those that do not."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

import headrace as hr
from headrace.plan.fingerprint import fingerprint, fingerprint_with_steps
from headrace.plan.serialize import dump_plan, load_plan
from headrace.plan.source import Source

Dataset = hr.Dataset


def of(fn):
    return fingerprint(Dataset.range(10).map(fn).plan)


def written(text, **names):
    """Return the function `fn` of a module with this text."""
    scope = {"__name__": "pipeline", "np": np, **names}
    exec(textwrap.dedent(text), scope)
    return scope["fn"]


def make_pipeline(factor):
    return Dataset.range(10).map(lambda x: str(x * factor)).filter(lambda x: len(x) > 1).batch(3)


def test_equal_plans_have_equal_fingerprints():
    assert fingerprint(make_pipeline(3).plan) == fingerprint(make_pipeline(3).plan)
    assert fingerprint(make_pipeline(3).plan) != fingerprint(make_pipeline(4).plan)
    assert fingerprint(Dataset.range(3).plan) != fingerprint(Dataset.range(4).plan)
    one, other = Dataset.range(3).map(lambda x: x + 1), Dataset.range(3).map(lambda x: x - 1)
    assert fingerprint(one.plan) != fingerprint(other.plan)
    zeros, ones = (Dataset.from_tensor_slices(np.full(5, n)) for n in (0, 1))
    assert fingerprint(zeros.plan) != fingerprint(ones.plan)


def test_location_and_number_of_a_step_are_ignored():
    one = Dataset.range(3).shuffle(2)

    other = Dataset.range(3).shuffle(2)
    assert one.plan.location != other.plan.location
    assert fingerprint(one.plan) == fingerprint(other.plan.with_number(7))


#: Pairs of functions with different behavior.
DIFFERENT = {
    "a global of a function within": (
        ("fn = lambda x: (lambda y: y * SCALE)(x)", {"SCALE": 2}),
        ("fn = lambda x: (lambda y: y * SCALE)(x)", {"SCALE": 3}),
    ),
    "a global of a function within a function within": (
        ("fn = lambda x: [[y * SCALE for y in (z,)] for z in (x,)]", {"SCALE": 2}),
        ("fn = lambda x: [[y * SCALE for y in (z,)] for z in (x,)]", {"SCALE": 3}),
    ),
    "code of a function within": (
        ("fn = lambda x: (lambda y: y * 2)(x)", {}),
        ("fn = lambda x: (lambda y: y * 3)(x)", {}),
    ),
    "a function that is called": (
        ("def help(x):\n  return x + 1\ndef fn(x):\n  return help(x)", {}),
        ("def help(x):\n  return x + 2\ndef fn(x):\n  return help(x)", {}),
    ),
    "a function that a called one calls": (
        ("def a(x):\n  return 1\ndef b(x):\n  return a(x)\ndef fn(x):\n  return b(x)", {}),
        ("def a(x):\n  return 2\ndef b(x):\n  return a(x)\ndef fn(x):\n  return b(x)", {}),
    ),
    "a default": (("def fn(x, y=1):\n  return x", {}), ("def fn(x, y=2):\n  return x", {})),
    "a keyword's default": (
        ("def fn(x, *, y=1):\n  return x", {}),
        ("def fn(x, *, y=2):\n  return x", {}),
    ),
    "a closure": (
        ("def make(n):\n  return lambda x: x + n\nfn = make(1)", {}),
        ("def make(n):\n  return lambda x: x + n\nfn = make(2)", {}),
    ),
    "a closure that is empty": (
        ("def make():\n  f = lambda x: x + n\n  if 0:\n    n = 1\n  return f\nfn = make()", {}),
        ("def make():\n  f = lambda x: x + n\n  n = 1\n  return f\nfn = make()", {}),
    ),
    "an array": (
        ("fn = lambda x: x + TABLE", {"TABLE": np.arange(3)}),
        ("fn = lambda x: x + TABLE", {"TABLE": np.arange(3) + 1}),
    ),
    "an array of strings": (
        ("fn = lambda x: TABLE", {"TABLE": np.array(["a", "bb"], object)}),
        ("fn = lambda x: TABLE", {"TABLE": np.array(["a", "bc"], object)}),
    ),
    "a dtype": (
        ("fn = lambda x: x + ONE", {"ONE": np.int32(1)}),
        ("fn = lambda x: x + ONE", {"ONE": np.int64(1)}),
    ),
    "a set": (
        ("fn = lambda x: x in KNOWN", {"KNOWN": {"a", "b"}}),
        ("fn = lambda x: x in KNOWN", {"KNOWN": {"a", "c"}}),
    ),
    "a value of a dict": (
        ("fn = lambda x: KNOWN[x]", {"KNOWN": {"a": 1, "b": 2}}),
        ("fn = lambda x: KNOWN[x]", {"KNOWN": {"a": 2, "b": 1}}),
    ),
    "a builtin": (("fn = max", {}), ("fn = min", {})),
    "a method of a value": (("fn = 'a'.join", {}), ("fn = 'b'.join", {})),
    "a ufunc": (("fn = np.add", {}), ("fn = np.multiply", {})),
    "the nested dataset": (
        ("fn = lambda x: INNER", {"INNER": Dataset.range(3)}),
        ("fn = lambda x: INNER", {"INNER": Dataset.range(4)}),
    ),
    "what a partial holds": (
        ("fn = lambda x, n: x", {}),
        ("import functools\nfn = functools.partial(lambda x, n: x, n=3)", {}),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_functions_with_different_behavior_differ(name):
    one, other = ((text, names) for text, names in DIFFERENT[name])
    assert of(written(one[0], **one[1])) != of(written(other[0], **other[1]))
    for text, names in (one, other):
        assert of(written(text, **names)) == of(written(text, **names))


def test_a_function_that_calls_itself_has_a_fingerprint():
    def count(x):
        return x if x < 1 else count(x - 1)

    assert of(count) == of(count)
    recursive = "def fn(x):\n  return fn(x - 1) if x else 0"
    assert of(written(recursive)) == of(written(recursive))


def test_mutually_recursive_functions_terminate():
    names = [f"f{n}" for n in range(40)]
    calls = " + ".join(f"{name}(x)" for name in names)
    text = "".join(f"def {name}(x):\n  return {calls}\n" for name in names) + "fn = f0"
    assert of(written(text)) == of(written(text))
    assert of(written(text)) != of(written(text.replace("def f7(x):\n  ", "def f7(x):\n  x = 3;")))


def test_a_dataset_in_a_function_counts_as_its_plan_after_any_iterations():
    inner = Dataset.range(3)
    outer = Dataset.range(5).flat_map(lambda x: inner)
    before = fingerprint(outer.plan)
    iter(inner)
    iter(inner)
    assert fingerprint(outer.plan) == before


def test_the_order_of_sets_and_dicts_is_ignored():
    one, other = {"a": 1, "b": {3, 4, 5}}, {"b": {5, 4, 3}, "a": 1}
    text = "fn = lambda x: KNOWN"
    assert of(written(text, KNOWN=one)) == of(written(text, KNOWN=other))


class Scaler:
    def __init__(self, by):
        self.by = by

    def scale(self, x):
        return x * self.by

    def __call__(self, x):
        return x * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


def test_the_contents_of_an_object_count():
    assert of(Scaler(2)) == of(Scaler(2)) != of(Scaler(3))
    assert of(Scaler(2).scale) == of(Scaler(2).scale) != of(Scaler(3).scale)
    assert of(Slotted(2)) == of(Slotted(2)) != of(Slotted(3))
    twice, thrice = (functools.partial(Scaler.scale, Scaler(n)) for n in (2, 3))
    assert of(twice) != of(thrice)


IN_A_SCRIPT = """
class fn:
    __slots__ = ("held",)
    def __init__(self, x):
        self.held = x
    @property
    def twice(self):
        return self.held * {one}
    @staticmethod
    def three():
        return {two}
    @classmethod
    def four(cls):
        return {three}
"""


def test_classes_of_the_main_script_count_by_code_and_others_by_name():
    def made(module, *numbers):
        text = IN_A_SCRIPT.format(one=numbers[0], two=numbers[1], three=numbers[2])
        return of(written(text, __name__=module))

    assert made("__main__", 2, 3, 4) == made("__main__", 2, 3, 4)
    for numbers in ((3, 3, 4), (2, 4, 4), (2, 3, 5)):
        assert made("__main__", *numbers) != made("__main__", 2, 3, 4)
        assert made("library", *numbers) == made("library", 2, 3, 4) != made("other", 2, 3, 4)


def test_a_function_of_another_module_counts_as_its_name():
    text = "fn = lambda x: help(x)"
    one, other = (written(f"fn = lambda x: x + {n}", __name__="library") for n in (1, 2))
    assert of(written(text, help=one)) == of(written(text, help=other))
    assert of(written(text, help=one)) != of(written(text, help=written("fn = lambda x: x + 1")))


def test_a_plan_in_a_function_counts_as_a_plan():
    plans = [Dataset.range(n).plan for n in (3, 3, 4)]
    one, twin, other = (of(written("fn = lambda x: PLAN", PLAN=plan)) for plan in plans)
    assert one == twin != other


@dataclass(frozen=True)
class Table(Source):
    name: str
    rows: object = None
    size: int = 3
    _opened: list = field(init=False, default_factory=list)

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


def test_a_source_counts_by_its_arguments():
    def made(*arguments):
        return Dataset.from_source(Table(*arguments)).plan

    opened = made("a")
    opened.source._opened.append(3)
    assert fingerprint(made("a")) == fingerprint(opened)
    assert fingerprint(made("a")) != fingerprint(made("b"))
    assert fingerprint(made("a", np.arange(3))) != fingerprint(made("a", np.arange(4)))


def test_a_cache_counts_by_its_file_and_not_by_its_key():
    assert fingerprint(Dataset.range(3).cache().plan) == fingerprint(Dataset.range(3).cache().plan)
    one, other = Dataset.range(3).cache("a"), Dataset.range(3).cache("b")
    assert fingerprint(one.plan) != fingerprint(other.plan)


def test_an_unpicklable_object_counts_as_its_class():
    text = "fn = lambda x: LOCK"
    assert of(written(text, LOCK=threading.Lock())) == of(written(text, LOCK=threading.Lock()))
    assert of(written(text, LOCK=threading.Lock())) != of(written(text, LOCK=threading.Event()))


def test_a_fingerprint_is_the_same_after_pickling():
    plan = make_pipeline(3).plan
    assert fingerprint(load_plan(dump_plan(plan))) == fingerprint(plan)


SCRIPT = """
import abc, functools, sys
from dataclasses import dataclass, field
import numpy as np
import headrace as hr
from headrace.plan.fingerprint import fingerprint
from headrace.plan.source import Source

KNOWN = {{"a", "b", "c", "d"}}
WORDS = {{word: {{word, "x"}} for word in sorted(KNOWN)}}

class Shape(abc.ABC):
    __slots__ = ("sides",)
    @property
    def corners(self):
        return self.sides
    @staticmethod
    def flat():
        return True
    @classmethod
    def of(cls, n):
        return cls()
    @abc.abstractmethod
    def area(self): ...

class Square(Shape):
    def __init__(self, side):
        self.side = side
    def area(self):
        return self.side ** 2 {change}

@dataclass(frozen=True)
class Grid(Source):
    words: frozenset = frozenset(KNOWN)
    size: int = 3
    def open(self, start, stop, position=None, *, pass_number=()):
        return None

def inner(x):
    def within(y):
        return y in KNOWN or y in {{"p", "q", "r"}}
    return {{"x": within(x), "w": WORDS, "s": Square(3).area()}}

ds = hr.Dataset.from_source(Grid()).map(inner).map(functools.partial(max, 3))
ds = ds.map(Square(4).area).filter(lambda x: x in {{"s", "t", "u"}}).cache()
print(fingerprint(ds.plan))
"""


def run(hash_seed, change=""):
    script = SCRIPT.format(change=change)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True, timeout=50,
    ).stdout  # fmt: skip


def test_fingerprints_are_equal_in_every_process():
    seen = {run("1"), run("2"), run("77")}
    assert len(seen) == 1
    assert run("1", "+ 1") not in seen


def test_the_step_with_different_data_has_another_digest():
    def steps(data):
        plan = hr.Dataset.from_tensor_slices(data).map(abs).batch(2).plan
        whole, found = fingerprint_with_steps(plan)
        assert whole == fingerprint(plan)
        return found

    one, same, other = (steps(np.array(data)) for data in ([1, 2], [1, 2], [1, 3]))
    assert one == same
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, True, True]
    assert one[1][0].startswith("map (test_fingerprint.py:")
