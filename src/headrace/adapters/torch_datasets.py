"""Conversion of PyTorch datasets and DataLoaders to Headrace datasets."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from headrace.adapters.torch_loader import Loader
from headrace.adapters.torch_tensors import to_arrays
from headrace.data.dataset import Dataset

__all__ = ["from_torch"]


def from_torch(dataset: Any, num_parallel_calls: int | None = None) -> Dataset:
    """Return a torch Dataset, IterableDataset or DataLoader as a Dataset.

    >>> import headrace as hr
    >>> from torch.utils.data import DataLoader, Subset, TensorDataset
    >>> import torch
    >>> tensors = TensorDataset(torch.arange(6), torch.ones(6))
    >>> [int(x) for x, _ in hr.torch.from_torch(Subset(tensors, [4, 2]))]
    [4, 2]
    >>> batches = hr.torch.from_torch(DataLoader(tensors, batch_size=4))
    >>> [x.shape for x, _ in batches]
    [(4,), (2,)]

    Datasets with a length and items by index (also ConcatDataset and Subset) can be shuffled,
    sharded, assigned to workers and restored without reading items. A DataLoader with torch's own
    sequential or random sampler yields its batches, collated by its `collate_fn` where they are
    read; its worker processes are not started, and its `worker_init_fn` is called with 0 in each
    reading process before the first item. With another sampler, or for an IterableDataset, a single
    reader reads it from its start.

    Elements are NumPy: tensors become arrays in the same memory, and lists of them tuples.

    Args:
        dataset: The dataset or DataLoader.
        num_parallel_calls: Threads that get items, or `AUTOTUNE`. None uses the reading thread; for
            a DataLoader, one thread for each of its workers.

    Raises:
        TypeError: If `dataset` is none of these.
    """
    if isinstance(dataset, Dataset):
        raise TypeError("`dataset` is already a Dataset of Headrace; read it with hr.torch.loader")
    if isinstance(dataset, Loader):
        raise TypeError("`dataset` is a Loader; pass the Dataset that it reads")
    if isinstance(dataset, DataLoader):
        return _from_loader(dataset, num_parallel_calls)
    if isinstance(dataset, IterableDataset):
        return Dataset.from_generator(_ArrayStream(dataset))
    if not isinstance(dataset, TorchDataset):
        raise TypeError(
            "`dataset` must be a torch Dataset, IterableDataset or DataLoader, but got "
            f"{type(dataset).__name__}; use Dataset.from_pipeline for those of other libraries"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"`dataset` is a {type(dataset).__name__} without `__len__`, so its number of items is "
            "unknown: define __len__, or make it an IterableDataset"
        )
    is_single = type(dataset).__getitem__ is not TorchDataset.__getitem__
    items = (
        _ArrayItems(dataset)
        if is_single or not hasattr(dataset, "__getitems__")
        else _ArrayBatches(dataset)
    )
    return Dataset.from_random_access(items, num_parallel_calls)


def _from_loader(loader: Any, num_parallel_calls: int | None) -> Dataset:
    made = copy.copy(loader)
    if isinstance(loader.dataset, IterableDataset):
        return Dataset.from_generator(_ArrayStream(loader))
    # Set directly, because a DataLoader forbids the assignment; the copy is never started.
    made.__dict__["collate_fn"] = _ArrayCollate(loader.collate_fn)
    if loader.worker_init_fn is not None and loader.num_workers:
        made.__dict__["dataset"] = _WorkerInitDataset(loader.dataset, loader.worker_init_fn)
    if num_parallel_calls is not None:
        made.__dict__["num_workers"] = num_parallel_calls
    return Dataset.from_pipeline(made)


class _ArrayItems:
    """Gets items of a map-style dataset as arrays."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return to_arrays(self._dataset[index])


class _ArrayBatches:
    """Gets items of a map-style dataset that defines only `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [to_arrays(item) for item in self._dataset.__getitems__(indices)]


class _ArrayStream:
    """Iterates over a stream, or a DataLoader, from its start."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __call__(self) -> Iterator[Any]:
        return map(to_arrays, self._stream)


class _ArrayCollate:
    """Collates a batch with a DataLoader's function, and converts it to arrays."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        return to_arrays(self._collate(items))


class _WorkerInitDataset:
    """A map-style dataset that calls a function once in each process, before its first item."""

    def __init__(self, dataset: Any, worker_init_fn: Callable[[int], object]) -> None:
        self._dataset = dataset
        self._worker_init_fn = worker_init_fn
        self._process = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if self._process != os.getpid():
            with self._lock:
                if self._process != os.getpid():
                    self._worker_init_fn(0)
                    self._process = os.getpid()
        return self._dataset[index]

    def __getstate__(self) -> tuple[Any, Any]:
        return self._dataset, self._worker_init_fn

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self.__init__(*state)  # type: ignore[misc]
