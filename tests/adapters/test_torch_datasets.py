"""Conversion of PyTorch datasets and DataLoaders to Headrace datasets."""

from __future__ import annotations

import doctest
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

import headrace as hr

ROWS = 11


class Item(NamedTuple):
    image: Any
    label: Any


class Images(Dataset[Any]):
    """A map-style dataset, as users write them."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        number = self.first + index
        return torch.full((2, 2), float(number), requires_grad=True), number


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(4):
            yield Item(torch.tensor([number], dtype=torch.bfloat16), [torch.tensor(number), "n"])


def labels(dataset: Any) -> list[Any]:
    return [label.tolist() for _, label in dataset]


def test_a_map_style_dataset_is_shuffled_sharded_and_restored_by_index():
    dataset = hr.torch.from_torch(Images())
    assert len(dataset) == ROWS
    image, label = next(iter(dataset))
    assert (image.dtype, image.shape, type(label)) == (np.float32, (2, 2), np.int64)
    assert labels(dataset.shard(4, 1)) == [1, 5, 9]
    shuffled = dataset.shuffle(ROWS, seed=1)
    iterator = iter(shuffled)
    first = [int(next(iterator)[1]) for _ in range(4)]
    state = json.loads(json.dumps(iterator.get_state()))
    rest = iter(shuffled)
    rest.set_state(state)
    assert sorted(first + labels(rest)) == list(range(ROWS))


def test_concat_datasets_and_subsets_keep_their_items():
    joined = ConcatDataset([Images(), Images(100)])
    assert labels(hr.torch.from_torch(joined).skip(10)) == [10, *range(100, 111)]
    chosen = Subset(joined, [12, 0, 3])
    dataset = hr.torch.from_torch(chosen, num_parallel_calls=2)
    assert labels(dataset) == [101, 0, 3]
    tensors = TensorDataset(torch.arange(4), torch.ones(4, dtype=torch.bfloat16))
    (batch,) = hr.torch.from_torch(tensors).batch(4)
    assert batch[0].tolist() == [0, 1, 2, 3]
    assert batch[1].dtype == ml_dtypes.bfloat16


def test_a_stream_is_read_from_its_start_each_time():
    dataset = hr.torch.from_torch(Stream())
    for _ in range(2):
        items = list(dataset)
        assert [item.image.tolist() for item in items] == [[0], [1], [2], [3]]
        assert items[1].label == (1, "n")


def test_tensors_survive_a_round_trip():
    tensors = TensorDataset(torch.randn(5, 3), torch.randn(5, 2).to(torch.float8_e5m2))
    back = list(hr.torch.loader(hr.torch.from_torch(tensors)))
    for made, given in zip(back, tensors, strict=True):
        assert torch.equal(made[0], given[0])
        assert made[1].dtype == given[1].dtype
        assert torch.equal(made[1].float(), given[1].float())


def collate(items: list[Any]) -> Any:
    images, numbers = zip(*items, strict=True)
    return {"images": torch.stack(images), "most": max(numbers)}


def test_a_dataloader_yields_batches_of_its_collate_fn():
    loader = DataLoader(Images(), batch_size=4, collate_fn=collate, drop_last=True)
    dataset = hr.torch.from_torch(loader)
    assert len(dataset) == 2
    assert [int(batch["most"]) for batch in dataset] == [3, 7]
    assert next(iter(dataset))["images"].shape == (4, 2, 2)
    shuffled = DataLoader(Images(), batch_size=3, shuffle=True)
    found = hr.torch.from_torch(shuffled)
    assert sorted(x for batch in labels(found) for x in batch) == list(range(ROWS))
    assert labels(found) != labels(found)


def test_a_dataloader_without_batch_size_yields_items():
    loader = DataLoader(Images(), batch_size=None)
    assert labels(hr.torch.from_torch(loader)) == list(range(ROWS))
    streamed = hr.torch.from_torch(DataLoader(Stream(), batch_size=2))
    assert [item.image.shape for item in streamed] == [(2, 1), (2, 1)]


class Opened(Images):
    """A dataset that must be opened in the process that reads it, as files are."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self.log = log

    def __getitem__(self, index: int) -> Any:
        assert self.log.read_text().split() == [f"0:{os.getpid()}"]
        return super().__getitem__(index)


def test_worker_init_fn_is_called_once_before_the_first_item(tmp_path: Any):
    log = tmp_path / "log"

    def begin(worker: int) -> None:
        with log.open("a") as file:
            file.write(f"{worker}:{os.getpid()}\n")

    loader = DataLoader(Opened(log), batch_size=2, num_workers=2, worker_init_fn=begin)
    dataset = hr.torch.from_torch(loader)
    assert not log.exists()
    assert len(labels(dataset)) == 6
    assert len(labels(dataset)) == 6


def test_a_torch_dataloader_can_run_on_a_data_service(tmp_path: Any):
    loader = DataLoader(Images(), batch_size=2, shuffle=True)
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        made = hr.torch.from_torch(loader)
        remote = made.apply(hr.service.distribute("distributed_epoch", cluster.target))
        batches = list(hr.torch.loader(remote))
    assert sorted(torch.cat([label for _, label in batches]).tolist()) == list(range(ROWS))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], r"use Dataset\.from_pipeline for those of other libraries"),
        (Dataset(), "without `__len__`"),
        (hr.Dataset.range(3), "is already a Dataset of Headrace"),
    ],
)
def test_values_that_are_no_torch_dataset_are_rejected(value: Any, message: str):
    with pytest.raises(TypeError, match=message):
        hr.torch.from_torch(value)
    with pytest.raises(TypeError, match="pass the Dataset that it reads"):
        hr.torch.from_torch(hr.torch.loader(hr.Dataset.range(3)))


@pytest.mark.parametrize("function", [hr.torch.from_torch, hr.torch.loader])
def test_docstring_examples_pass(function: Any):
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(function, module=False, globs={}):
        runner.run(example)
    assert (runner.failures, runner.tries > 0) == (0, True)
