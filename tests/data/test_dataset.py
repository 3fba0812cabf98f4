"""The facade: what its methods make, and what its errors say."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import headrace as hr

Dataset = hr.Dataset


@pytest.mark.parametrize(
    ("name", "message"),
    [("shuffel", "did you mean 'shuffle'"), ("bacth", "did you mean 'batch'")],
)
def test_misspelt_method_error_suggests_the_nearest_name(name, message):
    with pytest.raises(AttributeError, match=f"Dataset has no method {name!r}; {message}"):
        getattr(Dataset.range(3), name)


def test_unknown_method_error_lists_the_methods():
    with pytest.raises(AttributeError, match=r"no method 'zzz'; it has: .*batch.*unbatch"):
        Dataset.range(3).zzz  # noqa: B018 - the attribute is the test
    assert not hasattr(Dataset.range(3), "_repr_png_")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("sparse_batch", r"ragged_batch\(\) of the indices and of the values"),
        ("output_shapes", "element_spec"),
        ("make_one_shot_iterator", r"iter\(dataset\)"),
        ("distribute", r"dataset.apply\(hr.service.distribute\("),
    ],
)
def test_missing_tf_data_method_error_names_the_alternative(name, cure):
    with pytest.raises(AttributeError, match=f"Dataset has no {name!r}; .*{cure}"):
        getattr(Dataset.range(3), name)


class WithRows:
    """What Hugging Face datasets, torch datasets and sequences have in common."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": index}


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        ([{"x": 1}, {"x": 2}], r"\{key: \[row\[key\] for row in rows\] for key in rows\[0\]\}"),
        (WithRows(), r"Dataset.from_random_access\(x\)"),
        ((n for n in range(3)), r"Dataset.from_generator"),
        ({1, 2}, r"sorted\("),
        (Dataset.range(3), "a Dataset; use it directly"),
        ([Dataset.range(3), Dataset.range(4)], "a list of Datasets; .*`concatenate`.*interleave"),
    ],
    ids=["dicts", "rows", "generator", "set", "dataset", "datasets"],
)
def test_values_without_slices_are_rejected_with_a_fix(data, cure):
    with pytest.raises(TypeError, match=rf"`x` must be arrays .*got.*{cure}"):
        Dataset.from_tensor_slices(data)


def test_columns_of_lists_are_sliced():
    rows = list(Dataset.from_tensor_slices({"x": [1, 2], "name": ["a", "b"]}))
    assert [(int(row["x"]), row["name"]) for row in rows] == [(1, "a"), (2, "b")]


def test_range_bounds_are_checked_like_other_integers():
    with pytest.raises(TypeError, match="`stop` must be an integer, but got '3' of type str"):
        Dataset.range("3")
    with pytest.raises(TypeError, match=r"`start` must be an integer, but got 0.5 of type float"):
        Dataset.range(0.5, 3)


def test_combining_methods_require_datasets():
    with pytest.raises(TypeError, match=r"`dataset` must be a Dataset, but got list; .*from_tens"):
        Dataset.range(3).concatenate([1])
    with pytest.raises(TypeError, match=r"`datasets` must be Datasets, .*has a list; .*from_tens"):
        Dataset.zip(Dataset.range(3), [1, 2])


def test_data_instead_of_a_plan_is_rejected_with_a_fix():
    with pytest.raises(TypeError, match="from_tensor_slices"):
        Dataset([1, 2, 3])
    with pytest.raises(TypeError, match="from_tensor_slices"):
        Dataset.from_source([1, 2, 3])


def test_later_options_override_earlier_ones():
    first, second = hr.Options(deterministic=True, seed=1), hr.Options(deterministic=False)
    dataset = Dataset.range(3).with_options(first).map(lambda x: x).with_options(second)
    assert (dataset.options().deterministic, dataset.options().seed) == (False, 1)
    shuffled = Dataset.range(30).with_options(hr.Options(seed=1)).shuffle(30)
    later = shuffled.with_options(hr.Options(seed=2))
    assert list(later) == list(Dataset.range(30).shuffle(30).with_options(hr.Options(seed=2)))


def test_inferred_spec_leaves_axis_lengths_open():
    ragged = Dataset.range(1, 4).map(lambda x: {"a": np.zeros(int(x), np.float32), "n": x})
    assert ragged.element_spec == {
        "a": hr.ArraySpec((None,), "float32"),
        "n": hr.ArraySpec((), "int64"),
    }
    generated = Dataset.from_generator(lambda: iter([np.zeros((2, 3))]))
    assert generated.element_spec == hr.ArraySpec((None, None), "float64")
    proven = Dataset.from_tensor_slices(np.zeros((4, 5))).map(lambda x: x * 2)
    assert proven.element_spec == hr.ArraySpec((5,), "float64")


def test_spec_inference_calls_each_function_once():
    calls = []

    def note(x):
        calls.append(x)
        return np.abs(x)

    dataset = (
        Dataset.range(200_000)
        .map(note)
        .shuffle(100_000)
        .map(note, num_parallel_calls=2)
        .batch(64)
        .prefetch(8)
        .map(note)
        .cache()
        .repeat()
        .map(note)
    )
    assert dataset.element_spec == hr.ArraySpec((None,), "int64")
    assert len(calls) == 4


def test_spec_of_a_batch_of_tuples_is_a_tuple():
    ones = Dataset.range(5).map(lambda x: (x,))
    assert ones.batch(2).map(lambda x: (x, len(x))).element_spec == (
        hr.ArraySpec((None,), "int64"),
        hr.ArraySpec((), "int64"),
    )
    pairs = Dataset.range(5).enumerate().map(lambda i, x: (i, x, x))
    assert pairs.batch(2).map(lambda a, b, c: a + b + c).element_spec == hr.ArraySpec(
        (None,), "int64"
    )


def test_pickled_dataset_does_not_depend_on_epochs_read():
    dataset = Dataset.range(4).shuffle(4)
    before = pickle.dumps(dataset)
    list(dataset)
    assert pickle.dumps(dataset) == before
    assert sorted(int(x) for x in pickle.loads(before)) == [0, 1, 2, 3]


def test_negative_repeat_count_other_than_minus_one_is_rejected():
    assert Dataset.range(2).repeat(-1).cardinality() == hr.INFINITE_CARDINALITY
    with pytest.raises(ValueError, match="count"):
        Dataset.range(2).repeat(-2)


@pytest.mark.parametrize("steps", [300, 1200])
@pytest.mark.parametrize(
    "step",
    [
        lambda ds: ds.concatenate(Dataset.range(1)),
        lambda ds: Dataset.range(1).concatenate(ds),
        lambda ds: ds.map(lambda x: x + 1),
        lambda ds: ds.map(abs),
        lambda ds: ds.skip(0),
        lambda ds: ds.filter(lambda x: bool(x >= 0)),
    ],
    ids=["concatenate", "concatenated", "columns", "map", "skip", "filter"],
)
def test_plans_of_many_steps_are_read(step, steps):
    dataset = Dataset.range(2)
    for _ in range(steps):
        dataset = step(dataset)
    with iter(dataset) as iterator:
        next(iterator)
        state = iterator.get_state()
        rest = len(list(iterator))
    with iter(dataset) as iterator:
        iterator.set_state(state)
        assert len(list(iterator)) == rest


def opaque(x):
    try:
        return x + 1
    finally:
        pass


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(0).map(opaque).concatenate(Dataset.range(3).map(opaque)),
        Dataset.range(3).map(opaque).concatenate(Dataset.range(0).map(opaque)),
        Dataset.range(2).filter(opaque).repeat(3).skip(4).map(opaque),
        Dataset.range(9).map(opaque).batch(3).skip(2).unbatch().map(opaque),
        Dataset.range(2).filter(opaque).repeat(3).shard(5, 4).map(opaque),
    ],
    ids=["empty first", "empty second", "repeat and skip", "batch and skip", "repeat and shard"],
)
def test_spec_is_known_for_each_combination_of_steps(dataset):
    assert list(dataset)
    assert dataset.element_spec == hr.ArraySpec((), np.int64)


def test_empty_dataset_error_names_the_step_without_a_spec():
    with pytest.raises(hr.errors.FailedPreconditionError, match=r"empty dataset.*Map"):
        _ = Dataset.range(0).map(opaque).element_spec


def test_numpy_integers_are_accepted_as_arguments():
    one, three = np.int64(1), np.int64(3)
    dataset = Dataset.range(9).shuffle(three, seed=one).skip(one).take(three).repeat(np.int8(2))
    plain = Dataset.range(9).shuffle(3, seed=1).skip(1).take(3).repeat(2)
    assert [int(x) for x in dataset.shard(three, one).batch(one).unbatch()] == [
        int(x) for x in plain.shard(3, 1)
    ]
    assert [int(x) for x in dataset] == [int(x) for x in plain]
    assert hr.Options(seed=one).seed == 1


def test_indexing_is_rejected_with_a_fix():
    dataset = hr.Dataset.range(3)
    with pytest.raises(TypeError, match=r"next\(iter\(dataset\)\)"):
        dataset[0]
    with pytest.raises(TypeError, match=r"for an iterable use Dataset\.from_generator"):
        hr.Dataset.from_random_access(dataset)


def test_the_error_of_an_unknown_length_says_how_to_count():
    dataset = hr.Dataset.range(10).filter(lambda x: x % 3 == 0)
    with pytest.raises(TypeError, match=r"count its elements with dataset\.reduce\(0, lambda cou"):
        len(dataset)
    assert dataset.reduce(0, lambda count, _: count + 1) == 4
    with pytest.raises(TypeError, match=r"has no length; limit it with take\(n\)"):
        len(hr.Dataset.range(10).repeat())
