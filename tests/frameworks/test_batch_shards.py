"""Row counts of shards: `remainder` selects an error, padding or dropping if they differ."""

from __future__ import annotations

import dataclasses
import doctest
from collections import namedtuple

import numpy as np
import pytest

from headrace.element.structure import flatten
from headrace.errors import InvalidArgumentError
from headrace.frameworks import batch_shards
from headrace.frameworks.batch_shards import (
    add_mask,
    check_remainder,
    make_mask,
    pad_column,
    rows_per_shard,
    shard_row_counts,
)

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Row:
    x: object


def test_equal_row_counts_are_used_with_every_remainder():
    assert [rows_per_shard(r, [3, 3]) for r in ("error", "pad", "drop")] == [3, 3, 3]
    assert [rows_per_shard(r, [0, 0]) for r in ("error", "pad", "drop")] == [0, 0, 0]


@pytest.mark.parametrize("rows", [[3, 3, 1], [1, 0], [0, 2]])
def test_unequal_row_counts_raise_or_are_padded_or_dropped(rows):
    with pytest.raises(InvalidArgumentError, match=rf"have {rows[0]}.* and {rows[-1]} rows"):
        rows_per_shard("error", rows)
    assert rows_per_shard("pad", rows) == max(rows)
    assert rows_per_shard("drop", rows) is None


def test_a_long_list_of_row_counts_is_shortened():
    with pytest.raises(
        InvalidArgumentError, match=r"have 1, 1, 1, 1, 1, 1, 1, 1, \.\.\. and 0 rows"
    ):
        rows_per_shard("error", [1] * 4000 + [0])


def test_padding_fills_up_to_a_full_batch_if_its_size_is_known():
    assert rows_per_shard("pad", [1, 0], size=4) == 4
    assert rows_per_shard("pad", [5, 2], size=4) == 5


def test_an_unknown_remainder_is_rejected():
    for wrong in ("keep", None, 1):
        with pytest.raises(ValueError, match="must be"):
            check_remainder(wrong)


def test_each_leaf_must_have_the_same_rows():
    element = {"x": np.zeros((2, 3)), "y": np.zeros(2)}
    _, structure = flatten(element)
    assert shard_row_counts(structure, [[np.zeros((2, 3))] * 2, [np.zeros(2)] * 2]) == [2, 2]
    with pytest.raises(
        InvalidArgumentError, match=r"\['x'\] has 2 rows, but component \['y'\] has 1"
    ):
        shard_row_counts(structure, [[np.zeros((2, 3))], [np.zeros(1)]])


@pytest.mark.parametrize("scalar", [np.float32(1), b"a", "a"])
def test_a_scalar_raises_and_the_error_refers_to_batch(scalar):
    _, structure = flatten({"x": 0, "step": 0})
    with pytest.raises(InvalidArgumentError, match=r"\['step'\] is a scalar.*`batch`"):
        shard_row_counts(structure, [[np.zeros(2)], [scalar]])


def test_padding_adds_zeros_and_keeps_full_values():
    full, short = np.ones((2, 3), np.float16), np.ones((1, 3), np.float16)
    first, second = pad_column([full, short], 2)
    assert first is full
    assert second.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert second.dtype == np.float16
    (flags,) = pad_column([np.array([True])], 3)
    assert flags.tolist() == [True, False, False]
    (none,) = pad_column([np.zeros((0, 2), np.int32)], 2)
    assert none.tolist() == [[0, 0], [0, 0]]


def test_the_mask_is_true_for_real_rows():
    assert [m.tolist() for m in make_mask([2, 0], 2)] == [[True, True], [False, False]]


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ({"x": 1}, {"x": 1, "mask": "m"}),
        ((1, 2), (1, 2, "m")),
        ((1,), (1, "m")),
        (1, (1, "m")),
        (Pair(1, 2), (Pair(1, 2), "m")),
        (Row(1), (Row(1), "m")),
    ],
)
def test_the_mask_is_added_to_every_kind_of_structure(element, expected):
    leaves, structure = flatten(element)
    assert add_mask(structure, leaves, "m") == expected


def test_an_existing_mask_is_not_overwritten():
    leaves, structure = flatten({"x": 1, "mask": 2})
    with pytest.raises(InvalidArgumentError, match="rename yours with"):
        add_mask(structure, leaves, "m")


def test_docstring_examples_pass():
    result = doctest.testmod(batch_shards)
    assert result.attempted > 2
    assert result.failed == 0
