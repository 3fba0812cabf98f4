"""Datasets out of other libraries' pipelines, told by what they offer; none of them is imported.

What can be read at any index is a `map` over a range of indices: it is shuffled, split, dealt and
restored by arithmetic, as arrays are. What can only be read from its start is a generator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["from_pipeline", "from_random_access"]

_log = logging.getLogger(__name__)


def from_random_access(make: Any, sequence: Any, num_parallel_calls: int | None = None) -> Any:
    """Return the items of a sequence as a dataset of a class.

    Raises:
        TypeError: It is no such sequence; the message says what would do.
    """
    _refuse(sequence)
    if not _is_random_access(sequence):
        raise TypeError(
            f"`sequence` must have `__len__` and `__getitem__` (or `__getitems__`), but is a "
            f"{type(sequence).__name__}; what can only be iterated over goes to from_generator"
        )
    indices = make.range(len(sequence))
    return indices.map(_Items(sequence), num_parallel_calls=num_parallel_calls)


def from_pipeline(make: Any, pipeline: Any) -> Any:
    """Return the elements of another library's pipeline as a dataset of a class.

    Raises:
        TypeError: It is nothing that could be read more than once; the message says what would do.
    """
    if isinstance(pipeline, make):
        return pipeline
    _refuse(pipeline)
    if isinstance(pipeline, np.ndarray):
        return make.from_tensor_slices(pipeline)
    if _is_a(pipeline, "torch.utils.data", "DataLoader"):
        return _from_loader(make, pipeline)
    if _is_a(pipeline, "datasets", "IterableDataset"):
        return make.range(_shards_of(pipeline)).flat_map(_Shards(make, pipeline))
    if _is_a(pipeline, "grain", "MapDataset"):
        return make.range(len(pipeline)).flat_map(_NoneOrOne(make, pipeline))
    if _is_random_access(pipeline):
        return from_random_access(make, pipeline)
    if isinstance(pipeline, Iterable):
        return make.from_generator(_Again(pipeline))
    if callable(pipeline):
        return make.from_generator(pipeline)
    raise TypeError(
        f"a {type(pipeline).__name__} cannot be read as a dataset: it has no `__iter__`, no "
        "`__len__` with `__getitem__`, and is no function that returns an iterable"
    )


@dataclass(frozen=True)
class _Items:
    """Gets one item, perhaps converted as a torch DataLoader without batches does."""

    sequence: Any
    convert: Callable[[Any], Any] | None = None

    def __call__(self, index: np.int64) -> Any:
        if _has_single_items(self.sequence):
            item = self.sequence[int(index)]
        else:
            (item,) = self.sequence.__getitems__([int(index)])
        return item if self.convert is None else _in_tuples(self.convert(item))


@dataclass(frozen=True)
class _Batches:
    """Gets the items of a batch, and makes it as a torch DataLoader does."""

    sequence: Any
    collate: Callable[[list[Any]], Any]

    def __call__(self, indices: Any) -> Any:
        numbers = indices.tolist()
        if hasattr(self.sequence, "__getitems__"):
            items = self.sequence.__getitems__(numbers)
        else:
            items = [self.sequence[number] for number in numbers]
        return _in_tuples(self.collate(items))


@dataclass(frozen=True)
class _NoneOrOne:
    """Opens an index of a Grain dataset, which has None where a filter left its element out."""

    make: Any
    sequence: Any

    def __call__(self, index: np.int64) -> Any:
        item = self.sequence[int(index)]
        return self.make.range(0) if item is None else self.make.from_tensors(item)


@dataclass(frozen=True)
class _Shards:
    """Opens one shard of a Hugging Face stream."""

    make: Any
    stream: Any

    def __call__(self, index: np.int64) -> Any:
        count = _shards_of(self.stream)
        shard = self.stream.shard(num_shards=count, index=int(index)) if count > 1 else self.stream
        return self.make.from_generator(_Again(shard))


def _shards_of(stream: Any) -> int:
    """Return in how many parts a Hugging Face stream can be read; its name was another before."""
    return int(stream.num_shards if hasattr(stream, "num_shards") else stream.n_shards)


@dataclass(frozen=True)
class _Again:
    """Iterates over an iterable from its start."""

    iterable: Iterable[Any]

    def __call__(self) -> Iterator[Any]:
        return iter(self.iterable)


@dataclass(frozen=True)
class _LoadedAgain:
    """Iterates over what a torch DataLoader gives, from its start."""

    loader: Iterable[Any]

    def __call__(self) -> Iterator[Any]:
        return map(_in_tuples, self.loader)


def _from_loader(make: Any, loader: Any) -> Any:
    """Return the batches of a torch DataLoader, made wherever the dataset is read.

    Its order is the sampler's where that is sequential or a plain shuffle (then drawn as
    `Dataset.shuffle` draws); any other sampler runs in one place, and the loader with it.
    """
    batches = loader.batch_sampler
    plain = batches is None or _is_exactly(batches, "BatchSampler")
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if plain and _is_random_access(loader.dataset) and _is_known(sampler, loader.dataset):
        indices = make.range(len(loader.dataset))
        if _is_exactly(sampler, "RandomSampler"):
            drawn = sampler.generator
            seed = None if drawn is None else drawn.initial_seed() % (1 << 63)
            indices = indices.shuffle(max(len(loader.dataset), 1), seed=seed)
        calls = loader.num_workers or None
        if batches is None:
            one = _Items(loader.dataset, loader.collate_fn)
            return indices.map(one, num_parallel_calls=calls)
        indices = indices.batch(batches.batch_size, drop_remainder=batches.drop_last)
        return indices.map(_Batches(loader.dataset, loader.collate_fn), num_parallel_calls=calls)
    _log.warning(
        "this DataLoader is read from its start by one worker: its %s is not one that is known "
        "to be sequential or a plain shuffle. For parts on all workers use Dataset.range(n), "
        "`shuffle`, `batch` and `map` over its dataset",
        type(sampler).__name__ if _is_random_access(loader.dataset) else "dataset",
    )
    return make.from_generator(_LoadedAgain(loader))


def _is_known(sampler: Any, dataset: Any) -> bool:
    """Say whether a sampler gives each index of a dataset once, in order or plainly shuffled."""
    kinds = ("SequentialSampler", "RandomSampler")
    if not any(_is_exactly(sampler, kind) for kind in kinds):
        return False
    # It may be one over other data, or over a part of them.
    over_all = len(sampler.data_source) == len(sampler) == len(dataset)
    return over_all and not getattr(sampler, "replacement", False)


def _in_tuples(made: Any) -> Any:
    """Return it with tuples for lists of parts: torch collates tuples to lists, here arrays."""
    kind = type(made)
    if kind is tuple or (kind is list and not all(map(_is_value, made))):
        return tuple(map(_in_tuples, made))
    if kind is dict:
        return {name: _in_tuples(part) for name, part in made.items()}
    return made


def _is_value(part: Any) -> bool:
    """Say whether a list of such parts is one array."""
    if isinstance(part, list):  # rows of it
        return all(map(_is_value, part))
    return isinstance(part, bool | int | float | complex | np.generic | str | bytes)


def _is_random_access(value: Any) -> bool:
    has_items = hasattr(value, "__getitem__") or hasattr(value, "__getitems__")
    if not has_items or not hasattr(value, "__len__"):
        return False
    # torch's streams inherit `__getitem__`, and some say how long they are; ours only raises.
    is_stream = _is_a(value, "torch.utils.data", "IterableDataset")
    return not (is_stream or _is_a(value, "headrace", "Dataset"))


def _has_single_items(value: Any) -> bool:
    """Say whether items can be got one by one: torch's own `__getitem__` says that they cannot."""
    get = getattr(type(value), "__getitem__", None)
    is_inherited = getattr(get, "__module__", None) == "torch.utils.data.dataset" and (
        getattr(get, "__qualname__", None) == "Dataset.__getitem__"
    )
    return get is not None and not (is_inherited and hasattr(value, "__getitems__"))


def _is_a(value: Any, module: str, name: str) -> bool:
    """Say whether a class of that name, of a package, is among the classes of a value."""
    return any(
        kind.__name__ == name and (kind.__module__ + ".").startswith(module + ".")
        for kind in type(value).__mro__
    )


def _is_exactly(value: Any, name: str) -> bool:
    """Say whether a value is one of torch's own samplers, and not of a class derived from it."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__ == "torch.utils.data.sampler"


def _refuse(value: Any) -> None:
    """Refuse what looks like a sequence and is none.

    Raises:
        TypeError: It says what would do.
    """
    if isinstance(value, Iterator):
        what, cure = "can be read once", "pass what it was made from, or a function that makes it"
    elif isinstance(value, str | bytes | bytearray):
        what, cure = "is one value", "put it into a list, or read files with list_files"
    elif isinstance(value, Mapping):
        what, cure = (
            "has names and no order",
            ("choose one of its values (a split), or use from_tensor_slices for a dict of arrays"),
        )
    elif type(value).__module__.partition(".")[0] == "pandas":
        what, cure = "is a table of columns", 'use from_tensor_slices(table.to_dict("list"))'
    else:
        return
    raise TypeError(f"a {type(value).__name__} {what}, so it is no dataset: {cure}")
