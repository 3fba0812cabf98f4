"""Read-only consumers borrow the read-only buffers of sources and caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.structure import flatten
from headrace.execution.build import build_iterator
from headrace.rewrites.optimize import prepare
from headrace.rewrites.split_space import compute_split_space
from tests.element.strategies import same
from tests.execution.pipelines import PIPELINES

Dataset = hr.Dataset

MOST = 60


def read(dataset: Dataset, *, only_reads: bool = True, limit: int = 3) -> list[Any]:
    """Return the elements, and the class of an error in an element's place."""
    found: list[Any] = []
    iterator = build_iterator(dataset.plan, seed=5, is_read_only=only_reads)
    while len(found) < MOST:
        try:
            chunk = iterator.next_chunk(limit)
        except hr.errors.HeadraceError as error:
            found.append(type(error).__name__)
            continue
        if chunk is None:
            break
        found += chunk.rows()
    iterator.close()
    return found


def arrays(elements: list[Any]) -> list[np.ndarray]:
    leaves = [leaf for element in elements for leaf in flatten(element)[0]]
    return [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]


@pytest.mark.parametrize("name", PIPELINES)
def test_read_only_consumers_get_the_same_elements(name: str) -> None:
    make = PIPELINES[name]
    lent, own = read(make()), read(make(), only_reads=False)
    assert same(tuple(lent), tuple(own))


BORROWED = {
    "tensors": lambda array: Dataset.from_tensors(array),
    "tensors, repeated": lambda array: Dataset.from_tensors(array).repeat(3),
    "slices": lambda array: Dataset.from_tensor_slices(array),
    "batches of slices": lambda array: Dataset.from_tensor_slices(array).batch(2),
    "batches of batches": lambda array: Dataset.from_tensor_slices(array).batch(2).batch(2),
    "prefetch": lambda array: Dataset.from_tensor_slices(array).prefetch(2),
    "enumerate": lambda array: Dataset.from_tensor_slices(array).enumerate(),
    "zip": lambda array: Dataset.zip(
        {"a": Dataset.from_tensor_slices(array), "b": Dataset.from_tensor_slices(array).skip(1)}
    ),
    "padded batches": lambda array: Dataset.from_tensor_slices(array).padded_batch(2),
    "sample": lambda array: Dataset.sample_from_datasets([Dataset.from_tensor_slices(array)]),
    "rows beside numbers that are drawn": lambda array: Dataset.zip(
        (Dataset.from_tensor_slices(array), Dataset.random())
    ),
    "concatenate": lambda array: Dataset.from_tensor_slices(array).concatenate(
        Dataset.from_tensor_slices(array)
    ),
}


@pytest.mark.parametrize("name", BORROWED)
def test_large_rows_of_a_source_are_borrowed_and_read_only(name: str) -> None:
    array = np.arange(4 * 5000.0).reshape(4, 5000)
    found = [leaf for leaf in arrays(read(BORROWED[name](array))) if leaf.ndim]
    assert found
    for leaf in found:
        assert np.shares_memory(leaf, array)
        with pytest.raises(ValueError, match="read-only"):
            leaf[:] = -1
    assert array.flags.writeable


@pytest.mark.parametrize("name", BORROWED)
def test_consumers_that_write_get_their_own_memory(name: str) -> None:
    array = np.arange(4 * 5000.0).reshape(4, 5000)
    before = array.copy()
    for leaf in arrays(read(BORROWED[name](array), only_reads=False)):
        leaf[...] = -1
    assert np.array_equal(array, before)


def negate(x: np.ndarray) -> np.ndarray:
    np.negative(x, out=x)
    return x


def accept(x: np.ndarray) -> bool:
    negate(x)
    return True


WRITERS = {
    "map": lambda ds: ds.map(negate),
    "threaded map": lambda ds: ds.map(negate, num_parallel_calls=2),
    "map of batches": lambda ds: ds.batch(2).map(negate).unbatch(),
    "map, prefetched and batched": lambda ds: ds.map(negate).prefetch(1).batch(1).unbatch(),
    "filter": lambda ds: ds.filter(accept),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.from_tensors(negate(x))),
}


@pytest.mark.parametrize("cached", [False, True], ids=["source", "cache"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_function_that_modifies_its_argument_modifies_no_stored_data(
    name: str, cached: bool
) -> None:
    array = np.arange(1.0, 1 + 4 * 5000).reshape(4, 5000)
    before = array.copy()
    kept = Dataset.from_tensor_slices(array)
    dataset = WRITERS[name](kept.cache() if cached else kept)
    for _ in range(3):
        assert np.array_equal(read(dataset), -before)
    assert np.array_equal(array, before)


def test_elements_of_a_complete_cache_are_borrowed_and_read_only() -> None:
    calls = []

    def made(x: np.int64) -> np.ndarray:
        calls.append(int(x))
        return np.full(5000, x)

    dataset = Dataset.range(3).map(made).cache()
    for row in read(dataset, only_reads=False):
        row[:] = -1  # its own
    first, second = read(dataset), read(dataset)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert np.shares_memory(one, other)
        assert not one.flags.writeable
        assert (one == index).all()
    for row in read(dataset, only_reads=False):
        assert not any(np.shares_memory(row, one) for one in first)
        row[:] = -1
    assert np.array_equal(read(dataset), first)
    assert [row[0] for row in first] == [0, 1, 2]
    assert calls == [0, 1, 2]


def test_a_nested_dataset_borrows_no_buffers() -> None:
    array = np.arange(4 * 5000.0).reshape(4, 5000)
    dataset = Dataset.range(2).flat_map(lambda _: Dataset.from_tensor_slices(array))
    assert not any(np.shares_memory(leaf, array) for leaf in arrays(read(dataset)))


def test_a_plan_with_assigned_splits_borrows_buffers_too() -> None:
    array = np.arange(4 * 5000.0).reshape(4, 5000)
    dataset = Dataset.from_tensor_slices(array).repeat(2)
    assign = compute_split_space(prepare(dataset.plan).plan)
    assert assign is not None
    splits = iter([(0, 3), (3, 8)])
    iterator = build_iterator(
        dataset.plan, seed=1, next_splits=lambda: next(splits, None), is_read_only=True
    )
    rows: list[Any] = []
    while (chunk := iterator.next_chunk(9)) is not None:
        rows += chunk.rows()
    assert [row[0] for row in rows] == [0.0, 5000.0, 10000.0, 15000.0] * 2
    assert all(np.shares_memory(row, array) for row in rows)
