"""Methods over the whole sequence: unique, rebatch, ragged_batch, reduce and others; names."""

from __future__ import annotations

import inspect
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.data.missing_names import METHOD_ALTERNATIVES
from headrace.errors import DataLossError, InvalidArgumentError, InvalidElementError

Dataset = hr.Dataset


def sums(dataset):
    """Return elements in a form that can be compared."""
    return [element.tolist() if isinstance(element, np.ndarray) else element for element in dataset]


def branch(x):
    """Branch, so that it is called element by element."""
    return x if x % 2 else x + 0


# --- unique ---------------------------------------------------------------------------------------


def first_occurrences(elements, key):
    found = {}
    for element in elements:
        found.setdefault(key(element), element)
    return list(found.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows"])
def test_unique_yields_first_occurrences_like_a_dict(seed, columns):
    random = np.random.default_rng(seed)
    data = {
        "n": random.integers(0, 4, 300).astype(np.int16),
        "v": random.integers(0, 2, (300, 2)).astype(np.float32),
        "flag": random.integers(0, 2, 300).astype(bool),
    }
    dataset = Dataset.from_tensor_slices(data)
    if not columns:
        dataset = dataset.map(lambda row: {**row, "text": str(row["n"] // 2)})
    rows = list(dataset)
    want = first_occurrences(rows, lambda row: repr([np.asarray(v).tolist() for v in row.values()]))
    found = list(dataset.unique())
    assert repr(found) == repr(want)
    assert 10 < len(found) < 300


@pytest.mark.parametrize(
    "elements",
    [
        [np.int64(1), np.int32(1), np.float64(1), np.True_, "1", b"1"],
        [0.0, -0.0],
        [np.zeros((2, 3)), np.zeros((3, 2)), np.zeros(6), np.zeros((1, 6))],
        [np.zeros((0, 3)), np.zeros((0, 2)), np.zeros(0)],
        [("a", "bc"), ("ab", "c"), ("abc", "")],
        [np.array([b"a", b"bc"], object), np.array([b"ab", b"c"], object)],
        [np.array([b"a"], object), np.array(["a"], object), "a"],
        [{"a": 1}, {"b": 1}, (1,), 1],
        [b"x" * 100, b"x" * 99 + b"y"],
    ],
    ids=repr,
)
def test_unique_tells_types_shapes_and_bits_apart(elements):
    dataset = Dataset.from_random_access(elements).concatenate(Dataset.from_random_access(elements))
    assert len(list(dataset.unique())) == len(elements)


def test_unique_sees_equal_elements_in_columns_and_rows_as_equal():
    numbers = Dataset.from_tensor_slices({"a": np.arange(5), "b": np.ones((5, 0, 2))})
    rows = numbers.map(lambda row: dict(row) if len(row) else row)
    assert len(list(numbers.concatenate(rows).unique())) == 5
    nans = Dataset.from_tensor_slices([np.nan, 1.0, np.nan])
    assert len(list(nans.unique())) == 2


def test_unique_reads_no_more_than_requested_and_goes_on_after_errors():
    calls = []

    def load(x):
        calls.append(int(x))
        if x == 2:
            raise KeyError(2)
        return x // 3

    with iter(Dataset.range(9).map(load).unique()) as iterator:
        assert next(iterator) == 0
        assert calls == [0]
        with pytest.raises(hr.errors.UserFunctionError):
            next(iterator)
        assert next(iterator) == 1
        assert calls == [0, 1, 2, 3]


def test_restored_unique_notices_a_shorter_input():
    size = [9]
    dataset = Dataset.from_generator(lambda: iter(range(size[0]))).unique()
    with iter(dataset) as iterator:
        for _ in range(5):
            next(iterator)
        state = iterator.get_state()
    size[0] = 3
    with iter(dataset) as iterator:
        iterator.set_state(state)
        with pytest.raises(DataLossError, match="fewer elements"):
            next(iterator)


def test_state_of_unique_stays_small():
    with iter(Dataset.range(5000).map(branch).unique()) as iterator:
        sizes = []
        for number in range(5000):
            next(iterator)
            if number in (10, 4990):
                sizes.append(len(repr(iterator.get_state())))
    assert sizes[1] < sizes[0] + 20


def test_cardinality_of_unique_is_unknown():
    assert Dataset.range(9).unique().cardinality() == hr.UNKNOWN_CARDINALITY
    assert Dataset.range(0).unique().cardinality() == 0
    assert Dataset.range(9).repeat().unique().cardinality() == hr.UNKNOWN_CARDINALITY
    assert Dataset.range(9).unique().element_spec == hr.ArraySpec((), np.int64)


# --- rebatch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_rebatch_has_the_rows_of_all_batches_in_order(size, drop_remainder):
    rows = list(range(23))
    dataset = Dataset.range(23).batch(4).rebatch(size, drop_remainder)
    want = [rows[i : i + size] for i in range(0, 23, size)]
    if drop_remainder:
        want = [batch for batch in want if len(batch) == size]
    assert sums(dataset) == want


# --- ragged_batch ---------------------------------------------------------------------------------


def ragged(n):
    return {"x": np.full((int(n) % 4, 2), n, np.float32), "n": n, "s": "a" * int(n), "b": b"c"}


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_ragged_batch_concatenates_rows_and_stacks_scalars(drop_remainder):
    dataset = Dataset.range(11).map(ragged).ragged_batch(4, drop_remainder)
    batches = list(dataset)
    assert len(batches) == dataset.cardinality() == (2 if drop_remainder else 3)
    for number, batch in enumerate(batches):
        rows = [ragged(np.int64(n)) for n in range(11)][4 * number :][:4]
        x = batch["x"]
        assert isinstance(x, hr.RaggedArray)
        assert x.values.dtype == np.float32
        assert x.row_splits.dtype == np.int64
        assert len(x.row_splits) == len(rows) + 1
        assert x.to_list() == [row["x"].tolist() for row in rows]
        assert x.row(-1).tolist() == rows[-1]["x"].tolist()
        assert batch["n"].tolist() == [row["n"] for row in rows]
        assert batch["s"].tolist() == [row["s"] for row in rows]
        assert batch["b"].tolist() == [b"c"] * len(rows)
    with pytest.raises(IndexError):
        batches[0]["x"].row(4)


def test_ragged_batch_stacks_arrays_of_known_length():
    dataset = Dataset.from_tensor_slices({"x": np.arange(12).reshape(4, 3), "y": np.arange(4)})
    spec = dataset.ragged_batch(2, drop_remainder=True).element_spec
    assert spec == dataset.batch(2, drop_remainder=True).element_spec
    assert [b["x"].shape for b in dataset.ragged_batch(3)] == [(3, 3), (1, 3)]


def test_ragged_batch_spec_is_that_of_its_elements():
    dataset = Dataset.range(8).map(ragged).ragged_batch(2)
    spec = dataset.element_spec
    assert spec["x"] == hr.RaggedArray(
        hr.ArraySpec((None, None), np.float32), hr.ArraySpec((None,), np.int64)
    )
    assert spec["n"] == hr.ArraySpec((None,), np.int64)
    declared = Dataset.from_generator(
        lambda: iter([np.arange(2.0), np.arange(3.0)]),
        output_signature=hr.ArraySpec((None,), np.float64),
    ).ragged_batch(2, drop_remainder=True)
    assert declared.element_spec == hr.RaggedArray(
        hr.ArraySpec((None,), np.float64), hr.ArraySpec((3,), np.int64)
    )
    assert next(iter(declared)).to_list() == [[0.0, 1.0], [0.0, 1.0, 2.0]]


def test_ragged_batch_joins_arrays_of_strings():
    words = Dataset.from_random_access(["a b", "", "c"]).map(lambda s: np.array(s.split(), object))
    (batch,) = words.ragged_batch(3)
    assert batch.to_list() == [["a", "b"], [], ["c"]]


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([np.zeros((2, 2)), np.zeros((2, 3))], r"only the first axis may differ"),
        ([np.zeros(2), np.zeros(2, np.float32)], r"dtype float32 .* in element 1"),
        ([np.zeros(2), np.float64(1)], r"a float64 in element 1"),
        ([{"x": np.zeros(2)}, np.zeros(2)], r"same structure"),
    ],
)
def test_ragged_batch_names_the_differing_element(elements, message):
    dataset = Dataset.from_random_access(elements).ragged_batch(2)
    with pytest.raises(InvalidElementError, match=f"(?s)ragged_batch .* cannot join: .*{message}"):
        next(iter(dataset))


def test_ragged_arrays_are_element_structures():
    dataset = Dataset.range(8).map(lambda n: np.full(int(n), n)).ragged_batch(2)
    lengths = dataset.map(lambda batch: np.diff(batch.row_splits))
    assert sums(lengths) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    batch = next(iter(dataset))
    assert pickle.loads(pickle.dumps(batch)).to_list() == [[], [1]]


@pytest.mark.parametrize("method", ["rebatch", "ragged_batch"])
def test_batch_size_is_checked(method):
    call = getattr(Dataset.range(8).batch(2), method)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, but got 0"):
        call(0)
    with pytest.raises(TypeError, match="`batch_size` must be an integer"):
        call([2, 1])


# --- reduce, get_single_element -------------------------------------------------------------------


def test_reduce_passes_a_tuple_as_one_argument_and_takes_nested_states():
    pairs = Dataset.range(5).map(lambda x: (x, x * x))
    result = pairs.reduce(
        {"n": 0, "sums": (0, np.zeros(2))},
        lambda state, pair: {
            "n": state["n"] + 1,
            "sums": (state["sums"][0] + pair[0], state["sums"][1] + np.array(pair)),
        },
    )
    assert (result["n"], result["sums"][0], result["sums"][1].tolist()) == (5, 10, [10.0, 30.0])


def test_reduce_of_nothing_is_the_initial_state_and_never_writes_to_it():
    start = np.zeros(1, np.int64)

    def add(total, x):
        total += x
        return total

    assert Dataset.range(4).reduce(start, add).tolist() == [6]
    assert start.tolist() == [0]
    result = Dataset.range(0).reduce(0, lambda state, x: state + x)
    assert (result, type(result)) == (0, np.int64)
    assert Dataset.range(3).reduce([0, 0], lambda s, x: [s[1], int(x)]).tolist() == [1, 2]


def test_reduce_reports_errors_and_closes_its_iterator():
    threads = threading.active_count()
    dataset = Dataset.range(100).map(branch, num_parallel_calls=2).prefetch(2)
    with pytest.raises(ZeroDivisionError):
        dataset.reduce(0, lambda state, x: 1 // 0)
    assert threading.active_count() == threads
    with pytest.raises(InvalidElementError, match="`reduce_func` returned None"):
        dataset.reduce(0, lambda state, x: None)
    with pytest.raises(ValueError, match="infinite"):
        Dataset.counter().reduce(0, lambda state, x: x)
    with pytest.raises(TypeError, match="reduce_func"):
        dataset.reduce(0, 3)


def test_get_single_element_requires_exactly_one_element():
    assert Dataset.range(3).batch(5).get_single_element().tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="has none"):
        Dataset.range(0).get_single_element()
    with pytest.raises(InvalidArgumentError, match="has more"):
        Dataset.counter().map(branch).prefetch(2).get_single_element(name="x")


# --- fingerprint ----------------------------------------------------------------------------------


def test_fingerprint_depends_on_steps_code_and_data():
    def make(values=(1, 2, 3), offset=1, size=2, name=None):
        dataset = Dataset.from_tensor_slices(np.array(values), name=name)
        return dataset.map(lambda x: x + offset, name=name).batch(size, name=name).fingerprint()

    assert make() == make() == make(name="other")
    assert isinstance(make(), np.uint64)
    assert len({int(make()), int(make(offset=2)), int(make(size=3)), int(make((1, 2, 4)))}) == 4


# --- names of steps -------------------------------------------------------------------------------

#: Names of tf.data.Dataset (TensorFlow 2.21); those with "*" take `name`.
TF_METHODS = """
    apply as_numpy_iterator batch* bucket_by_sequence_length* cache* cardinality
    choose_from_datasets concatenate* counter* element_spec enumerate* filter* fingerprint
    flat_map* from_generator* from_tensor_slices* from_tensors* get_single_element*
    group_by_window* ignore_errors* interleave* list_files* load map* options padded_batch*
    prefetch* ragged_batch* random* range* rebatch* reduce* rejection_resample* repeat*
    sample_from_datasets save scan* shard* shuffle* skip* snapshot* sparse_batch* take*
    take_while* unbatch* unique* window* with_options* zip*
"""

STEPS = {
    "batch": lambda ds, **kw: ds.batch(2, **kw),
    "bucket_by_sequence_length": lambda ds, **kw: ds.bucket_by_sequence_length(
        len, [2], [2, 2], **kw
    ),
    "cache": lambda ds, **kw: ds.cache(**kw),
    "concatenate": lambda ds, **kw: ds.concatenate(ds, **kw),
    "counter": lambda ds, **kw: Dataset.counter(**kw),
    "enumerate": lambda ds, **kw: ds.enumerate(**kw),
    "filter": lambda ds, **kw: ds.filter(branch, **kw),
    "flat_map": lambda ds, **kw: ds.flat_map(Dataset.range, **kw),
    "from_generator": lambda ds, **kw: Dataset.from_generator(list, **kw),
    "from_source": lambda ds, **kw: Dataset.from_source(ds.plan.source, **kw),
    "from_tensor_slices": lambda ds, **kw: Dataset.from_tensor_slices([1], **kw),
    "from_tensors": lambda ds, **kw: Dataset.from_tensors(1, **kw),
    "group_by_window": lambda ds, **kw: ds.group_by_window(branch, lambda k, w: w, 2, **kw),
    "interleave": lambda ds, **kw: ds.interleave(Dataset.range, **kw),
    "list_files": lambda ds, **kw: Dataset.list_files(__file__, **kw),
    "map": lambda ds, **kw: ds.map(branch, **kw),
    "padded_batch": lambda ds, **kw: ds.padded_batch(2, **kw),
    "prefetch": lambda ds, **kw: ds.prefetch(2, **kw),
    "ragged_batch": lambda ds, **kw: ds.ragged_batch(2, **kw),
    "random": lambda ds, **kw: Dataset.random(4, **kw),
    "range": lambda ds, **kw: Dataset.range(4, **kw),
    "rebatch": lambda ds, **kw: ds.rebatch(4, **kw),
    "repeat": lambda ds, **kw: ds.repeat(4, **kw),
    "scan": lambda ds, **kw: ds.scan(0, branch, **kw),
    "shard": lambda ds, **kw: ds.shard(2, 0, **kw),
    "shuffle": lambda ds, **kw: ds.shuffle(2, seed=1, **kw),
    "skip": lambda ds, **kw: ds.skip(2, **kw),
    "take": lambda ds, **kw: ds.take(2, **kw),
    "take_while": lambda ds, **kw: ds.take_while(branch, **kw),
    "unbatch": lambda ds, **kw: ds.unbatch(**kw),
    "unique": lambda ds, **kw: ds.unique(**kw),
    "with_options": lambda ds, **kw: ds.with_options(hr.Options(seed=1), **kw),
    "zip": lambda ds, **kw: Dataset.zip(ds, ds, **kw),
}


@pytest.mark.parametrize("method", STEPS)
def test_a_name_is_shown_with_the_step_and_changes_nothing_else(method):
    numbers = Dataset.range(9)
    named = STEPS[method](numbers, name="first step")
    assert re.fullmatch(r'test_sequence_methods\.py:\d+ "first step"', named.plan.location)
    assert named.plan.describe().endswith(f"# {named.plan.location}")
    assert named.fingerprint() == STEPS[method](numbers).fingerprint()
    with pytest.raises(TypeError, match="`name` must be a string, but got 3"):
        STEPS[method](numbers, name=3)


def test_errors_of_functions_show_the_name_of_the_step():
    dataset = Dataset.range(3).map(lambda x: 1 // 0 if x >= 0 else x, name="parse")
    with pytest.raises(hr.errors.UserFunctionError, match=r'map \(test_\w+\.py:\d+ "parse"\)'):
        next(iter(dataset))
    assert '"parse"' in dataset.explain()


def test_states_do_not_depend_on_names():
    with iter(Dataset.range(9, name="a").map(branch, name="b")) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(Dataset.range(9).map(branch)) as iterator:
        iterator.set_state(state)
        assert next(iterator) == 1


@pytest.mark.parametrize("listed", TF_METHODS.split())
def test_each_tf_method_exists_or_has_an_alternative(listed):
    method = listed.rstrip("*")
    assert hasattr(Dataset, method) or method in METHOD_ALTERNATIVES
    if listed.endswith("*") and hasattr(Dataset, method):
        parameter = inspect.signature(getattr(Dataset, method)).parameters["name"]
        assert parameter.default is None


def test_missing_tf_methods_are_listed_with_a_reason():
    page = (Path(__file__).parents[2] / "docs" / "coming-from" / "tf-data.md").read_text(
        encoding="utf-8"
    )
    listed = re.findall(r"^\| `(\w+)` \| There (?:is|are) no", page, re.MULTILINE)
    assert listed == ["sparse_batch"]
    assert not any(hasattr(Dataset, method) for method in listed)
