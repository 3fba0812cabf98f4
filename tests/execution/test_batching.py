"""Batches and padded batches: errors among their elements, and shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.context import Context
from headrace.execution.iterator import make_iterator
from headrace.plan.batching import Batch

from .contract import ListIterator, assert_keeps_contract, copied, with_input

# --- Batches that an error interrupts: it is raised once, whichever state is restored -------------

Dataset = hr.Dataset
CONTEXT = Context(seed=11, build=lambda plan, context: None)


def fails_in_fours(x):
    if x % 4 in (1, 2):
        raise ValueError(int(x))
    return x


def outcomes(iterator, limit=1):
    """Return lists of numbers, and the names of errors where they were raised."""
    found = []
    while True:
        try:
            chunk = iterator.next_chunk(limit)
        except Exception as error:
            found.append(type(error).__name__)
            continue
        if chunk is None:
            return found
        found += [np.asarray(row).tolist() for row in chunk.rows()]


def test_an_error_within_a_batch_is_not_raised_again_after_a_restore():
    plan = Dataset.range(9).map(fails_in_fours).batch(3).plan
    whole = build_iterator(plan, seed=1)
    failed = "UserFunctionError"
    for _ in range(2):
        with pytest.raises(hr.errors.UserFunctionError):
            whole.next_chunk(1)
    state = copied(whole.get_state())
    assert state == {"failed": [[1, 3]], "input": 0}
    again = build_iterator(plan, seed=1)
    again.set_state(state)
    assert again.get_state() == state
    assert outcomes(again) == outcomes(whole) == [[0, 3, 4], failed, failed, [7, 8]]
    assert again.get_state() == whole.get_state() == {"failed": [], "input": 9}


def test_small_batches_of_buffered_rows_are_returned_in_one_chunk():
    plan = Dataset.range(40).map(lambda x: np.full(2, int(x))).batch(3).plan
    iterator, one_by_one = build_iterator(plan, seed=1), build_iterator(plan, seed=1)
    sizes, at = [], 0
    while (chunk := iterator.next_chunk(5)) is not None:
        sizes.append(chunk.size)
        for index, row in enumerate(chunk.rows()):
            assert copied(chunk.state_at(index)) == copied(one_by_one.get_state())
            (alone,) = one_by_one.next_chunk(1).rows()
            assert row.tolist() == alone.tolist()
            assert index == 0 or not np.shares_memory(row, chunk.rows()[0])
            at += 1
        assert copied(chunk.state_at(chunk.size)) == copied(one_by_one.get_state())
    assert at == 14
    assert max(sizes) == 5


def test_large_batches_of_rows_are_returned_one_per_chunk():
    plan = Dataset.range(40).map(lambda x: np.zeros(1 << 15)).batch(2).plan
    assert build_iterator(plan, seed=1).next_chunk(5).size == 1


def test_the_error_of_a_batch_is_raised_after_the_batches_before_it():
    plan = Dataset.range(12).map(lambda x: np.zeros(1 + (x == 7))).batch(2).plan
    found = outcomes(build_iterator(plan, seed=1), limit=6)
    assert found == outcomes(build_iterator(plan, seed=1)) == [
        *[[[0.0], [0.0]]] * 3, "InvalidElementError", *[[[0.0], [0.0]]] * 2,
    ]  # fmt: skip


def test_a_batch_that_exceeds_memory_is_skipped_like_any_failed_batch():
    # Two rows of nothing, which are padded to 140 TB.
    shapes = {6: (0, 1 << 23), 7: (1 << 23, 0)}
    plan = Dataset.range(12).map(lambda x: np.zeros(shapes.get(int(x), (1, 1)), np.int8))
    iterator = build_iterator(plan.padded_batch(2).plan, seed=1)
    found = [len(iterator.next_chunk(6))]
    with pytest.raises(MemoryError):
        iterator.next_chunk(6)
    while (chunk := iterator.next_chunk(6)) is not None:
        found.append(len(chunk))
    assert found == [3, 2]


def test_an_error_between_batches_belongs_to_neither():
    plan = Dataset.range(4).map(fails_in_fours).batch(1).plan
    iterator = build_iterator(plan, seed=1)
    iterator.next_chunk(5)
    with pytest.raises(hr.errors.UserFunctionError):
        iterator.next_chunk(5)
    assert iterator.get_state() == {"failed": [], "input": 2}


def test_the_state_after_a_batch_is_after_an_error_of_its_last_element():
    plan = Dataset.range(2).map(fails_in_fours).batch(3).plan
    iterator = build_iterator(plan, seed=1)
    with pytest.raises(hr.errors.UserFunctionError):
        iterator.next_chunk(1)
    chunk = iterator.next_chunk(1)
    assert chunk.state_at(0) == {"failed": [[1, 2]], "input": 0}
    assert chunk.state_at(1) == iterator.get_state() == {"failed": [], "input": 2}


def test_after_a_restore_new_errors_are_raised_and_recovered_elements_batched():
    ill = {1}

    def fails(x):
        if int(x) in ill:
            raise ValueError(int(x))
        return x

    plan = Dataset.range(6).map(fails).batch(3).plan
    iterator = build_iterator(plan, seed=1)
    with pytest.raises(hr.errors.UserFunctionError):
        iterator.next_chunk(1)
    state = iterator.get_state()
    ill.clear()
    ill.add(4)
    iterator.set_state(state)
    assert outcomes(iterator) == [[0, 1, 2], "UserFunctionError", [3, 5]]


@pytest.mark.parametrize("limit", [1, 7])
def test_unbatched_rows_continue_from_any_state_after_errors(limit):
    for seed in range(30):
        plan = Dataset.range(30).map(fails_in_fours).batch(3).unbatch().plan
        assert_keeps_contract(
            lambda plan=plan: build_iterator(plan, seed=7), seed, restores=6, largest=limit
        )


ENTRY = st.integers(0, 9).map(np.int64) | st.builds(KeyError)


@given(
    entries=st.lists(ENTRY, max_size=30),
    size=st.integers(1, 5),
    drop=st.booleans(),
    free=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_batches_of_arbitrary_outcomes_keep_the_contract(entries, size, drop, free, seed):
    def make():
        node = Batch(input=Dataset.range(1).plan, size=size, drop_remainder=drop)
        input_ = ListIterator(entries, reads_ahead_freely=free)
        return make_iterator(node, with_input(node, input_, CONTEXT))

    found = assert_keeps_contract(make, seed)
    good = [entry for entry in entries if not isinstance(entry, KeyError)]
    assert found.count("KeyError") == len(entries) - len(good)
    assert len(found) - found.count("KeyError") == (
        len(good) // size if drop else -(-len(good) // size)
    )


# --- `padded_batch`: differs from `batch` in the shapes of its elements ---------------------------


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
def test_padded_batches_equal_those_of_nested_loops(size, drop):
    dataset = Dataset.range(23).map(ragged)
    want = naively_padded(list(dataset), size, -1)
    if drop and 23 % size:
        want.pop()
    batches = dataset.padded_batch(size, padding_values=-1, drop_remainder=drop)
    assert values(batches) == want
    assert batches.cardinality() == len(want)


def test_columns_are_reshaped_and_padded_only_if_a_length_is_given():
    rows = np.arange(60).reshape(20, 3)
    dataset = Dataset.from_tensor_slices(rows).shuffle(20, seed=1)
    plain = [batch.tolist() for batch in dataset.batch(6)]
    assert [batch.tolist() for batch in dataset.padded_batch(6)] == plain
    assert [batch.tolist() for batch in dataset.padded_batch(6, [3])] == plain
    longer = [batch.tolist() for batch in dataset.padded_batch(6, [4], 7)]
    assert longer == [[[*row, 7] for row in batch] for batch in plain]
    assert not np.shares_memory(next(iter(Dataset.from_tensor_slices(rows).padded_batch(6))), rows)


def test_the_spec_of_a_padded_batch_costs_one_call_per_function():
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


def test_a_padding_error_names_step_and_line_and_drops_one_batch():
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
    message = got.pop(1)
    assert "padded_batch (test_batching.py:" in message
    assert "cannot pad: the element: element 0 has dtype float64" in message
    assert got == [(2, 1), (2, 5), (2, 7)]
    with pytest.raises(InvalidElementError, match=r"cannot pad: .*exceeds the padded shape"):
        list(Dataset.range(8).map(odd).padded_batch(2, [0]))
    with pytest.raises(InvalidElementError, match=r"padded_batch .* cannot pad: .* 2 axes"):
        list(Dataset.from_tensor_slices(np.zeros((4, 2))).padded_batch(2, [2, 2]))


def test_a_failing_element_is_missing_in_its_batch():
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


def test_a_padded_batch_calls_the_function_once_per_element():
    calls = []

    def note(n):
        calls.append(int(n))
        return ragged(n)

    with iter(Dataset.range(500).map(note).padded_batch(10)) as iterator:
        next(iterator)
        next(iterator)
    assert calls == list(range(20))


def test_an_int_is_a_padded_shape_of_one_axis():
    ragged_rows = Dataset.range(1, 3).map(lambda n: np.ones(n))
    (batch,) = ragged_rows.padded_batch(2, padded_shapes=3)
    assert batch.tolist() == [[1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        ({"batch_size": 2, "padded_shapes": ["a"]}, TypeError, "`padded_shapes`"),
        ({"batch_size": 2, "padding_values": object()}, TypeError, "`padding_values`"),
        ({"batch_size": 2, "drop_remainder": 1}, TypeError, "`drop_remainder` must be a bool"),
    ],
)
def test_wrong_arguments_are_rejected_immediately(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.range(3).padded_batch(**arguments)
