"""Packing of sequences into rows, and batches of limited cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.build import build_iterator

Dataset = hr.Dataset


def numbered(lengths, **others):
    """Return a dataset of sequences; the tokens of number i are i + 1."""
    elements = [{"tokens": np.full(n, i + 1)} for i, n in enumerate(lengths)]
    for name, sizes in others.items():
        for i, (element, n) in enumerate(zip(elements, sizes, strict=True)):
            element[name] = np.full(n, -i - 1, np.int8)
    return Dataset.from_random_access(elements)


def contents(rows, name="tokens"):
    """Return the sequences of each row: its number and its length."""
    return [
        [
            (int(row[name][ids == segment][0]), int((ids == segment).sum()))
            for ids in [row[f"{name}_segment_ids"]]
            for segment in range(1, ids.max() + 1)
        ]
        for row in rows
    ]


def sequences(rows, name="tokens"):
    return [[number for number, _ in row] for row in contents(rows, name)]


def packed_by_hand(lengths, length, num_bins, best_fit):
    """Return the numbers of the sequences in each row; written for clarity, not speed."""
    bins, rows = [], []

    def free(one):
        return length - sum(lengths[i - 1] for i in one)

    def finish(one):
        bins.remove(one)
        rows.append(one)

    for i, size in enumerate(lengths, 1):
        fitting = [one for one in bins if free(one) >= size]
        if not fitting:
            if len(bins) == num_bins:
                finish(min(bins, key=free))
            fitting = [[]]
            bins.append(fitting[0])
        chosen = min(fitting, key=free) if best_fit else fitting[0]
        chosen.append(i)
        if free(chosen) == 0:
            finish(chosen)
    return rows + bins


def test_a_row_has_values_segment_ids_and_positions():
    (first, second) = numbered([3, 2, 4]).pack_sequences(6)
    assert {name: (v.tolist(), v.dtype) for name, v in first.items()} == {
        "tokens": ([1, 1, 1, 2, 2, 0], np.int64),
        "tokens_segment_ids": ([1, 1, 1, 2, 2, 0], np.int32),
        "tokens_positions": ([0, 1, 2, 0, 1, 0], np.int32),
    }
    assert second["tokens"].tolist() == [3, 3, 3, 3, 0, 0]


def test_the_spec_is_that_of_the_rows():
    for strategy in ("first_fit", "concat_then_split"):
        source = Dataset.from_tensor_slices({"x": np.ones((4, 2), np.float32)})
        dataset = source.pack_sequences(5, strategy)
        row = next(iter(dataset))
        assert {n: (s.shape, s.dtype) for n, s in dataset.element_spec.items()} == {
            n: (v.shape, v.dtype) for n, v in row.items()
        }
    assert dataset.cardinality() == hr.UNKNOWN_CARDINALITY
    assert source.repeat().pack_sequences(5).cardinality() == hr.INFINITE_CARDINALITY


def test_first_fit_takes_the_oldest_row_and_best_fit_the_fullest():
    lengths = [4, 7, 3, 6]
    assert sequences(numbered(lengths).pack_sequences(10, "first_fit")) == [[1, 3], [2], [4]]
    assert sequences(numbered(lengths).pack_sequences(10, "best_fit")) == [[2, 3], [1, 4]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), max_size=80), st.integers(1, 5), st.booleans(), st.integers(1, 9)
)
def test_rows_are_those_of_the_algorithm_written_by_hand(lengths, num_bins, best_fit, limit):
    dataset = numbered(lengths).pack_sequences(
        20, "best_fit" if best_fit else "first_fit", num_bins
    )
    expected = packed_by_hand(lengths, 20, num_bins, best_fit)
    if len(expected) <= 8 * num_bins:  # no row is open for too long
        assert sequences(dataset) == expected
    iterator = build_iterator(dataset.prefetch(3).plan)
    found = []
    while (chunk := iterator.next_chunk(limit)) is not None:
        found += chunk.rows()
    assert sequences(found) == sequences(dataset)
    assert sorted(pair for row in contents(found) for pair in row) == [
        (i, n) for i, n in enumerate(lengths, 1)
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=60), st.booleans())
def test_components_of_a_sequence_have_the_same_segment(sizes, best_fit):
    lengths, others = [n for n, _ in sizes], [n for _, n in sizes]
    dataset = numbered(lengths, labels=others).pack_sequences(
        {"labels": 8, "tokens": 12}, "best_fit" if best_fit else "first_fit", num_bins=3
    )
    found = {"tokens": [], "labels": []}
    for row in dataset:
        assert [len(row["tokens"]), len(row["labels"])] == [12, 8]
        segments = {}
        for name, sign in (("tokens", 1), ("labels", -1)):
            for value, segment in zip(row[name], row[f"{name}_segment_ids"], strict=True):
                if segment:
                    found[name].append(sign * int(value))
                    assert segments.setdefault(int(segment), sign * value) == sign * value
    assert sorted(found["tokens"]) == np.repeat(np.arange(len(sizes)) + 1, lengths).tolist()
    assert sorted(found["labels"]) == np.repeat(np.arange(len(sizes)) + 1, others).tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=40), st.integers(1, 9))
def test_concat_then_split_keeps_all_tokens_in_order_without_padding(lengths, length):
    dataset = numbered(lengths, mask=lengths).pack_sequences(length, "concat_then_split")
    rows = list(dataset)
    assert len(rows) == -(-sum(lengths) // length)
    joined = np.concatenate([row["tokens"] for row in rows]) if rows else np.empty(0)
    expected = np.repeat(np.arange(len(lengths)) + 1, lengths)
    assert joined[: len(expected)].tolist() == expected.tolist()
    assert not joined[len(expected) :].any()
    for row in rows:
        used = int(np.count_nonzero(row["tokens"]))
        assert (row["mask"] == -row["tokens"]).all()
        starts = np.flatnonzero(np.diff(row["tokens"][:used], prepend=0))
        segments = np.searchsorted(starts, np.arange(used), "right")
        assert row["tokens_segment_ids"][:used].tolist() == segments.tolist()
        assert (row["tokens_positions"][:used] == np.arange(used) - starts[segments - 1]).all()


def test_rows_batch_into_arrays_of_their_own():
    dataset = numbered([3, 4, 5] * 20).pack_sequences(8, num_bins=2)
    rows, batches = list(dataset), list(dataset.batch(4))
    assert (np.concatenate([b["tokens"] for b in batches]) == [r["tokens"] for r in rows]).all()
    rows[0]["tokens_segment_ids"][:] = -1
    assert next(iter(dataset))["tokens_segment_ids"].tolist() != [-1] * 8


def test_more_bins_leave_less_padding():
    lengths = np.clip(np.random.default_rng(3).lognormal(3, 1, 800).astype(int), 1, 128)
    used = [len(list(numbered(lengths).pack_sequences(128, num_bins=n))) for n in (1, 4, 32)]
    assert used[0] > used[1] > used[2] <= 1.02 * sum(lengths) / 128


def test_a_row_is_not_open_for_ever():
    found = sequences(numbered([3, *[8] * 60]).pack_sequences(10, num_bins=2))
    assert found.index([1]) == 16
    with iter(numbered([3, *[8] * 1000]).pack_sequences(10, num_bins=2)) as iterator:
        list(zip(range(900), iterator, strict=False))
        state = iterator.get_state()["position"]["stream"]
    assert state["num_read"] < 400


# --- errors ---------------------------------------------------------------------------------------


def outcomes(dataset):
    """Return tokens and error messages in order."""
    found = []
    with iter(dataset) as iterator:
        while True:
            try:
                found.append(next(iterator)["tokens"].tolist())
            except StopIteration:
                return found
            except (InvalidElementError, UserFunctionError) as error:
                found.append(str(error))


def test_a_sequence_that_is_too_long_fails_in_its_turn():
    failure, *rows = outcomes(numbered([3, 7, 1, 4]).pack_sequences(4, num_bins=1))
    assert rows == [[1, 1, 1, 3], [4, 4, 4, 4]]
    assert failure.startswith("element 1 of pack_sequences (test_packing.py:")
    assert "component ['tokens'] has 7 tokens, but a row has 4; increase `length`" in failure


@pytest.mark.parametrize("strategy", ["first_fit", "concat_then_split"])
@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"tokens": np.ones((2, 2), int)}, r"\['tokens'\] is an array of shape \(2, 2\)"),
        ((np.arange(2), np.arange(2)), "or dicts of them, but the element is of type tuple"),
        ({"tokens": np.int64(3)}, r"\['tokens'\] is of type int64"),
        ({"tokens": "abc"}, r"\['tokens'\] is of type str"),
        ({"tokens": np.ones(2)}, "tokens: float64, but an element before it has tokens: int64"),
        ({"x": np.ones(2, int)}, "has x: int64, but an element before it has tokens: int64"),
    ],
)
def test_other_elements_fail_in_their_turn(strategy, element, message):
    good = {"tokens": np.array([1, 2])}
    dataset = Dataset.from_generator(lambda: iter([good, element, good]))
    failure, row = outcomes(dataset.pack_sequences(5, strategy))
    assert row == [1, 2, 1, 2, 0]
    with pytest.raises(InvalidElementError, match=message):
        raise InvalidElementError(failure)


@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "concat_then_split"])
def test_order_of_components_is_that_of_a_rows_first_sequence_after_restores(strategy):
    def components(n):
        pair = {"a": np.full(3, n), "b": np.full(3, -n)}
        return pair if n % 3 == 0 else dict(reversed(pair.items()))

    def rows():
        return iter(Dataset.range(9).map(components).pack_sequences(7, strategy))

    with rows() as iterator:
        orders, states = [], [iterator.get_state()]
        for row in iterator:
            orders.append(next(iter(row)))
            states.append(iterator.get_state())
    assert set(orders) == {"a", "b"}
    for position, state in enumerate(states):
        with rows() as iterator:
            iterator.set_state(state)
            assert [next(iter(row)) for row in iterator] == orders[position:]


def test_components_must_fit_the_lengths():
    lengths = {"tokens": 4, "mask": 4}
    (failure,) = outcomes(numbered([3]).pack_sequences(lengths))
    assert "has the components ['tokens'], but `length` has ['mask', 'tokens']" in failure
    (failure,) = outcomes(numbered([3], mask=[2]).pack_sequences(4, "concat_then_split"))
    assert (
        "all components must have the same length to be split, but have tokens: 3, mas" in failure
    )
    (failure,) = outcomes(numbered([3], tokens_positions=[2]).pack_sequences(4))
    assert "['tokens_positions'] has the name of a component that packing adds" in failure


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "`length` must be at least 1, but got 0"),
        ((2.5,), TypeError, "`length` must be an integer, but got 2.5"),
        (({},), ValueError, "`length` must have a length for each component"),
        (({"x": 0},), ValueError, r"`length\['x'\]` must be at least 1"),
        (({1: 3},), TypeError, "names of components as keys, but got 1"),
        ((4, "worst_fit"), ValueError, "`strategy` must be 'first_fit', .* got 'worst_fit'"),
        ((4, "best_fit", 0), ValueError, "`num_bins` must be at least 1, but got 0"),
        ((4, "concat_then_split", 3), ValueError, "`num_bins` applies to first_fit and best_fit"),
        (({"x": 3}, "concat_then_split"), TypeError, "`length` must be an int with"),
    ],
)
def test_wrong_arguments_of_packing_fail_at_the_call(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.range(3).pack_sequences(*arguments)


# --- batches of limited cost ----------------------------------------------------------------------


def ragged(lengths):
    return Dataset.from_random_access([np.full(n, i + 1) for i, n in enumerate(lengths)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=50), st.booleans(), st.booleans())
def test_a_batch_ends_before_its_cost_exceeds_the_limit(lengths, count_padding, drop_remainder):
    groups = [[]]
    for n in lengths:
        group = [*groups[-1], n]
        cost = max(group) * len(group) if count_padding else sum(group)
        if cost > 12:
            groups.append([n])
        else:
            groups[-1] = group
            if cost == 12:
                groups.append([])
    if not groups[-1] or drop_remainder:
        groups.pop()
    batches = list(
        ragged(lengths).batch_by_cost(
            12, len, drop_remainder=drop_remainder, count_padding=count_padding
        )
    )
    assert [b.shape for b in batches] == [(len(g), max(g)) for g in groups]
    numbers = np.concatenate([np.empty(0, int), *[b[b > 0] for b in batches]])
    count = sum(map(len, groups))
    assert numbers.tolist() == np.repeat(np.arange(count) + 1, lengths[:count]).tolist()


def test_batches_by_cost_are_padded_as_by_padded_batch():
    dataset = ragged([1, 3]).batch_by_cost(9, len, padded_shapes=[5], padding_values=-1)
    assert next(iter(dataset)).tolist() == [[1, -1, -1, -1, -1], [2, 2, 2, -1, -1]]
    assert dataset.element_spec == hr.ArraySpec((None, 5), np.int64)
    pairs = Dataset.range(4).map(lambda n: (n, n + 1)).batch_by_cost(3, lambda a, b: b / 2)
    assert [a.tolist() for a, _ in pairs] == [[0, 1, 2], [3]]


def test_an_element_that_exceeds_the_limit_fails_in_its_turn():
    with iter(ragged([3, 7, 2]).batch_by_cost(6, len)) as iterator:
        with pytest.raises(
            InvalidElementError,
            match=r"element 1 of batch_by_cost \(test_packing.py:.*alone has cost 7, which exceeds "
            r"max_cost=6; increase",
        ):
            next(iterator)
        assert [batch[:, 0].tolist() for batch in iterator] == [[1, 3]]


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda x: -1, "at least 0, but got -1"),
        (lambda x: float("nan"), "at least 0, but got nan"),
        (lambda x: None, "must return a number, but returned NoneType"),
        (lambda x: True, "must return a number, but returned bool"),
        (lambda x: 1 // 0, "raised ZeroDivisionError for element 0"),
    ],
)
def test_a_wrong_cost_fails(cost, message):
    with pytest.raises((InvalidElementError, UserFunctionError), match=message):
        next(iter(ragged([3]).batch_by_cost(6, cost)))


def test_the_number_of_components_is_no_length():
    dataset = numbered([3, 4])
    message = r"length of a dict is its number of components; use lambda x: len\(x\['tokens'\]\)"
    with pytest.raises(InvalidElementError, match=f"`cost_fn` is len.*{message}"):
        next(iter(dataset.batch_by_cost(6, len)))
    buckets = dataset.bucket_by_sequence_length(len, [4], [2, 2])
    with pytest.raises(InvalidElementError, match=f"`element_length_func` is len.*{message}"):
        next(iter(buckets))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, len), ValueError, "`max_cost` must be positive and finite, but got 0"),
        ((float("inf"), len), ValueError, "`max_cost` must be positive and finite"),
        (("3", len), TypeError, "`max_cost` must be a number, but got '3'"),
        ((3, 4), TypeError, "`cost_fn`"),
    ],
)
def test_wrong_arguments_of_batch_by_cost_fail_at_the_call(arguments, error, message):
    with pytest.raises(error, match=message):
        Dataset.range(3).batch_by_cost(*arguments)


def test_the_cost_function_is_called_only_for_requested_batches():
    called = []

    def cost(x):
        called.append(int(x))
        return 1

    with iter(Dataset.range(100).batch_by_cost(3, cost)) as iterator:
        next(iterator)
        assert called == [0, 1, 2]
        next(iterator)
        assert called == list(range(6))
