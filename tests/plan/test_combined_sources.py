"""Sources end to end: any indices give what the members give, in fresh memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.combined_sources import ConcatenatedSource, concatenate_sources
from headrace.sources.memory import RangeSource, SlicesSource
from headrace.testing import check_source


def source():
    parts = [{"a": np.arange(n) * 10 + n, "b": np.full((n, 2), float(n))} for n in (3, 0, 4)]
    one, two, three = map(SlicesSource, parts)
    joined = {key: np.concatenate([part[key] for part in parts]) for key in "ab"}
    return concatenate_sources(concatenate_sources(one, two), three), joined


@given(indices=st.lists(st.integers(0, 6), max_size=12), columns=st.sampled_from([0, 1, 2]))
def test_any_indices_give_the_rows_of_the_joined_arrays(indices, columns):
    joined, arrays = source()
    asked = np.array(indices, np.int64)
    if columns:
        asked = asked[: len(asked) // columns * columns].reshape(-1, columns)
    found = joined.gather(asked)
    assert list(found) == ["a", "b"]
    for key, leaf in found.items():
        assert leaf.dtype == arrays[key].dtype
        assert np.array_equal(leaf, arrays[key][asked])
        assert not np.shares_memory(leaf, arrays[key])


def test_nested_joins_are_flattened():
    numbers = [RangeSource(0, n) for n in (2, 3, 4)]
    left = concatenate_sources(concatenate_sources(numbers[0], numbers[1]), numbers[2])
    right = concatenate_sources(numbers[0], concatenate_sources(numbers[1], numbers[2]))
    for joined in (left, right):
        assert isinstance(joined, ConcatenatedSource)
        assert joined.members == tuple(numbers)
        assert joined.ends == (2, 5, 9)
        assert joined.size == 9
        assert joined.gather(np.arange(9)).tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3]


def test_joined_bytes_keep_the_source_contract():
    texts = concatenate_sources(SlicesSource([b"x", b"longer"]), SlicesSource([b"yy"]))
    assert texts.gather(np.array([2, 1, 0])).tolist() == [b"yy", b"longer", b"x"]
    joined, arrays = source()
    check_source(joined, [{key: arrays[key][row] for key in "ab"} for row in range(7)])


@pytest.mark.parametrize("index", [0, 4, 6])
def test_one_index_gives_one_row(index):
    joined, arrays = source()
    assert joined.gather(np.array(index))["a"] == arrays["a"][index]


@pytest.mark.parametrize("indices", [[0, 1], [1, 2, 3, 4], [6, 0], []])
def test_borrowed_rows_equal_gathered_rows_and_are_not_copied_within_a_member(indices):
    arrays = [np.arange(n * 5000.0).reshape(n, 5000) for n in (3, 4)]
    joined = concatenate_sources(*map(SlicesSource, arrays))
    lent = joined.gather_borrowed(np.array(indices, np.int64))
    assert np.array_equal(lent, joined.gather(np.array(indices, np.int64)))
    assert np.shares_memory(lent, arrays[0]) == (indices == [0, 1])
    assert np.shares_memory(joined.gather_run_borrowed(4, 6), arrays[1])
