"""Plans as values: what they say of themselves, how they travel, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.plan.serialize import dump_plan, load_plan

Dataset = hr.Dataset
ArraySpec = hr.ArraySpec
UNKNOWN = hr.UNKNOWN_CARDINALITY
INT = ArraySpec((), np.int64)

BAD_ARGUMENTS = [
    (lambda ds: ds.batch(0), ValueError, "`batch_size` must be at least 1, but got 0"),
    (lambda ds: ds.batch(2.5), TypeError, "`batch_size` must be an integer, but got 2.5"),
    (lambda ds: ds.batch(True), TypeError, "`batch_size`"),
    (lambda ds: ds.shuffle(0), ValueError, "`buffer_size` must be at least 1"),
    (lambda ds: ds.shuffle(3, seed="x"), TypeError, "`seed` must be an integer, but got 'x'"),
    (lambda ds: ds.repeat(-2), ValueError, "`count` must be at least 0 or -1, but got -2"),
    (lambda ds: ds.take(-5), ValueError, "`count` must be at least 0 or -1, but got -5"),
    (lambda ds: ds.skip("3"), TypeError, "`count`"),
    (lambda ds: ds.shard(0, 0), ValueError, "`num_shards` must be at least 1"),
    (lambda ds: ds.shard(3, 3), ValueError, r"between 0 and 2 \(currently index = 3\)"),
    (lambda ds: ds.map(5), TypeError, "`map_func` must be a function, but got 5"),
    (lambda ds: ds.map(abs, num_parallel_calls=0), ValueError, "`num_parallel_calls`"),
    (lambda ds: ds.map(abs, deterministic="no"), TypeError, "`deterministic`"),
    (lambda ds: ds.filter(None), TypeError, "`predicate` must be a function"),
    (lambda ds: ds.interleave(abs, cycle_length=0), ValueError, "`cycle_length`"),
    (lambda ds: ds.interleave(abs, block_length=-1), ValueError, "`block_length`"),
    (lambda ds: ds.prefetch(-2), ValueError, "`buffer_size` must be at least 0 or -1"),
    (lambda ds: ds.cache(7), TypeError, "`filename` must be a string"),
    (lambda ds: ds.concatenate([1]), TypeError, "`dataset` must be a Dataset, but got list"),
    (lambda ds: ds.with_options({}), TypeError, "`options` must be headrace.Options"),
    (lambda ds: ds.apply(lambda d: 3), TypeError, "must return a Dataset, but returned int"),
    (lambda ds: Dataset.zip(ds, 4), TypeError, "must be a Dataset"),
    (lambda ds: Dataset.zip(()), ValueError, "at least one dataset"),
    (lambda ds: ds.interleave(abs, deterministic=1), TypeError, "`deterministic` must be a bool"),
    (lambda ds: Dataset.range(), TypeError, "takes 1 to 3 arguments"),
    (lambda ds: Dataset.range(0, 5, 0), ValueError, "step must not be 0"),
    (lambda ds: Dataset.from_source(3), TypeError, "must be a headrace.Source"),
    (lambda ds: Dataset.from_generator(iter([1])), TypeError, "callable|function"),
    (lambda ds: Dataset.zip([ds, ds]), TypeError, "`datasets` must .* has a list; use a tuple"),
    (lambda ds: Dataset.zip(datasets=(ds, ds)), TypeError, "the datasets without a name"),
    (lambda ds: Dataset.from_generator(range, args=3), TypeError, r"`args` .*3.*args=\(value,\)"),
    (lambda ds: Dataset.from_generator(list, args="ab"), TypeError, r"`args` must be .*'ab'"),
    (
        lambda ds: Dataset.from_generator(list, int),
        TypeError,
        "pass args, output_signature by name",
    ),
    (lambda ds: Dataset.from_tensors(None), TypeError, "`x` must be an array, .* got None"),
    (lambda ds: Dataset.from_tensor_slices({"a": None}), ValueError, "no array .*'a': None"),
    (lambda ds: Dataset.from_tensor_slices(5), ValueError, "axis"),
    (lambda ds: Dataset.from_tensor_slices((np.zeros(2), np.zeros(3))), ValueError, "length"),
    (lambda ds: Dataset.list_files("/no/such/*"), LookupError, "No files matched"),
    (lambda ds: hr.TFRecordDataset(5), TypeError, "filenames"),
    (lambda ds: hr.TFRecordDataset("a", compression_type="rar"), ValueError, "rar"),
    (lambda ds: hr.Options(deterministic=3), TypeError, "`deterministic` must be a bool"),
    (
        lambda ds: setattr(hr.Options(), "determinstic", True),
        AttributeError,
        "it has: auto_shard_policy, determ",
    ),
]


@pytest.mark.parametrize(("make", "kind", "words"), BAD_ARGUMENTS)
def test_a_wrong_argument_is_rejected_where_it_is_written(make, kind, words):
    with pytest.raises(kind, match=words):
        make(Dataset.range(4))


SPECS = [
    (lambda: Dataset.range(4), ArraySpec((), np.int64), 4),
    (lambda: Dataset.range(4).batch(3), ArraySpec((None,), np.int64), 2),
    (lambda: Dataset.range(4).batch(3, drop_remainder=True), ArraySpec((3,), np.int64), 1),
    (lambda: Dataset.range(4).map(lambda x: x / 2), ArraySpec((), np.float64), 4),
    (lambda: Dataset.range(4).map(lambda x: (str(x),)), (ArraySpec((), "U"),), 4),
    (lambda: Dataset.range(4).filter(lambda x: x > 1), ArraySpec((), np.int64), UNKNOWN),
    (lambda: Dataset.range(4).repeat(), ArraySpec((), np.int64), hr.INFINITE_CARDINALITY),
    (lambda: Dataset.range(4).repeat().take(3), ArraySpec((), np.int64), 3),
    (lambda: Dataset.range(9).shard(4, 1), ArraySpec((), np.int64), 2),
    (lambda: Dataset.range(9).skip(4), ArraySpec((), np.int64), 5),
    (lambda: Dataset.range(4).enumerate(), (ArraySpec((), np.int64), ArraySpec((), np.int64)), 4),
    (lambda: Dataset.zip(Dataset.range(4), Dataset.range(7)), (ArraySpec((), np.int64),) * 2, 4),
    (lambda: Dataset.range(4).flat_map(lambda x: Dataset.range(2)), INT, UNKNOWN),
    (lambda: Dataset.range(4).concatenate(Dataset.range(2)), ArraySpec((), np.int64), 6),
    (lambda: Dataset.range(4).batch(2).unbatch(), ArraySpec((), np.int64), UNKNOWN),
    (lambda: Dataset.from_tensors({"a": [1, 2]}), {"a": ArraySpec((2,), np.int64)}, 1),
    (lambda: Dataset.zip(Dataset.range(4), Dataset.range(0)), (INT, INT), 0),
    (lambda: Dataset.zip(Dataset.range(4), Dataset.range(9).filter(bool)), (INT, INT), UNKNOWN),
    (lambda: Dataset.range(4).concatenate(Dataset.range(2).repeat()), INT, -1),
    (lambda: Dataset.range(4).skip(-1), INT, 0),
]  # fmt: skip


@pytest.mark.parametrize(("make", "spec", "size"), SPECS)
def test_spec_and_cardinality_are_known_without_reading(make, spec, size):
    dataset = make()
    assert dataset.element_spec == spec
    assert dataset.cardinality() == size
    if size >= 0:
        assert len(dataset) == size == sum(1 for _ in dataset)
    else:
        with pytest.raises(TypeError, match="length"):
            len(dataset)


def test_the_spec_of_an_empty_dataset_is_unknown():
    with pytest.raises(FailedPreconditionError, match="empty dataset"):
        _ = Dataset.range(0).map(lambda x: str(x)).element_spec


def test_explain_shows_both_plans_and_where_they_were_written():
    text = Dataset.range(8).shuffle(4).batch(2).explain()
    assert "as written" in text
    assert "as executed" in text
    assert "Gather" in text
    assert "test_plan.py:" in text


def test_a_plan_is_sent_with_its_functions():
    factor = 3
    plan = load_plan(dump_plan(Dataset.range(4).map(lambda x: f"{x * factor}").plan))
    assert list(Dataset(plan)) == ["0", "3", "6", "9"]
