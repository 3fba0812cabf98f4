"""Grain IterDatasets that read Headrace datasets."""

from __future__ import annotations

import json
from typing import Any

import grain

from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.traverse import walk

__all__ = ["iter_dataset"]

_STATE_KEY = "headrace"


def iter_dataset(dataset: Dataset[Any]) -> Any:
    """Return a `grain.IterDataset` of the elements of a dataset.

    Grain's transformations (`map`, `batch`, `mix`, ...) can be applied to it, and its iterators
    have states that Grain and Orbax save. With a dataset over a data service
    (`hr.service.distribute`), the data workers compute the elements.

    Each iteration is an epoch of the dataset: shuffles draw a new order. A state selects its own
    epoch. For several epochs apply `Dataset.repeat`; Grain's repetition of an iterator reads one
    epoch again, in the same order.

    `mp_prefetch` divides a dataset of this process among its processes with `Dataset.shard`.

    >>> import headrace as hr
    >>> numbers = hr.grain.iter_dataset(hr.Dataset.range(6)).map(lambda x: x * 10).batch(2)
    >>> iterator = iter(numbers)
    >>> next(iterator).tolist()
    [0, 10]
    >>> state = iterator.get_state()
    >>> restored = iter(numbers)
    >>> restored.set_state(state)
    >>> next(restored).tolist()
    [20, 30]
    >>> iterator.close(), restored.close()
    (None, None)

    Args:
        dataset: The dataset.

    Raises:
        TypeError: If `dataset` is not a Dataset.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"`dataset` must be a headrace.Dataset, but got {type(dataset).__name__}; a Grain "
            "dataset becomes one with Dataset.from_pipeline"
        )
    return _IterDataset(dataset)


class _IterDataset(grain.IterDataset):  # type: ignore[misc]
    """The elements of a dataset."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        super().__init__()
        self._dataset = dataset

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(iter(self._dataset))

    def __str__(self) -> str:
        return "HeadraceIterDataset"

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Keep the elements of one of the processes of `mp_prefetch`, which calls this on a copy.

        Args:
            sl: `slice(process, None, number of processes)`.
            sequential_slice: Ignored; each process reads every n-th element.

        Raises:
            ValueError: If the dataset reads a data service.
        """
        if any(_is_remote(node) for node in walk(self._dataset.plan)):
            raise ValueError(
                "mp_prefetch cannot divide a dataset that reads a data service: remove it, as data "
                "workers compute the elements already; or apply it before hr.service.distribute"
            )
        self._dataset = self._dataset.shard(sl.step, sl.start)


def _is_remote(node: Node) -> bool:
    return isinstance(node, FromSource) and node.source.remote_plan is not None


class _Iterator(grain.DatasetIterator):  # type: ignore[misc]
    """Iterator over an epoch of a dataset."""

    def __init__(self, iterator: DatasetIterator[Any]) -> None:
        super().__init__()
        self._iterator = iterator

    def __next__(self) -> Any:
        self._assert_not_closed()
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        # A string, as Grain copies a state per prefetched element, and wants states of one
        # structure.
        return {_STATE_KEY: json.dumps(self._iterator.get_state(), separators=(",", ":"))}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or not isinstance(state.get(_STATE_KEY), str):
            raise TypeError(
                "`state` must be a result of `get_state` of an iterator over "
                f"hr.grain.iter_dataset, but got {state!r:.80}"
            )
        self._iterator.set_state(json.loads(state[_STATE_KEY]))

    def close(self) -> None:
        super().close()
        self._iterator.close()

    def __str__(self) -> str:
        return "HeadraceDatasetIterator"
