"""An independent, naive reading of plans: one element after the other, without chunks or rewrites.

    list(elements(dataset.plan, seed=5))

is what an iterator over the dataset yields when its seed is 5. It takes plans as written, and its
only knowledge of the engine is which numbers a shuffle draws.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.element.normalize import normalize
from headrace.element.structure import unflatten
from headrace.element.transpose import map_leaves
from headrace.execution.shuffle_buffer import SlotDraws
from headrace.plan.batching import Batch, PaddedBatch, Unbatch
from headrace.plan.buffering import Cache, Prefetch
from headrace.plan.combined_sources import reads_unresolved_source
from headrace.plan.combining import Choose, Concatenate, Interleave, Sample, Zip
from headrace.plan.determinism import collect_fixed_seeds, with_fixed_seeds
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Filter, Map, Scan, TakeWhile
from headrace.plan.node import Node
from headrace.plan.options import WithOptions
from headrace.plan.ordering import Enumerate, Repeat, ShardElements, Shuffle, Skip, Take
from headrace.plan.random_words import derive_key, random_words
from headrace.plan.source import INFINITE
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.sources.memory import ElementListSource, RandomSource

_MASK = (1 << 64) - 1


def elements(
    plan: Node, *, seed: int, epochs: tuple[int, ...] = (0,), outer: tuple[int, ...] = ()
) -> Iterator[Any]:
    """Yield the elements of a plan as written.

    Args:
        plan: The plan.
        seed: The iteration's seed; a seed of the plan's options wins.
        passes: Which pass this is: the iteration, then that of each repeat around.
        outer: Numbers of the steps that opened this plan.
    """
    plan = with_fixed_seeds(plan, collect_fixed_seeds(plan))
    return _Reading(plan, seed, outer).of(plan, epochs, ())


def equal(one: Any, other: Any) -> bool:
    """Whether two elements are the same: structure, dtypes, shapes and values."""
    same: list[bool] = []

    def compare(a: Any, b: Any) -> None:
        same.append(type(a) is type(b) and np.array_equal(a, b))
        same.append(getattr(a, "dtype", None) == getattr(b, "dtype", None))

    map_leaves(compare, one, other)
    return all(same)


class _Reading:
    def __init__(self, plan: Node, seed: int, outer: tuple[int, ...]) -> None:
        self.seed = seed
        self.outer = outer
        #: Numbers of the steps that draw, by their paths from the end of the plan.
        self.numbers: dict[tuple[int, ...], int] = {}
        self._drawing = 0
        self._caches: dict[object, tuple[int, ...]] = {}
        self._number(plan, ())

    def _number(self, node: Node, path: tuple[int, ...]) -> None:
        if isinstance(node, Cache) and node.key in self._caches:
            # A cache has the same elements in each of its occurrences.
            first = self._caches[node.key]
            for other, number in list(self.numbers.items()):
                if other[: len(first)] == first:
                    self.numbers[path + other[len(first) :]] = number
            return
        for position, input_ in enumerate(node.inputs):
            self._number(input_, (*path, position))
        if isinstance(
            node, Shuffle | Interleave | GroupByWindow | Sample
        ) or reads_unresolved_source(node):
            self.numbers[path] = self._drawing
            self._drawing += 1
        if isinstance(node, Cache):
            self._caches[node.key] = path
        if isinstance(node, WithOptions) and node.options.seed is not None:
            self.seed = node.options.seed

    def of(self, node: Node, epochs: tuple[int, ...], path: tuple[int, ...]) -> Iterator[Any]:
        def read(position: int, *more: int) -> Iterator[Any]:
            return self.of(node.inputs[position], (*epochs, *more), (*path, position))

        match node:
            case FromSource(source=RandomSource(seed=seed)):
                unseeded = [4, self.seed & _MASK, len(self.outer) + 1, *self.outer]
                if seed is None:
                    key = derive_key([*unseeded, self.numbers[path], *epochs[:1]])
                else:
                    key = derive_key([5, seed & _MASK])
                for n in itertools.count():
                    yield np.int64(random_words(key, [n])[0] >> np.uint64(32))
            case FromSource(source=source):
                yield from _read_source(source)
            case Scan(initial_state=value, fn=fn):
                for x in read(0):
                    value, made = normalize(fn(value, x))
                    yield made
            case TakeWhile(predicate=predicate):
                yield from itertools.takewhile(lambda x: _call(predicate, x), read(0))
            case GroupByWindow() | BucketBySequenceLength():
                yield from self._gathered(node, read(0))
            case Sample():
                chosen = self._drawn(node, epochs, self.numbers.get(path))
                yield from _chosen(node, [read(n) for n in range(len(node.inputs))], chosen)
            case Choose(datasets=datasets):
                choices = read(len(datasets))
                inputs = [read(n) for n in range(len(datasets))]
                yield from _chosen(node, inputs, lambda ended, step: next(choices, None))
            case PaddedBatch(size=size):
                rest = read(0)
                while len(batch := list(itertools.islice(rest, size))) == size:
                    yield _stack(batch)  # of elements that are alike
            case Map(fn=fn):
                for x in read(0):
                    yield normalize(_call(fn, x))
            case Filter(predicate=predicate):
                yield from (x for x in read(0) if _call(predicate, x))
            case Batch(size=size, drop_remainder=drop):
                rest = read(0)
                while batch := list(itertools.islice(rest, size)):
                    if len(batch) == size or not drop:
                        yield _stack(batch)
            case Unbatch():
                for x in read(0):
                    yield from _rows(x)
            case Take(count=count):
                yield from read(0) if count < 0 else itertools.islice(read(0), count)
            case Skip(count=count):
                yield from () if count < 0 else itertools.islice(read(0), count, None)
            case ShardElements(num_shards=shards, index=index):
                yield from itertools.islice(read(0), index, None, shards)
            case Enumerate(start=start):
                yield from ((np.int64(n), x) for n, x in enumerate(read(0), start))
            case Repeat(count=count):
                for number in itertools.count() if count is None else range(count):
                    yield from read(0, number)
            case Zip(structure=structure):
                inputs = [read(position) for position in range(len(node.inputs))]
                for row in zip(*inputs, strict=False):
                    yield unflatten(structure, list(row))
            case Concatenate():
                yield from itertools.chain(read(0), read(1))
            case Shuffle():
                yield from self._shuffled(node, read(0), epochs, self.numbers[path])
            case Interleave():
                yield from self._interleaved(node, read(0))
            case Cache():
                yield from self.of(node.input, (0,) * len(epochs), (*path, 0))
            case Prefetch() | WithOptions():
                yield from read(0)
            case _:
                raise NotImplementedError(type(node).__name__)

    def _shuffled(
        self, node: Shuffle, input_: Iterator[Any], epochs: tuple[int, ...], number: int
    ) -> Iterator[Any]:
        if not node.reshuffle_each_iteration:
            epochs = ()
        path = (*self.outer, number)
        unseeded = [2, self.seed & _MASK, len(path), *path, *epochs]
        seeded = [1, (node.seed or 0) & _MASK, *epochs]
        if node.seed is None and not node.reshuffle_each_iteration:
            unseeded = [3, node.default_seed & _MASK]
        draws = SlotDraws(unseeded if node.seed is None else seeded, node.buffer_size)
        held = list(itertools.islice(input_, node.buffer_size))
        for x in input_:
            slot = int(draws.take(1)[0])
            yield held[slot]
            held[slot] = x
        yield from (held[slot] for slot in draws.last_order(len(held)))

    def _gathered(self, node: Any, input_: Iterator[Any]) -> Iterator[Any]:
        """Yield what becomes of windows; buckets are those of the tests: whole, without padding."""
        held: dict[int, list[Any]] = {}
        for x in input_:
            if isinstance(node, BucketBySequenceLength):
                length = _call(node.element_length_func, x)
                key = sum(length >= boundary for boundary in node.bucket_boundaries)
                size = node.bucket_batch_sizes[key]
            else:
                key, size = int(_call(node.key_func, x)), node.window_size
            held.setdefault(key, []).append(x)
            if len(held[key]) == size:
                yield from self._of_window(node, key, held.pop(key))
        if isinstance(node, GroupByWindow):
            for key, window in held.items():
                yield from self._of_window(node, key, window)

    def _of_window(self, node: Any, key: int, window: list[Any]) -> Iterator[Any]:
        if isinstance(node, BucketBySequenceLength):
            return iter([_stack(window)])
        dataset = node.make_dataset(FromSource(source=ElementListSource(window)))
        return elements(node.reduce_func(np.int64(key), dataset).plan, seed=self.seed)

    def _drawn(self, node: Sample, epochs: tuple[int, ...], number: int | None) -> Any:
        is_same = node.is_same_in_each_epoch
        path = (*self.outer, number)
        entropy = [2, self.seed & _MASK, len(path), *path, *epochs]
        if node.seed is not None:
            entropy = [6, node.seed & _MASK, *(() if is_same else epochs)]
        elif is_same:
            entropy = [3, node.default_seed & _MASK]

        def chosen(ended: set[int], step: int) -> int | None:
            given = node.weights or (1.0,) * len(node.datasets)
            weights = [0.0 if n in ended else w for n, w in enumerate(given)]
            if not any(weights):
                return None
            word = random_words(derive_key([*entropy, len(ended)]), [step])[0]
            drawn = float(word >> np.uint64(11)) * 2.0**-53
            ends = np.cumsum(weights) / sum(weights)
            return next(n for n, end in enumerate(ends) if drawn < end)

        return chosen

    def _interleaved(self, node: Interleave, outer: Iterator[Any]) -> Iterator[Any]:
        # Nested plans that draw without a seed need the place of the outer element: not here.
        slots: list[Iterator[Any] | None] = [None] * node.cycle_length
        more = True
        current = 0
        while more or any(slot is not None for slot in slots):
            slot = slots[current]
            if slot is None and more:
                for x in itertools.islice(outer, 1):
                    plan = _call(node.fn, x).plan
                    slot = slots[current] = elements(plan, seed=self.seed)
                    break
                else:
                    more = False
            if slot is not None:
                block = list(itertools.islice(slot, node.block_length))
                yield from block
                if len(block) < node.block_length:
                    slots[current] = None
            current = (current + 1) % len(slots)


def _chosen(node: Any, inputs: list[Iterator[Any]], choose: Any) -> Iterator[Any]:
    ended: set[int] = set()
    step = 0
    while len(ended) < len(inputs) and (choice := choose(ended, step)) is not None:
        for x in itertools.islice(inputs[choice], 1):
            yield x
            step += 1
            break
        else:
            if node.stop_on_empty_dataset:
                return
            ended.add(int(choice))


def _read_source(source: Any) -> Iterator[Any]:
    stop = source.size
    reader = source.open(0, stop if stop != INFINITE else INFINITE)
    try:
        while (chunk := reader.read(1)) is not None:
            yield from chunk.rows()
    finally:
        reader.close()


def _call(fn: Any, x: Any) -> Any:
    return fn(*x) if type(x) is tuple else fn(x)


def _stack(batch: list[Any]) -> Any:
    return map_leaves(lambda *leaves: np.stack(leaves), *batch)


def _rows(x: Any) -> Iterator[Any]:
    lengths: list[int] = []
    map_leaves(lambda leaf: lengths.append(len(leaf)), x)
    for position in range(lengths[0]):
        yield map_leaves(lambda leaf, position=position: leaf[position], x)
