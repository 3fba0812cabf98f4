"""An element that was yielded belongs to its consumer, whatever pipeline it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.structure import flatten, unflatten

Dataset = hr.Dataset

TABLE = np.arange(40.0).reshape(10, 4)
NESTED = {"x": np.arange(6).reshape(3, 2), "y": (np.zeros((3, 1)), ["a", "b", "c"])}
BUFFER = np.zeros(4)


def into_buffer(x: Any) -> Any:
    return np.add(x, 1, out=BUFFER)


def running(total: Any, x: Any) -> Any:
    total += x
    return total, {"total": total, "row": x}


def reusing() -> Any:
    for index in range(10):
        BUFFER[:] = index
        yield {"x": BUFFER, "i": index}


PIPELINES: dict[str, Callable[[], Any]] = {
    "slices": lambda: Dataset.from_tensor_slices(NESTED),
    "slices in a loop": lambda: Dataset.from_tensor_slices(TABLE).repeat(2),
    "tensors": lambda: Dataset.from_tensors(NESTED).repeat(3),
    "tensors unbatched": lambda: Dataset.from_tensors(NESTED).unbatch(),
    "tensors unbatched and batched": lambda: Dataset.from_tensors(NESTED).unbatch().batch(2),
    "one batch": lambda: Dataset.from_tensor_slices(TABLE).batch(10),
    "nested": lambda: Dataset.range(3).flat_map(lambda _: Dataset.from_tensor_slices(TABLE)),
    "nested batches": lambda: Dataset.range(2).flat_map(
        lambda _: Dataset.from_tensor_slices(TABLE).batch(3)
    ),
    "nested tensors": lambda: Dataset.range(3).interleave(
        lambda _: Dataset.from_tensors(TABLE), cycle_length=2
    ),
    "generator": lambda: Dataset.from_generator(reusing),
    "generator, shuffled": lambda: Dataset.from_generator(reusing).shuffle(4, 1, False),
    "map into a buffer": lambda: Dataset.from_tensor_slices(TABLE).map(into_buffer),
    "map of a table": lambda: Dataset.range(10).map(lambda i: TABLE[int(i)]),
    "map to its input": lambda: Dataset.from_tensor_slices(TABLE).map(lambda x: x),
    "map to its input, twice": lambda: Dataset.from_tensor_slices(TABLE).map(lambda x: (x, x)),
    "map to views": lambda: Dataset.from_tensor_slices(TABLE).map(
        lambda x: {"a": x[1:], "b": x[:2]}
    ),
    "arithmetic, twice": lambda: Dataset.range(10).map(lambda x: (x, x + 1, x)).batch(4),
    "parallel": lambda: Dataset.from_tensor_slices(TABLE).map(lambda x: (x, x), 2),
    "scanned": lambda: Dataset.from_tensor_slices(TABLE).scan(np.zeros(4), running),
    "scanned, its own state": lambda: Dataset.range(6).scan(BUFFER, lambda s, x: (s, (s, s))),
    "padded": lambda: Dataset.from_tensor_slices(TABLE).padded_batch(3),
    "padded rows": lambda: (
        Dataset.range(10).map(lambda i: TABLE[int(i)][: int(i) % 4]).padded_batch(3)
    ),
    "windows": lambda: Dataset.from_tensor_slices(TABLE).group_by_window(
        lambda x: int(x[0]) % 8, lambda key, window: window.repeat(2), window_size=3
    ),
    "windows of a buffer": lambda: Dataset.from_generator(reusing).group_by_window(
        lambda x: x["i"] % 2, lambda key, window: window.cache(), window_size=3
    ),
    "buckets of single rows": lambda: Dataset.from_tensor_slices(TABLE).bucket_by_sequence_length(
        len, [2], [1, 1], no_padding=True
    ),
    "sampled": lambda: Dataset.sample_from_datasets(
        [Dataset.from_tensor_slices(TABLE), Dataset.from_tensors(TABLE[0]).repeat(5)], seed=1
    ),
    "chosen": lambda: Dataset.choose_from_datasets(
        [Dataset.from_generator(reusing), Dataset.from_generator(reusing)],
        Dataset.range(2).repeat(9),
    ),
    "random": lambda: Dataset.random(seed=1).take(9).batch(4),
    "cached": lambda: Dataset.from_tensor_slices(TABLE).cache().repeat(2),
    "zipped": lambda: Dataset.zip(
        Dataset.from_tensor_slices(TABLE), Dataset.from_tensors(TABLE).repeat(4)
    ),
}


def copy_of(element: Any) -> Any:
    leaves, structure = flatten(element)
    return unflatten(
        structure, [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    )


def assert_equal(found: Any, expected: Any) -> None:
    for a, b in zip(flatten(found)[0], flatten(expected)[0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_writes_to_an_element_are_not_visible_elsewhere(name: str) -> None:
    before = copy_of(NESTED["x"]), TABLE.copy()
    dataset = PIPELINES[name]()
    expected = [copy_of(element) for element in dataset]

    held = []
    for element, wanted in zip(dataset, expected, strict=True):
        assert_equal(element, wanted)
        for leaf in flatten(element)[0]:
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "if":
                kept = [other for other in flatten(element)[0] if other is not leaf]
                values = [np.array(other) for other in kept]
                leaf -= 100
                assert_equal(tuple(kept), tuple(values))
        held.append((element, copy_of(element)))
    for element, after in held:
        assert_equal(element, after)
    for element, wanted in zip(dataset, expected, strict=True):
        assert_equal(element, wanted)
    assert np.array_equal(NESTED["x"], before[0])
    assert np.array_equal(TABLE, before[1])
