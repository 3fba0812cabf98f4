"""Other libraries' pipelines as datasets: the real ones, in process and over the service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import headrace as hr
from headrace.service import ShardingPolicy, distribute

ROWS = 23


class Images(torch.utils.data.Dataset[Any]):
    """A torch Dataset, as its users write them: an image and its label."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < ROWS:
            raise IndexError(index)
        return torch.full((2, 3), float(index)), index % 5


class InBatches(Images):
    """One that fetches several items at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.full((2, 3), float(index)), -index) for index in indices]


class Stream(IterableDataset[Any]):
    """A torch IterableDataset."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": torch.tensor(k)} for k in range(7)])


class Squares:
    """A sequence that belongs to no library."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        assert type(index) is int, "indices are Python ints"
        return index * index


class OnlyItems:
    """Something that can only fetch several items at once."""

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[str]:
        return [f"item {index}" for index in indices]


def rows_of(dataset: Any) -> list[Any]:
    """Return elements as plain lists, for comparison."""
    return [plain(element) for element in dataset]


def plain(element: Any) -> Any:
    if isinstance(element, tuple | list):
        return [plain(part) for part in element]
    if isinstance(element, dict):
        return {name: plain(part) for name, part in element.items()}
    return element.tolist() if hasattr(element, "tolist") else element


# --- items by index -----------------------------------------------------------------------------


def test_the_items_of_a_sequence_are_elements() -> None:
    dataset = hr.Dataset.from_random_access(Squares())
    assert rows_of(dataset) == [k * k for k in range(9)]
    assert dataset.cardinality() == len(dataset) == 9


def test_sequence_with_only_getitems_is_read() -> None:
    assert rows_of(hr.Dataset.from_random_access(OnlyItems())) == [f"item {k}" for k in range(4)]


class OnlyInBatches(torch.utils.data.Dataset[Any]):
    """A torch Dataset without items by number, as its DataLoaders do not need them."""

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor(-index) for index in indices]


def test_torch_dataset_with_only_getitems_is_read() -> None:
    for made in (hr.Dataset.from_random_access, hr.Dataset.from_pipeline, hr.torch.from_torch):
        assert rows_of(made(OnlyInBatches())) == [0, -1, -2, -3]


def test_list_items_may_have_different_shapes() -> None:
    items = [np.arange(k) for k in range(4)]
    assert rows_of(hr.Dataset.from_random_access(items)) == [list(range(k)) for k in range(4)]


def test_a_shuffle_gets_only_the_items_that_are_read() -> None:
    asked: list[int] = []

    class Asked(Squares):
        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return super().__getitem__(index)

    read = rows_of(hr.Dataset.from_random_access(Asked()).shuffle(9, seed=3).take(4))
    assert [k * k for k in asked] == read
    assert len(asked) == 4


def test_restored_reading_does_not_get_earlier_items() -> None:
    dataset = hr.Dataset.from_random_access(Squares()).batch(2)
    iterator = iter(dataset)
    first = [plain(next(iterator)) for _ in range(2)]
    state = json.loads(json.dumps(iterator.get_state()))
    rest = iter(dataset)
    rest.set_state(state)
    assert first + rows_of(rest) == rows_of(dataset)


def test_failing_item_error_names_its_index_and_reading_continues() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> int:
            if index == 2:
                raise OSError("no such image")
            return index

    iterator = iter(hr.Dataset.from_random_access(Broken()))
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(hr.errors.UserFunctionError, match="no such image"):
        next(iterator)
    assert int(next(iterator)) == 3


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (iter([1]), "can be read only once"),
        ("abc", "is a single value"),
        ({"train": [1], "test": [2]}, "choose one of its values"),
    ],
)
def test_values_that_resemble_sequences_are_rejected_with_a_fix(value: Any, words: str) -> None:
    for make in (hr.Dataset.from_random_access, hr.Dataset.from_pipeline):
        with pytest.raises(TypeError, match=words):
            make(value)


def test_values_without_items_are_rejected_with_a_fix() -> None:
    with pytest.raises(TypeError, match="from_generator"):
        hr.Dataset.from_random_access(Stream())
    with pytest.raises(TypeError, match="cannot be read as a dataset"):
        hr.Dataset.from_pipeline(3)


def test_pandas_table_is_rejected_with_a_fix() -> None:
    table = datasets.Dataset.from_dict({"x": [1, 2]}).to_pandas()
    with pytest.raises(TypeError, match=re.escape('from_tensor_slices(table.to_dict("list"))')):
        hr.Dataset.from_pipeline(table)
    assert rows_of(hr.Dataset.from_tensor_slices(table.to_dict("list"))) == [{"x": 1}, {"x": 2}]


# --- torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}])
@pytest.mark.parametrize("images", [Images(), InBatches()])
def test_sequential_loader_yields_the_same_batches_as_torch(
    images: Any, options: dict[str, Any]
) -> None:
    loader = DataLoader(images, **options)
    dataset = hr.Dataset.from_pipeline(loader)
    assert rows_of(dataset) == rows_of(loader)
    assert dataset.cardinality() == len(loader)


def test_loader_without_batch_size_yields_items() -> None:
    loader = DataLoader(Images(), batch_size=None)
    assert rows_of(hr.Dataset.from_pipeline(loader)) == rows_of(loader)


def test_shuffling_loader_yields_each_item_once_in_a_new_order_per_epoch() -> None:
    dataset = hr.Dataset.from_pipeline(DataLoader(Images(), batch_size=4, shuffle=True))
    passes = [[row for batch in dataset for row in batch[0][:, 0, 0].tolist()] for _ in range(2)]
    assert [sorted(rows) for rows in passes] == [list(range(ROWS))] * 2
    assert passes[0] != passes[1]


def test_generator_of_a_shuffling_loader_determines_the_seed() -> None:
    def made(seed: int) -> list[Any]:
        drawn = torch.Generator().manual_seed(seed)
        loader = DataLoader(Images(), batch_size=4, shuffle=True, generator=drawn)
        return rows_of(hr.Dataset.from_pipeline(loader))

    assert made(1) == made(1) != made(2)


def test_collate_function_of_the_loader_is_used() -> None:
    loader = DataLoader(Images(), batch_size=4, collate_fn=lambda rows: sum(y for _, y in rows))
    assert rows_of(hr.Dataset.from_pipeline(loader)) == rows_of(loader)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * ROWS, 12, generator=torch.Generator().manual_seed(4)),
        RandomSampler(Images(), replacement=True, num_samples=12),
    ],
)
def test_loader_with_a_custom_sampler_is_read_as_a_stream(
    sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(Images(), batch_size=4, sampler=sampler)
    dataset = hr.Dataset.from_pipeline(loader)
    assert "read as a whole by one worker" in caplog.text
    assert [len(batch[1]) for batch in dataset] == [4, 4, 4]


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("sampler", [SequentialSampler(range(5)), RandomSampler(range(5))])
def test_sampler_over_a_subset_reads_only_the_subset(sampler: Any, batch_size: Any) -> None:
    loader = DataLoader(Images(), batch_size=batch_size, sampler=sampler)
    read = rows_of(hr.Dataset.from_pipeline(loader).map(lambda image, label: label))
    labels = read if batch_size is None else [label for batch in read for label in batch]
    assert sorted(labels) == list(range(5))


def test_lists_become_arrays_from_every_source() -> None:
    rows = [[np.arange(2), np.arange(2)]]
    for dataset in (
        hr.Dataset.from_random_access(rows),
        hr.Dataset.from_pipeline(lambda: rows),
        hr.Dataset.from_pipeline({1: rows[0]}.values()),
    ):
        (row,) = dataset
        assert isinstance(row, np.ndarray)
        assert row.tolist() == [[0, 1], [0, 1]]


def test_subclass_of_a_torch_sampler_counts_as_custom() -> None:
    class Backwards(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return reversed(range(ROWS))

    images = Images()
    loader = DataLoader(images, batch_size=None, sampler=Backwards(images))
    assert rows_of(hr.Dataset.from_pipeline(loader)) == rows_of(loader)


def test_torch_stream_and_its_loader_are_read_from_the_start() -> None:
    assert rows_of(hr.Dataset.from_pipeline(Stream())) == rows_of(Stream())
    loader = DataLoader(Stream(), batch_size=3)
    assert rows_of(hr.Dataset.from_pipeline(loader)) == rows_of(loader)


# --- Hugging Face -------------------------------------------------------------------------------


def rows_to_keep() -> dict[str, list[Any]]:
    return {"text": [f"row {k}" for k in range(10)], "tokens": [[k] * (k % 3) for k in range(10)]}


def test_a_hugging_face_dataset_is_read_by_index() -> None:
    table = datasets.Dataset.from_dict(rows_to_keep())
    dataset = hr.Dataset.from_pipeline(table)
    assert rows_of(dataset) == rows_of(table)
    assert dataset.cardinality() == 10


def test_a_hugging_face_dataset_of_splits_is_refused() -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows_to_keep())})
    with pytest.raises(TypeError, match="choose one of its values"):
        hr.Dataset.from_pipeline(splits)


def test_shards_of_a_hugging_face_stream_are_separate_splits() -> None:
    stream = datasets.Dataset.from_dict(rows_to_keep()).to_iterable_dataset(num_shards=3)
    dataset = hr.Dataset.from_pipeline(stream)
    assert rows_of(dataset) == rows_of(stream)
    iterator = iter(dataset)
    rows = [next(iterator) for _ in range(6)]
    rest = iter(dataset)
    rest.set_state(iterator.get_state())
    assert rows_of(rows) + rows_of(rest) == rows_of(stream)


# --- anything else, and the service -------------------------------------------------------------


def test_functions_arrays_and_iterables_are_datasets() -> None:
    assert rows_of(hr.Dataset.from_pipeline(lambda: range(3))) == [0, 1, 2]
    assert rows_of(hr.Dataset.from_pipeline(np.eye(2))) == [[1.0, 0.0], [0.0, 1.0]]
    assert rows_of(hr.Dataset.from_pipeline({4})) == [4]
    dataset = hr.Dataset.range(2)
    assert hr.Dataset.from_pipeline(dataset) is dataset


def test_iterable_is_iterated_again_in_each_epoch() -> None:
    assert rows_of(hr.Dataset.from_pipeline({1: "a"}.keys()).repeat(2)) == [1, 1]


def test_any_pipeline_can_be_distributed() -> None:
    table = datasets.Dataset.from_dict({"x": list(range(50))})
    loader = DataLoader(Images(), batch_size=4)
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        for pipeline in (Squares(), loader, table, Stream(), lambda: range(5)):
            read = distribute(ShardingPolicy.DYNAMIC, cluster.target)(pipeline)
            assert sorted(map(repr, rows_of(read))) == sorted(
                map(repr, rows_of(hr.Dataset.from_pipeline(pipeline)))
            )
