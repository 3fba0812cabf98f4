"""What every Source must keep, whatever it reads: one battery for all of them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import cloudpickle
import numpy as np

from headrace.element.structure import flatten
from headrace.plan.source import INFINITE, Reader, Source

LIMITS = (1, 2, 7, 1000)


def read_all(reader: Reader, limit: int = 1000) -> list[Any]:
    """Return all elements of a reader, which is closed."""
    try:
        rows: list[Any] = []
        while (chunk := reader.read(limit)) is not None:
            assert 1 <= chunk.size <= limit
            rows += chunk.rows()
        assert reader.read(limit) is None, "the end stays the end"
        return rows
    finally:
        reader.close()


def same(a: Any, b: Any) -> bool:
    """Tell whether two elements are equal, types and dtypes included."""
    xs, structure = flatten(a)
    ys, other = flatten(b)
    return structure == other and all(
        type(x) is type(y)
        and getattr(x, "dtype", None) == getattr(y, "dtype", None)
        and np.array_equal(x, y)
        for x, y in zip(xs, ys, strict=True)
    )


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert same(a, b), f"element {index}: {a!r} is not {b!r}"


def check_source(source: Source, expected: list[Any]) -> None:
    """Check everything that the contract of a finite source says."""
    assert isinstance(source, Source)
    size = source.size
    assert size != INFINITE
    for limit in LIMITS:
        assert_same(read_all(source.open(0, size), limit), expected)
    check_splits(source, expected)
    for limit in LIMITS[:3]:
        check_positions(source, expected, limit)
    check_pickles(source, expected)
    check_closing(source)
    if source.elements_per_index is not None:
        assert len(expected) == size * source.elements_per_index
    gather = getattr(source, "gather", None)
    if gather is not None and expected:
        check_gather(gather, expected)


def check_splits(source: Source, expected: list[Any]) -> None:
    size = source.size
    for step in {1, 2, max(1, size // 2), size or 1}:
        parts = [
            row
            for start in range(0, size, step)
            for row in read_all(source.open(start, min(start + step, size)), 7)
        ]
        assert_same(parts, expected)
    assert read_all(source.open(size, size)) == []


def check_positions(source: Source, expected: list[Any], limit: int) -> None:
    """Restore a reader at each of its states; the rest must be the same."""
    reader = source.open(0, source.size)
    at = 0
    while True:
        position = reader.get_position()
        assert position == reader.get_position()
        text = json.dumps(position)
        assert len(text) < 200
        restored = source.open(0, source.size, json.loads(text))
        assert restored.get_position() == position, "restoring alone moves nothing"
        assert_same(read_all(restored, 5), expected[at:])
        chunk = reader.read(limit)
        if chunk is None:
            break
        at += chunk.size
    reader.close()
    assert at == len(expected)


def check_pickles(source: Source, expected: list[Any]) -> None:
    copy = pickle.loads(cloudpickle.dumps(source))
    assert copy.size == source.size
    assert copy.element_spec == source.element_spec
    assert_same(read_all(copy.open(0, copy.size)), expected)


def check_closing(source: Source) -> None:
    untouched = source.open(0, source.size)
    untouched.close()
    untouched.close()
    begun = source.open(0, source.size)
    begun.read(1)
    position = begun.get_position()
    begun.close()
    begun.close()
    source.open(0, source.size, position).close()


def check_gather(gather: Any, expected: list[Any]) -> None:
    size = len(expected)
    generator = np.random.default_rng(7)
    many = generator.integers(0, size, (3, 4))
    for indices in (many, many[0], many[:, 0], np.arange(size), np.array([], np.int64)):
        leaves, _ = flatten(gather(indices))
        for leaf in leaves:
            assert leaf.shape[: indices.ndim] == indices.shape
            assert leaf.flags.writeable
            assert leaf.base is None or leaf.base.size == leaf.size
        for place in np.ndindex(indices.shape):
            wanted, _ = flatten(expected[indices[place]])
            for leaf, value in zip(leaves, wanted, strict=True):
                assert np.array_equal(leaf[place], value)
                assert isinstance(value, bytes | str) or leaf.dtype == value.dtype
