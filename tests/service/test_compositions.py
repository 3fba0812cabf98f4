"""Datasets over a service as parts of others, and whatever a dataset may be made of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError
from headrace.service import (
    LocalCluster,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from tests.service.reading import numbers

pytestmark = pytest.mark.system

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC
Dataset = hr.Dataset


@pytest.fixture(scope="module")
def one() -> Iterator[LocalCluster]:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    with LocalCluster(num_workers=3, processes=False) as cluster:
        yield cluster


@pytest.mark.catalogue("OP5")
def test_a_function_is_sent_with_its_lookup_table(one: LocalCluster) -> None:
    table = {0: 10, 1: 11}
    dataset = Dataset.range(3).map(lambda x: np.int64(table.get(int(x), -1)))
    assert numbers(dataset.apply(distribute(OFF, one.target))) == [10, 11, -1]


@pytest.mark.catalogue("OP37")
def test_a_dataset_over_the_service_is_interleaved_at_the_client(one: LocalCluster) -> None:
    def opened(x: np.int64) -> Dataset:
        return Dataset.range(10 * x, 10 * x + 2).apply(distribute(OFF, one.target))

    assert numbers(Dataset.range(2).interleave(opened, cycle_length=2)) == [0, 10, 1, 11]


@pytest.mark.catalogue("OP42")
def test_datasets_of_different_modes_are_zipped(one: LocalCluster) -> None:
    dealt, copied = (
        Dataset.range(100).apply(distribute(mode, one.target)) for mode in (DYNAMIC, OFF)
    )
    pairs = [(int(a), int(b)) for a, b in Dataset.zip(dealt, copied)]
    assert sorted(pairs) == [(i, i) for i in range(100)]


@pytest.mark.catalogue("OP43")
def test_a_job_name_has_one_mode() -> None:
    # A DYNAMIC job remains after its clients have left, so it uses a separate service.
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dealt, copied = (
            Dataset.range(100).apply(distribute(mode, cluster.target, job_name="zipped"))
            for mode in (DYNAMIC, OFF)
        )
        with pytest.raises(AlreadyExistsError, match="existing job with different parameters"):
            list(Dataset.zip(dealt, copied))


@pytest.mark.catalogue("OP58")
def test_a_service_can_read_from_another_service(one: LocalCluster, three: LocalCluster) -> None:
    words = Dataset.range(10).map(lambda x: "a" * int(x)).repeat(5).shuffle(50)
    upstream = words.apply(distribute(OFF, three.target))
    gathered = upstream.group_by_window(
        key_func=lambda word: np.int64(len(word)),
        reduce_func=lambda _, window: window.batch(5),
        window_size=15,
    )
    batches = [list(b) for b in gathered.apply(distribute(OFF, one.target))]
    assert all(len(batch) == 5 and len(set(batch)) == 1 for batch in batches)
    lengths = [len(batch[0]) for batch in batches]
    assert sorted(lengths) == sorted(list(range(10)) * 3)
    assert all(len(set(lengths[i : i + 3])) == 1 for i in range(0, 30, 3))


@pytest.mark.catalogue("OP59")
def test_a_dataset_with_large_arrays_in_it_is_registered(one: LocalCluster) -> None:
    large = np.random.default_rng(0).random(1 << 20)
    (got,) = Dataset.from_tensors(large).apply(distribute(OFF, one.target))
    assert np.array_equal(got, large)


@pytest.mark.catalogue("OP47")
def test_the_element_structure_is_preserved(one: LocalCluster) -> None:
    dataset = Dataset.range(10).map(lambda i: {"a": (i, i), "b": i})
    name = register_dataset(one.target, dataset)
    got = list(from_dataset_id(OFF, one.target, name))
    assert got == [{"a": (i, i), "b": i} for i in range(10)]


@pytest.mark.catalogue("ME3", "ME6", "ME7")
@pytest.mark.parametrize("compression", [None, "AUTO"])
def test_reading_by_id_needs_neither_spec_nor_compression(
    one: LocalCluster, compression: str | None
) -> None:
    letters = [chr(ord("a") + i) for i in range(26)]
    upper = Dataset.from_tensor_slices(np.array(letters)).map(
        lambda letter: str(letter).upper(), num_parallel_calls=2
    )
    name = register_dataset(one.target, upper, compression=compression)
    got = [str(letter) for letter in from_dataset_id(OFF, one.target, name)]
    assert got == [letter.upper() for letter in letters]


@pytest.mark.catalogue("OP34")
def test_nondeterministic_order_applies_on_workers_too(one: LocalCluster) -> None:
    options = hr.Options()
    options.deterministic = False
    dataset = Dataset.range(10).map(lambda x: x, num_parallel_calls=4).with_options(options)
    assert sorted(numbers(dataset.apply(distribute(OFF, one.target)))) == list(range(10))


@pytest.mark.catalogue("OP35", "OP36")
def test_random_functions_run_on_workers(three: LocalCluster) -> None:
    dataset = Dataset.range(10).map(lambda x: np.random.default_rng().random())
    got = list(dataset.apply(distribute(OFF, three.target)))
    assert len(got) == 30
    assert all(0 <= float(x) < 1 for x in got)
