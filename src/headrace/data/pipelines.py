"""Datasets from other libraries' pipelines, recognized by their interfaces without importing them.

Random-access data becomes a `map` over a range of indices, so it is shuffled, split and restored by
arithmetic, like arrays. Data that can only be iterated over becomes a source of one index; it is
restored by its iterator's state if it has one (Grain), else read again from the start.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.sources.stateful_iterable import StatefulIterableSource

__all__ = ["from_pipeline", "from_random_access"]

_log = logging.getLogger(__name__)


def from_random_access(make: Any, sequence: Any, num_parallel_calls: int | None = None) -> Any:
    """Return the items of a sequence as a dataset of class `make`.

    Raises:
        TypeError: If it is not such a sequence; the message suggests a remedy.
    """
    _raise_not_a_sequence(sequence)
    if not _is_random_access(sequence):
        raise TypeError(
            f"`sequence` must have `__len__` and `__getitem__` (or `__getitems__`), but is a "
            f"{type(sequence).__name__}; for an iterable use Dataset.from_generator"
        )
    if _is_instance_by_name(sequence, "datasets", "Dataset"):
        rows = _hugging_face().HuggingFaceRows.of_dataset(sequence)
        if rows is not None:
            return rows.as_dataset(make)
    indices = make.range(len(sequence))
    return indices.map(_GetItem(sequence), num_parallel_calls=num_parallel_calls)


def from_pipeline(make: Any, pipeline: Any) -> Any:
    """Return the elements of another library's pipeline as a dataset of class `make`.

    Raises:
        TypeError: If it cannot be read more than once; the message suggests a remedy.
    """
    if isinstance(pipeline, make):
        return pipeline
    _raise_not_a_sequence(pipeline)
    if isinstance(pipeline, np.ndarray):
        return make.from_tensor_slices(pipeline)
    if _is_instance_by_name(pipeline, "torch.utils.data", "DataLoader"):
        return _from_loader(make, pipeline)
    if _is_instance_by_name(pipeline, "datasets", "IterableDataset"):
        files = _hugging_face().find_parquet_rows(pipeline)
        if files is not None:
            return make.from_source(files)
        return make.range(_num_shards(pipeline)).flat_map(_OpenShard(make, pipeline))
    if _is_instance_by_name(pipeline, "grain", "MapDataset"):
        items = make.range(len(pipeline)).map(_OptionalItem(pipeline))
        return items.filter(_is_present).map(_get_present)
    if any(_is_instance_by_name(pipeline, "grain", kind) for kind in ("IterDataset", "DataLoader")):
        return make.from_source(StatefulIterableSource(pipeline))
    if _is_random_access(pipeline):
        return from_random_access(make, pipeline)
    if isinstance(pipeline, Iterable):
        return make.from_generator(_Reiterate(pipeline))
    if callable(pipeline):
        return make.from_generator(pipeline)
    raise TypeError(
        f"{pipeline!r:.60} of type {type(pipeline).__name__} cannot be read as a dataset: it has "
        "no `__iter__`, no `__len__` with `__getitem__`, and is no function of an iterable"
    )


def _hugging_face() -> Any:
    """Return the module, which imports packages for Arrow and Parquet."""
    return importlib.import_module("headrace.sources.hugging_face")


@dataclass(frozen=True)
class _GetItem:
    """Gets one item, converted if needed as by a torch DataLoader without batching."""

    sequence: Any
    convert: Callable[[Any], Any] | None = None

    def __call__(self, index: np.int64) -> Any:
        if _has_single_items(self.sequence):
            item = self.sequence[int(index)]
        else:
            (item,) = self.sequence.__getitems__([int(index)])
        return item if self.convert is None else _lists_to_tuples(self.convert(item))


@dataclass(frozen=True)
class _GetBatch:
    """Gets the items of a batch, and collates them like a torch DataLoader."""

    sequence: Any
    collate: Callable[[list[Any]], Any]

    def __call__(self, indices: Any) -> Any:
        numbers = indices.tolist()
        if hasattr(self.sequence, "__getitems__"):
            items = self.sequence.__getitems__(numbers)
        else:
            items = [self.sequence[number] for number in numbers]
        return _lists_to_tuples(self.collate(items))


@dataclass(frozen=True)
class _OptionalItem:
    """Gets an item of a Grain dataset, which is None if a filter dropped its element."""

    sequence: Any

    def __call__(self, index: np.int64) -> tuple[bool, Any]:
        item = self.sequence[int(index)]
        return (False, 0) if item is None else (True, item)


def _is_present(is_present: bool, item: Any) -> bool:
    return is_present


def _get_present(is_present: bool, item: Any) -> Any:
    return item


@dataclass(frozen=True)
class _OpenShard:
    """Opens one shard of a Hugging Face stream."""

    make: Any
    stream: Any

    def __call__(self, index: np.int64) -> Any:
        count = _num_shards(self.stream)
        shard = self.stream.shard(num_shards=count, index=int(index)) if count > 1 else self.stream
        return self.make.from_generator(_Reiterate(shard))


def _num_shards(stream: Any) -> int:
    """Return the number of shards of a Hugging Face stream; older versions use another name."""
    return int(stream.num_shards if hasattr(stream, "num_shards") else stream.n_shards)


@dataclass(frozen=True)
class _Reiterate:
    """Iterates over an iterable from the start in each call."""

    iterable: Iterable[Any]

    def __call__(self) -> Iterator[Any]:
        return iter(self.iterable)


@dataclass(frozen=True)
class _ReiterateLoader:
    """Iterates over the batches of a torch DataLoader from the start in each call."""

    loader: Iterable[Any]

    def __call__(self) -> Iterator[Any]:
        return map(_lists_to_tuples, self.loader)


def _from_loader(make: Any, loader: Any) -> Any:
    """Return the batches of a torch DataLoader as a dataset.

    With a sequential or plain shuffling sampler, batches are made wherever the dataset is read, and
    a shuffled order is drawn by `Dataset.shuffle`. Any other sampler, and its loader, is read from
    the start by a single reader.
    """
    batches = loader.batch_sampler
    plain = batches is None or _is_torch_sampler(batches, "BatchSampler")
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if (
        plain
        and _is_random_access(loader.dataset)
        and _is_standard_sampler(sampler, loader.dataset)
    ):
        indices = make.range(len(loader.dataset))
        if _is_torch_sampler(sampler, "RandomSampler"):
            drawn = sampler.generator
            seed = None if drawn is None else drawn.initial_seed() % (1 << 63)
            indices = indices.shuffle(max(len(loader.dataset), 1), seed=seed)
        calls = loader.num_workers or None
        if batches is None:
            one = _GetItem(loader.dataset, loader.collate_fn)
            return indices.map(one, num_parallel_calls=calls)
        indices = indices.batch(batches.batch_size, drop_remainder=batches.drop_last)
        return indices.map(_GetBatch(loader.dataset, loader.collate_fn), num_parallel_calls=calls)
    _log.warning(
        "this DataLoader is read as a whole by one worker, since the order of its %s is unknown. "
        "To use all workers, build the pipeline from Dataset.range(n), `shuffle`, `batch` and "
        "`map` over its dataset",
        type(sampler).__name__ if _is_random_access(loader.dataset) else "dataset",
    )
    return make.from_generator(_ReiterateLoader(loader))


def _is_standard_sampler(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler yields each index once, in order or plainly shuffled."""
    kinds = ("SequentialSampler", "RandomSampler")
    if not any(_is_torch_sampler(sampler, kind) for kind in kinds):
        return False
    # The sampler may refer to other data, or to a subset.
    over_all = len(sampler.data_source) == len(sampler) == len(dataset)
    return over_all and not getattr(sampler, "replacement", False)


def _lists_to_tuples(result: Any) -> Any:
    """Convert lists of components to tuples: torch collates tuples to lists."""
    kind = type(result)
    if kind is tuple or (kind is list and not all(map(_is_array_item, result))):
        return tuple(map(_lists_to_tuples, result))
    if kind is dict:
        return {name: _lists_to_tuples(part) for name, part in result.items()}
    return result


def _is_array_item(part: Any) -> bool:
    """Return whether a list with such an item is an array."""
    if isinstance(part, list):  # a row of the array
        return all(map(_is_array_item, part))
    return isinstance(part, bool | int | float | complex | np.generic | str | bytes)


def _is_random_access(value: Any) -> bool:
    has_items = hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    if not has_items or not hasattr(value, "__len__"):
        return False
    # torch's streams inherit `__getitem__`, and some have a length; our Dataset only raises.
    is_stream = _is_instance_by_name(value, "torch.utils.data", "IterableDataset")
    return not (is_stream or _is_instance_by_name(value, "headrace", "Dataset"))


def _has_single_items(value: Any) -> bool:
    """Return whether single items can be read; torch's base `__getitem__` only raises."""
    get = getattr(type(value), "__getitem__", None)
    is_inherited = getattr(get, "__module__", None) == "torch.utils.data.dataset" and (
        getattr(get, "__qualname__", None) == "Dataset.__getitem__"
    )
    return get is not None and not (is_inherited and hasattr(value, "__getitems__"))


def _is_instance_by_name(value: Any, module: str, name: str) -> bool:
    """Return whether a value's class or one of its bases has this name and package."""
    return any(
        kind.__name__ == name and (kind.__module__ + ".").startswith(module + ".")
        for kind in type(value).__mro__
    )


def _is_torch_sampler(value: Any, name: str) -> bool:
    """Return whether a value is one of torch's own samplers, not an instance of a subclass."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__ == "torch.utils.data.sampler"


def _raise_not_a_sequence(value: Any) -> None:
    """Raise an error for values that look like a sequence but are not.

    Raises:
        TypeError: If the value is one; the message suggests a remedy.
    """
    if isinstance(value, Iterator):
        reason = "can be read only once"
        fix = "pass the object it was created from, or a function that creates it"
    elif isinstance(value, str | bytes | bytearray):
        reason, fix = "is a single value", "put it into a list, or read files with list_files"
    elif isinstance(value, Mapping):
        reason = "is a mapping without an order"
        fix = "choose one of its values (a split), or use from_tensor_slices for a dict of arrays"
    elif type(value).__module__.partition(".")[0] == "pandas":
        reason, fix = "is a table of columns", 'use from_tensor_slices(table.to_dict("list"))'
    else:
        return
    raise TypeError(f"a {type(value).__name__} {reason}, so it cannot be read as a dataset: {fix}")
