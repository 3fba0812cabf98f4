"""Plan identities in saved states: stable, and different for different plans."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

import headrace as hr
from headrace.element.spec import ArraySpec
from headrace.plan.identity import (
    describe_changed_functions,
    describe_first_difference,
    identity,
    identity_digest,
)
from headrace.plan.source import Source

Dataset = hr.Dataset


def double(x):
    return x * 2


def triple(x):
    return x * 3


def inner(x):
    return Dataset.range(3).map(double)


class Folder(Source):
    """A user's source that is no dataclass."""

    element_spec = ArraySpec((3,), np.float32)

    def __init__(self, size):
        self._size = size

    @property
    def size(self):
        return self._size

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


@dataclass(frozen=True)
class Part:
    low: int
    high: float


@dataclass(frozen=True, eq=False)
class Table(Source):
    """A user's source with all kinds of fields."""

    name: str
    columns: tuple = ()
    block: int = 4
    size: int = 3

    performance_fields = ("block",)

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Wide(Source):
    a: str
    b: str
    c: str
    d: str
    e: str
    f: str
    size: int = 1

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Distributed(Source):
    """A source that stands for a plan which runs elsewhere."""

    remote_plan: object
    size: int = 1
    splittable: bool = False

    def open(self, start, stop, position=None, *, pass_number=()):
        raise NotImplementedError


def every_step():
    ones = np.ones((4, 2), np.float32)
    return (
        Dataset.from_tensor_slices({"x": ones, "y": np.arange(4)})
        .shuffle(100, seed=7)
        .map(lambda d: d["y"], num_parallel_calls=4)
        .filter(double)
        .enumerate(3)
        .map(triple)
        .cache("/tmp/some/cache")
        .repeat(2)
        .take(9)
        .skip(1)
        .shard(3, 2)
        .batch(2, drop_remainder=True)
        .prefetch(3)
        .unbatch()
        .interleave(inner, cycle_length=3, block_length=2)
        .concatenate(Dataset.range(2, 9, 3))
        .with_options(hr.Options(seed=3))
    )


GOLDEN = [
    ["SlicesSource", "8f9fac08e3cd1d0c"],
    ["shuffle", "f1d7b838a9513b83"],
    ["map", "962858871bf14829"],
    ["filter", "a211c82cdb53a0af"],
    ["enumerate", "7a8dd7546e9508c7"],
    ["map", "655d82eb276d56b6"],
    ["cache", "f34b989416db8a4e"],
    ["repeat", "f08e672a4605824b"],
    ["take", "18fd0b0623ea88fa"],
    ["skip", "f9353e9e7a195f89"],
    ["shard", "cff4543338a9a634"],
    ["batch", "f7c79e8d919314c2"],
    ["unbatch", "192e2dbb60dacce9"],
    ["interleave", "e624724282d6f50e"],
    ["RangeSource", "4796df91ecc1e1df"],
    ["concatenate", "c92128bc64ecab63"],
    ["TensorsSource", "e6d0ac20c0566be9"],
    ["RangeSource", "e7beabab32e0e64a"],
    ["repeat", "e5894ca51e4cd435"],
    ["zip", "0234c5b4483472de"],
    ["TFRecordSource", "293257f93fd9be9a"],
    ["GeneratorSource", "38b806127dd1a280"],
    ["Folder", "bb44ae141a3cf473"],
    ["RandomSource", "95cf9113b4ed3c96"],
    ["scan", "2a3fa49ea43f16a3"],
    ["take_while", "2a0bffec6a7f12fa"],
    ["group_by_window", "b029c86e1b90bb85"],
    ["bucket_by_sequence_length", "57240d9e6a8b592f"],
    ["padded_batch", "e6b716a2936d5065"],
    ["RangeSource", "cf0a13e2b7979210"],
    ["RangeSource", "cf0a13e2b7979210"],
    ["sample_from_datasets", "df0b5502c62ca33c"],
    ["RangeSource", "cf0a13e2b7979210"],
    ["RandomSource", "b18d80f942506486"],
    ["choose_from_datasets", "959bf16a7bb4ae71"],
]


def test_entries_are_a_stable_format():
    entries = [entry[:2] for entry in identity(every_step().plan)]
    both = Dataset.zip({"a": Dataset.from_tensors((1, b"x")), "b": Dataset.range(3).repeat()})
    entries += [entry[:2] for entry in identity(both.plan)]
    names = hr.TFRecordDataset(["a", "b"], compression_type="GZIP")
    made = Dataset.from_generator(double, args=(1, 2.5, [np.zeros(3)]), output_signature=SIGNATURE)
    gathered = (
        Dataset.random(seed=3)
        .scan({"n": 0, "x": np.zeros(2)}, double)
        .take_while(triple)
        .group_by_window(double, inner, window_size_func=triple)
        .bucket_by_sequence_length(len, [3, 9], [4, 2, 1], {"x": [None, 4]}, {"x": -1.5})
        .padded_batch(3, ([-1], []), (b"-", None))
    )
    mixed = Dataset.sample_from_datasets([base(), base()], [0.25, 0.75], seed=4)
    chosen = Dataset.choose_from_datasets([mixed, base()], Dataset.random())
    for dataset in (names, made, Dataset.from_source(Folder(4)), gathered, chosen):
        entries += [entry[:2] for entry in identity(dataset.plan)]
    assert entries == GOLDEN


SIGNATURE = (ArraySpec((None,), np.int16), {"s": ArraySpec((), "U")})


def test_an_entry_is_small_json_that_people_can_read():
    entries = identity(every_step().plan)
    assert json.loads(json.dumps(entries)) == entries
    assert entries[1][2] == {
        "buffer_size": 100,
        "seed": 7,
        "reshuffle_each_iteration": True,
    }
    wide = Dataset.from_source(Wide(*["x" * 50] * 6))
    assert list(identity(wide.plan)[0][2]) == ["a", "b", "c"]
    many = hr.TFRecordDataset([f"/data/{'long' * 20}/{n}" for n in range(1000)])
    assert all(len(json.dumps(entry)) < 350 for entry in identity(many.plan) + entries)


def base():
    return Dataset.range(50)


SAME = {
    "prefetch": lambda: (base().prefetch(2), base().prefetch(0)),
    "no prefetch": lambda: (base().prefetch(2).map(double), base().map(double)),
    "threads": lambda: (base().map(double, 2), base().map(double)),
    "threads of interleave": lambda: (
        base().interleave(inner, 4, num_parallel_calls=2),
        base().interleave(inner, 4),
    ),
    "order that is kept anyway": lambda: (base().map(double, 2, True), base().map(double)),
    "values in memory": lambda: (
        Dataset.from_tensor_slices(np.zeros(5)),
        Dataset.from_tensor_slices(np.ones(5)),
    ),
    "length of the longest string": lambda: (
        Dataset.from_tensor_slices(np.array(["a", "b"])),
        Dataset.from_tensor_slices(np.array(["a", "ccc"])),
    ),
    "seed of the options": lambda: (
        base().with_options(hr.Options(seed=3)),
        base().with_options(hr.Options(seed=4)),
    ),
    "number of NumPy": lambda: (base().batch(np.int32(4)), base().batch(4)),
    "block of a user's source": lambda: (
        Dataset.from_source(Table("t", block=1)),
        Dataset.from_source(Table("t", block=2)),
    ),
    "code of a function": lambda: (base().map(lambda x: x), base().map(lambda x: x + 1)),
    "arguments of a partial": lambda: (
        base().map(functools.partial(double)),
        base().map(double),
    ),
    "reading over a service": lambda: (
        Dataset.from_source(Distributed(base().shuffle(3).plan)).map(double),
        base().shuffle(3).map(double),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_plans_with_the_same_positions_have_the_same_identity(name):
    one, other = SAME[name]()
    assert identity_digest(one.plan) == identity_digest(other.plan)
    assert describe_first_difference(identity(one.plan), other.plan) is None
    assert describe_first_difference(identity(other.plan), one.plan) is None


HERE = r"\(test_identity\.py:\d+\)"

DIFFERENT = {
    "shuffle buffer": (
        lambda: (base().shuffle(100), base().shuffle(200)),
        rf"^step 2, shuffle {HERE}: buffer_size was 100, is 200$",
    ),
    "shuffle seed": (
        lambda: (base().shuffle(9, seed=1), base().shuffle(9, seed=2)),
        rf"^step 2, shuffle {HERE}: seed was 1, is 2$",
    ),
    "batch size": (
        lambda: (base().batch(2), base().map(double).prefetch(1).batch(3)),
        rf"^step 2, map {HERE}, was batch before$",
    ),
    "batch size alone": (
        lambda: (base().batch(2), base().batch(3)),
        rf"^step 2, batch {HERE}: size was 2, is 3$",
    ),
    "remainder": (
        lambda: (base().batch(2), base().batch(2, drop_remainder=True)),
        "drop_remainder was False, is True",
    ),
    "shard index": (
        lambda: (base().shard(4, 1), base().shard(4, 2)),
        "shard .*index was 1, is 2",
    ),
    "files": (
        lambda: (hr.TFRecordDataset(["a", "b"]), hr.TFRecordDataset(["a", "c"])),
        rf"^step 1, TFRecordSource {HERE}: filenames was \('a', 'b'\), is \('a', 'c'\)$",
    ),
    "files with long names": (
        lambda: (hr.TFRecordDataset(["a" * 99 + "1"]), hr.TFRecordDataset(["a" * 99 + "2"])),
        "TFRecordSource .*: its arguments have changed",
    ),
    "shorter range": (
        lambda: (Dataset.range(50), Dataset.range(40)),
        rf"^step 1, RangeSource {HERE}: stop was 50, is 40$",
    ),
    "dtype": (
        lambda: (Dataset.range(5), Dataset.range(5, output_type=np.int32)),
        "dtype was int64, is int32",
    ),
    "shape in memory": (
        lambda: (Dataset.from_tensor_slices(np.ones(5)), Dataset.from_tensor_slices(np.ones(6))),
        r"components was float64\[5\], is float64\[6\]",
    ),
    "function": (
        lambda: (base().map(double), base().map(triple)),
        rf"^step 2, map {HERE}: fn was double, is triple$",
    ),
    "cycle length": (
        lambda: (base().interleave(inner, 4), base().interleave(inner, 2)),
        "interleave .*: cycle_length was 4, is 2",
    ),
    "block length": (
        lambda: (base().interleave(inner, 4, 1), base().interleave(inner, 4, 2)),
        "interleave .*: block_length was 1, is 2",
    ),
    "free order": (
        lambda: (base().map(double), base().map(double, 4, deterministic=False)),
        "map .*: deterministic is False",
    ),
    "order that is free no longer": (
        lambda: (
            base().map(double, 4).with_options(hr.Options(deterministic=False)),
            base().map(double, 4),
        ),
        "map .*: deterministic was False",
    ),
    "seed of random numbers": (
        lambda: (Dataset.random(seed=1), Dataset.random(seed=2)),
        "RandomSource .*: seed was 1, is 2",
    ),
    "first value of a scan": (
        lambda: (base().scan(0, triple), base().scan(0.5, triple)),
        "scan .*: initial_state was 0, is 0.5",
    ),
    "padding": (
        lambda: (base().padded_batch(2, [3]), base().padded_batch(2, [4])),
        r"padded_batch .*: padded_shapes was \(3,\), is \(4,\)",
    ),
    "padding value": (
        lambda: (base().padded_batch(2, None, np.int8(1)), base().padded_batch(2, None, 2)),
        "padded_batch .*: padding_values was 1, is 2",
    ),
    "window size": (
        lambda: tuple(base().group_by_window(double, inner, size) for size in (3, 4)),
        "group_by_window .*: window_size was 3, is 4",
    ),
    "key function": (
        lambda: tuple(base().group_by_window(key, inner, 3) for key in (double, triple)),
        "group_by_window .*: key_func was double, is triple",
    ),
    "boundaries": (
        lambda: (
            base().bucket_by_sequence_length(double, [3], [1, 2]),
            base().bucket_by_sequence_length(double, [4], [1, 2]),
        ),
        r"bucket_by_sequence_length .*: bucket_boundaries was \(3,\), is \(4,\)",
    ),
    "weights": (
        lambda: (
            Dataset.sample_from_datasets([base(), base()], [1, 2]),
            Dataset.sample_from_datasets([base(), base()], [1, 3]),
        ),
        r"sample_from_datasets .*: weights was \(1.0, 2.0\), is \(1.0, 3.0\)",
    ),
    "end of a choice": (
        lambda: (
            Dataset.choose_from_datasets([base(), base()], base()),
            Dataset.choose_from_datasets([base(), base()], base(), stop_on_empty_dataset=False),
        ),
        "choose_from_datasets .*: stop_on_empty_dataset was True, is False",
    ),
    "cache file": (
        lambda: (base().cache("a"), base().cache("b")),
        "filename was a, is b",
    ),
    "one step more": (
        lambda: (base(), base().take(3)),
        rf"^step 2, take {HERE}, was added$",
    ),
    "one step less": (
        lambda: (base().take(3), base()),
        r"^step 2, take, is missing$",
    ),
    "structure": (
        lambda: (Dataset.zip({"a": base()}), Dataset.zip({"b": base()})),
        "zip .*: structure was ",
    ),
    "other input": (
        lambda: (Dataset.zip(base(), base().take(3)), Dataset.zip(base(), base().take(4))),
        "step 3, take .*: count was 3, is 4",
    ),
    "user's source": (
        lambda: (Dataset.from_source(Folder(3)), Dataset.from_source(Folder(4))),
        "Folder .*: size was 3, is 4",
    ),
    "user's fields": (
        lambda: (
            Dataset.from_source(Table("t", (Part(1, 0.5), {"k": {1, 2}}, b"x", int))),
            Dataset.from_source(Table("t", (Part(1, 0.25), {"k": {1, 2}}, b"x", int))),
        ),
        "Table .*: columns was ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_first_step_that_differs_is_named(name):
    make, sentence = DIFFERENT[name]
    saved, plan = make()
    stored = json.loads(json.dumps(identity(saved.plan)))
    found = describe_first_difference(stored, plan.plan)
    assert found is not None
    assert re.search(sentence, found), found
    assert identity_digest(saved.plan) != identity_digest(plan.plan)


def test_kinds_and_digests_are_enough():
    saved = [entry[:2] for entry in identity(base().shuffle(3).plan)]
    assert describe_first_difference(saved, base().shuffle(3).plan) is None
    found = describe_first_difference(saved, base().shuffle(4).plan)
    assert "shuffle" in found
    assert "buffer_size is 4" in found


def test_contents_of_a_value_count_in_any_order():
    one = Table("t", ({1, 2, 30}, {"a": 1, "b": 2}, base()))
    other = Table("t", ({30, 2, 1}, {"b": 2, "a": 1}, base().prefetch(1)))
    digests = {identity_digest(Dataset.from_source(source).plan) for source in (one, other)}
    assert len(digests) == 1
    third = Table("t", ({30, 2, 1}, {"b": 2, "a": 1}, base().take(1)))
    assert identity_digest(Dataset.from_source(third).plan) not in digests


def test_an_object_counts_as_its_class():
    class Lock:
        pass

    one, other = (Table("t", (Lock(),)) for _ in range(2))
    assert identity_digest(Dataset.from_source(one).plan) == identity_digest(
        Dataset.from_source(other).plan
    )


def make_function(name):
    scope = {}
    exec(f"def fn(x):\n    return {name}", scope)
    return scope["fn"]


def test_the_code_of_inner_functions_counts():
    saved = identity(base().map(make_function("(lambda y: y + 1)(x)")).plan)
    changed = base().map(make_function("(lambda y: y + 2)(x)"))
    assert len(describe_changed_functions(saved, changed.plan)) == 1
    same = base().map(make_function("(lambda y: y + 1)(x)"))
    assert describe_changed_functions(saved, same.plan) == []


def test_changed_code_causes_a_warning():
    saved = identity(base().map(make_function("x + 1")).map(double).plan)
    changed = base().map(make_function("x + 2")).map(double)
    assert describe_first_difference(saved, changed.plan) is None
    (sentence,) = describe_changed_functions(saved, changed.plan)
    assert sentence.startswith("step 2, map (test_identity.py:")
    assert sentence.endswith("the code of its function has changed")
    assert (
        describe_changed_functions(saved, base().map(make_function("x + 1")).map(double).plan) == []
    )


def test_code_is_compared_within_one_version_of_python_only():
    saved = identity(base().map(make_function("x + 1")).plan)
    assert saved[1][3].startswith(f"{sys.version_info.major}.{sys.version_info.minor}:")
    saved[1][3] = "2.7:0123456789abcdef"
    assert describe_changed_functions(saved, base().map(make_function("x + 2")).plan) == []


class Caller:
    def __init__(self, number):
        self.number = number

    def __call__(self, x):
        return x

    def method(self, x):
        return x in {1, 2, 3} or list(x)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (Caller(3), "Caller"),
        (Caller(3).method, "Caller.method"),
        (functools.partial(Caller(3).method, 3), "Caller.method"),
        (abs, "abs"),
        (np.add, "add"),
    ],
)
def test_every_callable_has_a_name(fn, name):
    entry = identity(base().map(fn).plan)[1]
    assert entry[2]["fn"] == name


def test_data_with_other_containers_or_text_types_differs():
    rows = np.arange(3)
    slices = Dataset.from_tensor_slices
    Row = namedtuple("Row", "a b")
    variants = [slices((rows, rows)), slices(Row(rows, rows)), slices({"a": rows, "b": rows})]
    variants += [slices(["a", "b", "c"]), slices([b"a", b"b", b"c"])]
    digests = {identity_digest(dataset.plan) for dataset in variants}
    assert len(digests) == len(variants)
    assert describe_first_difference(identity(variants[0].plan), variants[1].plan) is not None
