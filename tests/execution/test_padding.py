"""`padded_batch`: a batch like any other, but for the shapes of its elements."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError

Dataset = hr.Dataset


def ragged(n):
    return {"x": np.full(int(n) % 4, n), "n": n}


def naively_padded(elements, size, fill=0):
    batches = []
    for first in range(0, len(elements), size):
        part = elements[first : first + size]
        longest = max(len(element["x"]) for element in part)
        batches.append(
            {
                "x": [[*e["x"].tolist(), *[fill] * (longest - len(e["x"]))] for e in part],
                "n": [int(e["n"]) for e in part],
            }
        )
    return batches


def values(dataset):
    return [{key: part.tolist() for key, part in batch.items()} for batch in dataset]


@pytest.mark.parametrize("size", [1, 3, 5, 23, 40])
@pytest.mark.parametrize("drop", [False, True])
def test_batches_are_those_of_nested_loops(size, drop):
    dataset = Dataset.range(23).map(ragged)
    want = naively_padded(list(dataset), size, -1)
    if drop and 23 % size:
        want.pop()
    batches = dataset.padded_batch(size, padding_values=-1, drop_remainder=drop)
    assert values(batches) == want
    assert batches.cardinality() == len(want)


def test_columns_are_taken_as_they_are_and_padded_where_a_length_is_given():
    rows = np.arange(60).reshape(20, 3)
    dataset = Dataset.from_tensor_slices(rows).shuffle(20, seed=1)
    plain = [batch.tolist() for batch in dataset.batch(6)]
    assert [batch.tolist() for batch in dataset.padded_batch(6)] == plain
    assert [batch.tolist() for batch in dataset.padded_batch(6, [3])] == plain
    longer = [batch.tolist() for batch in dataset.padded_batch(6, [4], 7)]
    assert longer == [[[*row, 7] for row in batch] for batch in plain]
    assert not np.shares_memory(next(iter(Dataset.from_tensor_slices(rows).padded_batch(6))), rows)


def test_a_padded_batch_has_a_spec_and_its_functions_are_called_once_for_it():
    calls = []

    def note(n):
        calls.append(int(n))
        return ragged(n)

    dataset = Dataset.range(23).map(note).padded_batch(4, {"x": [9], "n": []}, drop_remainder=True)
    assert dataset.element_spec == {
        "x": hr.ArraySpec((4, 9), np.int64), "n": hr.ArraySpec((4,), np.int64),
    }  # fmt: skip
    assert calls == [0]
    calls.clear()
    assert dataset.map(lambda batch: batch["x"]).element_spec == hr.ArraySpec((None, None), int)
    assert calls == [0]


def test_what_cannot_be_padded_is_named_with_step_and_line_and_costs_a_batch():
    def odd(n):
        return np.zeros(int(n), np.float32 if n == 3 else np.float64)

    dataset = Dataset.range(8).map(odd).padded_batch(2)
    got = []
    with iter(dataset) as iterator:
        while True:
            try:
                got.append(next(iterator).shape)
            except StopIteration:
                break
            except InvalidElementError as error:
                got.append(str(error))
    said = got.pop(1)
    assert "padded_batch (test_padding.py:" in said
    assert "cannot pad: the element: element 0 has dtype float64" in said
    assert got == [(2, 1), (2, 5), (2, 7)]
    with pytest.raises(InvalidElementError, match=r"cannot pad: .*longer than the padded shape"):
        list(Dataset.range(8).map(odd).padded_batch(2, [0]))
    with pytest.raises(InvalidElementError, match=r"padded_batch .* cannot pad: .* 2 axes"):
        list(Dataset.from_tensor_slices(np.zeros((4, 2))).padded_batch(2, [2, 2]))


def test_an_element_that_fails_is_left_out():
    def some(n):
        if n == 2:
            raise KeyError
        return ragged(n)

    batches = []
    with iter(Dataset.range(7).map(some).padded_batch(3)) as iterator:
        with pytest.raises(UserFunctionError, match="element 2"):
            next(iterator)
        batches = [batch["n"].tolist() for batch in iterator]
    assert batches == [[0, 1, 3], [4, 5, 6]]


def test_a_padded_batch_costs_a_call_for_each_of_its_elements():
    calls = []

    def note(n):
        calls.append(int(n))
        return ragged(n)

    with iter(Dataset.range(500).map(note).padded_batch(10)) as iterator:
        next(iterator)
        next(iterator)
    assert calls == list(range(20))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        ({"batch_size": 2, "padded_shapes": ["a"]}, TypeError, "`padded_shapes`"),
        ({"batch_size": 2, "padding_values": object()}, TypeError, "`padding_values`"),
        ({"batch_size": 2, "drop_remainder": 1}, TypeError, "`drop_remainder` must be a bool"),
    ],
)
def test_wrong_arguments_are_named_at_once(arguments, error, said):
    with pytest.raises(error, match=said):
        Dataset.range(3).padded_batch(**arguments)
