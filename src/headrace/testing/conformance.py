"""Conformance checks of the Source contract, for all implementations."""

from __future__ import annotations

import json
import pickle
from typing import Any

import cloudpickle
import numpy as np

from headrace.element.structure import flatten
from headrace.plan.source import INFINITE, IndexedSource, Reader, Source

__all__ = ["are_equal", "assert_equal", "check_source", "read_all"]

_LIMITS = (1, 2, 7, 1000)
_MAX_POSITION_BYTES = 200


def check_source(source: Source, expected: list[Any]) -> None:
    """Check the contract of a finite source (`headrace.Source`).

    It checks equal elements at every limit, split at any index and restored at any position;
    memory ownership of the reader; pickling; closing; `gather` if present; and that the source's
    description of itself is correct.

    >>> class Squares(hr.IndexedSource):
    ...     size = 4
    ...
    ...     def gather(self, indices):
    ...         return indices**2
    >>> hr.testing.check_source(Squares(), [np.int64(n) for n in (0, 1, 4, 9)])

    Args:
        source: Source to check. It is read many times, and must yield the same elements each time.
        expected: All of its elements, in order.

    Raises:
        AssertionError: If a rule is violated; the message names it.
    """
    _require(isinstance(source, Source), f"{type(source).__name__} does not derive from Source")
    _require(source.size != INFINITE, "an infinite source cannot be checked; limit its size")
    for limit in _LIMITS:
        assert_equal(read_all(source.open(0, source.size), limit), expected)
    _check_description(source, expected)
    _check_splits(source, expected)
    for limit in _LIMITS[:3]:
        _check_positions(source, expected, limit)
    _check_ownership(source, expected)
    _check_pickles(source, expected)
    _check_closing(source)
    if isinstance(source, IndexedSource) and expected:
        _check_gather(source, expected)


def read_all(reader: Reader, limit: int = 1000) -> list[Any]:
    """Return all elements of a reader, and close it."""
    try:
        rows: list[Any] = []
        while (chunk := reader.read(limit)) is not None:
            _require(1 <= chunk.size <= limit, f"read({limit}) returned {chunk.size} elements")
            rows += chunk.rows()
        _require(reader.read(limit) is None, "read() returned an element after the end")
        return rows
    finally:
        reader.close()


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two elements are equal, including types and dtypes."""
    xs, structure = flatten(a)
    ys, other = flatten(b)
    return structure == other and all(
        type(x) is type(y)
        and getattr(x, "dtype", None) == getattr(y, "dtype", None)
        and np.array_equal(x, y)
        for x, y in zip(xs, ys, strict=True)
    )


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Check that two lists hold the same elements.

    Raises:
        AssertionError: If they differ; the message names the first difference.
    """
    for index, (a, b) in enumerate(zip(found, expected, strict=False)):
        _require(are_equal(a, b), f"element {index} is {a!r}, but expected {b!r}")
    _require(
        len(found) == len(expected), f"found {len(found)} elements, but expected {len(expected)}"
    )


def _require(condition: bool, message: str) -> None:
    # Not an assert statement, which `python -O` removes.
    if not condition:
        raise AssertionError(message)


def _check_description(source: Source, expected: list[Any]) -> None:
    """Check that a source's description of itself matches its elements."""
    each = source.elements_per_index
    if each is not None:
        _require(
            len(expected) == source.size * each,
            f"{source.size} indices of {each} elements each do not give {len(expected)} elements",
        )
    count = source.element_count
    _require(
        count in (None, len(expected)), f"element_count is {count}, but expected {len(expected)}"
    )
    holds, names = source.index_kind, source.paths
    _require(holds in ("element", "file", "part"), f"index_kind is {holds!r}")
    if holds == "element":
        _require(each == 1, f'index_kind is "element", but elements_per_index is {each}')
    if holds == "file":
        _require(
            len(names) == source.size and all(type(name) is str for name in names),
            f'index_kind is "file" with {source.size} indices, but paths is {names!r}',
        )
    else:
        _require(names == (), f'index_kind is not "file", but paths is {names!r}')
    if source.runs_user_code and len(expected) > 1:
        reader = source.open(0, source.size)
        chunk = reader.read(len(expected) - 1)
        reader.close()
        _require(
            chunk is not None and chunk.size == len(expected) - 1,
            "runs_user_code is true, so read(n) must return n elements",
        )


def _check_splits(source: Source, expected: list[Any]) -> None:
    """Check that index ranges together hold the same elements as the whole."""
    size = source.size
    for step in {1, 2, max(1, size // 2), size or 1}:
        parts = [
            row
            for start in range(0, size, step)
            for row in read_all(source.open(start, min(start + step, size)), 7)
        ]
        assert_equal(parts, expected)
    _require(read_all(source.open(size, size)) == [], "an empty index range has elements")
    source.open(0, size, pass_number=(0, 3)).close()


def _check_positions(source: Source, expected: list[Any], limit: int) -> None:
    """Restore a reader at each of its states; the remaining elements must be the same."""
    reader = source.open(0, source.size)
    num_read = 0
    while True:
        position = reader.get_position()
        _require(position == reader.get_position(), "get_position() changed the position")
        text = json.dumps(position)
        _require(
            len(text) < _MAX_POSITION_BYTES,
            f"the position {text:.80}... is too long",
        )
        restored = source.open(0, source.size, json.loads(text))
        _require(restored.get_position() == position, "opening at a position changed the position")
        assert_equal(read_all(restored, 5), expected[num_read:])
        chunk = reader.read(limit)
        if chunk is None:
            break
        num_read += chunk.size
    reader.close()
    _require(num_read == len(expected), f"found {num_read} elements, but expected {len(expected)}")


def _check_ownership(source: Source, expected: list[Any]) -> None:
    """Write into all elements that were read; no other element may change."""
    originals = [_arrays_of(row) for row in expected]
    rows = read_all(source.open(0, source.size))
    for index, row in enumerate(rows):
        found = [array.copy() for array in _arrays_of(row)]
        _require(
            all(map(np.array_equal, found, originals[index])),
            f"writing into an earlier element changed element {index}",
        )
        for array in _arrays_of(row):
            _require(array.flags.writeable, f"an array of element {index} is read-only")
            array[...] = np.zeros((), array.dtype)
    assert_equal(read_all(source.open(0, source.size)), expected)


def _arrays_of(element: Any) -> list[Any]:
    return [leaf for leaf in flatten(element)[0] if isinstance(leaf, np.ndarray)]


def _check_pickles(source: Source, expected: list[Any]) -> None:
    copy = pickle.loads(cloudpickle.dumps(source))
    _require(copy.size == source.size, "the unpickled source has a different size")
    _require(
        copy.element_spec == source.element_spec,
        "the unpickled source has a different element_spec",
    )
    assert_equal(read_all(copy.open(0, copy.size)), expected)


def _check_closing(source: Source) -> None:
    untouched = source.open(0, source.size)
    untouched.close()
    untouched.close()
    partly_read = source.open(0, source.size)
    partly_read.read(1)
    position = partly_read.get_position()
    partly_read.close()
    partly_read.close()
    source.open(0, source.size, position).close()


def _check_gather(source: IndexedSource, expected: list[Any]) -> None:
    """Gather with index arrays of several shapes; check that the result is fresh and correct."""
    size = len(expected)
    index_grid = np.random.default_rng(7).integers(0, size, (3, 4))
    for indices in (
        index_grid,
        index_grid[0],
        index_grid[:, 0],
        np.arange(size),
        np.array([], np.int64),
    ):
        leaves, _ = flatten(source.gather(indices))
        second, _ = flatten(source.gather(indices))
        for leaf, other in zip(leaves, second, strict=True):
            _require(
                leaf.shape[: indices.ndim] == indices.shape,
                f"gather of indices of shape {indices.shape} returned shape {leaf.shape}",
            )
            _require(leaf.flags.writeable, "gather returned a read-only array")
            _require(not np.shares_memory(leaf, indices), "gather returned its argument")
            _require(not np.shares_memory(leaf, other), "two gathers returned the same memory")
        for position in np.ndindex(indices.shape):
            expected_leaves, _ = flatten(expected[indices[position]])
            for leaf, value in zip(leaves, expected_leaves, strict=True):
                found = leaf[position]
                _require(
                    bool(np.array_equal(found, value)),
                    f"gather returned {found!r} for index {indices[position]}, "
                    f"but expected {value!r}",
                )
                _require(
                    isinstance(value, bytes | str) or leaf.dtype == value.dtype,
                    f"gather returned dtype {leaf.dtype} for index {indices[position]}",
                )
