"""Grain data sources that read Headrace datasets by index."""

from __future__ import annotations

import operator
import threading
from typing import Any

from headrace.data.dataset import Dataset
from headrace.execution.build import build_iterator
from headrace.execution.iterator import ElementIterator
from headrace.plan.buffering import Prefetch
from headrace.plan.determinism import collect_fixed_seeds
from headrace.plan.elements import FromSource, GatherIndices, ReadIndices
from headrace.plan.elementwise import Map
from headrace.plan.identity import identity_digest
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.ordering import Shuffle
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, is_index_plan, transform, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.canonicalize import canonicalize

__all__ = ["source"]


def source(dataset: Dataset[Any]) -> RandomAccessSource:
    """Return a Grain data source (`grain.sources.RandomAccessDataSource`) of a dataset.

    The dataset is read by index: arrays, ranges, `from_random_access` and indexed files, with
    shuffles, `take`, `skip`, `shard`, `repeat(n)` and `batch`, and with `map` on top. For other
    datasets use `hr.grain.iter_dataset`.

    >>> import headrace as hr
    >>> squares = hr.Dataset.range(10).shuffle(10, seed=3).map(lambda x: x * x)
    >>> source = hr.grain.source(squares)
    >>> len(source), sorted(int(source[index]) for index in range(10))
    (10, [0, 1, 4, 9, 16, 25, 36, 49, 64, 81])
    >>> import grain
    >>> batches = grain.MapDataset.source(source).shuffle(seed=1).batch(5)
    >>> [batch.shape for batch in batches]
    [(5,), (5,)]

    The source can be read by several threads and pickled for the processes of `grain.DataLoader`
    and `mp_prefetch`. Its element at an index is always the same.

    Args:
        dataset: The dataset.

    Raises:
        TypeError: If `dataset` is not a Dataset.
        ValueError: If it cannot be read by index, has no end, or has a shuffle without a seed; the
            message names the step.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"`dataset` must be a headrace.Dataset, but got {type(dataset).__name__}; Grain reads "
            "sequences without an adapter"
        )
    return RandomAccessSource(dataset.plan)


class RandomAccessSource:
    """Elements of a plan by index: the result of `source`.

    Args:
        plan: The plan as written.
    """

    def __init__(self, plan: Node) -> None:
        canonical = canonicalize(plan)
        _check_indexed(canonical.plan, canonical.options)
        self._plan = plan
        self._size = cardinality(canonical.plan)
        seed = "" if canonical.options.seed is None else f", seed={canonical.options.seed}"
        self._name = f"headrace.grain.source({self._size} elements, {identity_digest(plan)}{seed})"
        self._canonical = transform(canonical.plan, _without_threads)
        self._seed = canonical.options.seed or 0  # each shuffle has a seed, or the options have
        self._step_seeds = collect_fixed_seeds(plan)
        self._thread = threading.local()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return an element; its memory belongs to the caller.

        Raises:
            IndexError: If `index` is not in the range from `-len(self)` to `len(self) - 1`.
        """
        position = operator.index(index)
        if not -self._size <= position < self._size:
            raise IndexError(f"index {position} of a source with {self._size} elements")
        iterator = self._iterator()
        # The state of an iterator over an index plan, and of one-to-one steps over it, is an index.
        iterator.set_state(position % self._size)
        chunk = iterator.next_chunk(1)
        assert chunk is not None
        return chunk.rows()[0]

    def _iterator(self) -> ElementIterator:
        """Return this thread's iterator, which has no threads and holds no files."""
        iterator: ElementIterator | None = getattr(self._thread, "iterator", None)
        if iterator is None:
            iterator = build_iterator(self._canonical, seed=self._seed, step_seeds=self._step_seeds)
            self._thread.iterator = iterator
        return iterator

    def __repr__(self) -> str:
        # grain.DataLoader compares it with that of the source in a checkpoint.
        return self._name

    def __reduce__(self) -> tuple[Any, ...]:
        return RandomAccessSource, (self._plan,)


def _check_indexed(plan: Node, options: Options) -> None:
    """Raise an error unless the canonical `plan` can be read by index."""
    node = plan
    while isinstance(node, Map | Prefetch):
        (node,) = node.inputs
    if not isinstance(node, GatherIndices) or not is_index_plan(node.input):
        raise ValueError(
            f"hr.grain.source reads elements by index, but {_find_obstacle(node)} yields them in "
            "sequence; use hr.grain.iter_dataset(dataset)"
        )
    if cardinality(plan) == INFINITE:
        raise ValueError(
            "hr.grain.source needs a dataset with an end: remove `repeat`, and use the one of "
            "grain.MapDataset"
        )
    for step in walk(plan):
        if isinstance(step, Shuffle) and step.seed is None and options.seed is None:
            raise ValueError(
                f"{step_name(step)} has no seed, so its order would differ between processes and "
                "runs: pass `seed`"
            )


def _find_obstacle(node: Node) -> str:
    """Return the name of the step that is not read by index: `node`, or one of its inputs."""
    if isinstance(node, GatherIndices):
        node = next(step for step in walk(node.input) if not step.is_index_step)
    source_type = type(node.source).__name__ if isinstance(node, FromSource | ReadIndices) else ""
    return step_name(node, source_type)


def _without_threads(node: Node) -> Node:
    """Return a step that reads nothing ahead and starts no threads."""
    if isinstance(node, Prefetch):
        return node.input
    if isinstance(node, Map):
        return node.with_parameters(num_parallel_calls=None)
    return node
