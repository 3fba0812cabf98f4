"""Windows and buckets: elements collected by key."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.replayable_input import ReplayableInput
from tests.execution.contract import outcomes

from .contract import ListIterator

Dataset = hr.Dataset


def windows_of(elements, key_of, size_of):
    """Return windows (key and elements) as plain Python collects them."""
    held, full = {}, []
    for element in elements:
        key = key_of(element)
        held.setdefault(key, []).append(element)
        if len(held[key]) == size_of(key):
            full.append((key, held.pop(key)))
    return full + list(held.items())


@pytest.mark.parametrize("seed", range(6))
def test_windows_equal_those_of_plain_python(seed):
    chance = random.Random(seed)
    numbers = [chance.randrange(50) for _ in range(chance.randrange(80))]
    keys, sizes = chance.randint(1, 6), [chance.randint(1, 7) for _ in range(6)]
    dataset = Dataset.from_generator(lambda: iter(numbers)).group_by_window(
        lambda x: x % keys,
        lambda key, window: window.map(lambda x: x + 100 * key).batch(9),
        window_size_func=lambda key: sizes[int(key)],
    )
    want = windows_of(numbers, lambda x: x % keys, sizes.__getitem__)
    assert outcomes(dataset) == [[x + 100 * key for x in held] for key, held in want], f"{seed=}"


def test_partial_windows_are_yielded_at_the_end_oldest_first():
    dataset = Dataset.from_tensor_slices(np.array([5, 3, 9, 3, 5, 1, 9, 3])).group_by_window(
        lambda x: x, lambda key, window: window.batch(4), window_size=2
    )
    assert outcomes(dataset) == [[3, 3], [5, 5], [9, 9], [1], [3]]


def test_a_window_yields_all_its_elements_and_can_be_read_again():
    def twice(key, window):
        assert window.cardinality() == 2
        return Dataset.zip(window.repeat(2), window.concatenate(window)).map(lambda a, b: a + b)

    dataset = Dataset.range(4).group_by_window(lambda x: x // 2, twice, 2)
    assert outcomes(dataset) == [0, 2, 0, 2, 4, 6, 4, 6]


def test_elements_of_a_window_belong_to_the_reader():
    seen = []

    def spoiled(key, window):
        def spoil(x):
            x += 100
            return x

        def see(x):
            seen.append(x.tolist())
            return x

        return window.map(spoil).concatenate(window.map(see))

    rows = np.zeros((4, 2), np.int64)
    dataset = Dataset.from_tensor_slices(rows).group_by_window(lambda x: 0, spoiled, 4)
    for element in dataset:
        element += 1000
    assert seen == [[0, 0]] * 4
    assert not rows.any()


def test_elements_of_any_shapes_make_windows():
    dataset = (
        Dataset.range(1, 7)
        .map(lambda n: {"x": np.full(int(n), n), "s": "a" * int(n)})
        .group_by_window(lambda x: len(x["x"]) % 2, lambda key, window: window.padded_batch(3), 3)
    )
    assert [batch["x"].shape for batch in dataset] == [(3, 5), (3, 6)]
    assert [batch["s"].tolist() for batch in dataset][1] == ["aa", "aaaa", "aaaaaa"]


def test_errors_drop_an_element_or_a_window():
    def key_of(x):
        if x == 3:
            raise KeyError
        return x % 2

    def reduced(key, window):
        if next(iter(window)) == 4:
            raise IndexError
        return window.map(lambda x: 10 // int(x - 2) if x < 3 else x)

    dataset = Dataset.range(10).group_by_window(key_of, reduced, window_size=2)
    assert outcomes(dataset) == [
        -5, ("ZeroDivisionError", 1), ("KeyError", 3), -10, 5, ("IndexError", 4), 7, 9, 8,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key_func": str}, r"group_by_window \(test_windows.py:\d+\): `key_func` must return an"),
        ({"window_size": None, "window_size_func": lambda key: 0}, "must return at least 1"),
        ({"window_size": None, "window_size_func": lambda key: 1.5}, "`window_size_func` must"),
    ],
)
def test_invalid_keys_and_sizes_are_reported_with_the_step(arguments, message):
    whole = {"key_func": int, "reduce_func": lambda key, w: w, "window_size": 2, **arguments}
    with pytest.raises(InvalidElementError, match=message):
        list(Dataset.range(3).group_by_window(**whole))


def test_a_reduce_func_without_a_dataset_is_rejected():
    dataset = Dataset.range(3).group_by_window(int, lambda key, window: 7, 2)
    with pytest.raises(UserFunctionError, match="must return a Dataset, but returned int"):
        list(dataset)
    with pytest.raises(ValueError, match="`window_size` or `window_size_func`, but got neither"):
        Dataset.range(3).group_by_window(int, lambda key, window: window)
    with pytest.raises(ValueError, match="but got both"):
        Dataset.range(3).group_by_window(int, lambda key, window: window, 2, int)


def test_functions_are_called_only_as_the_next_element_needs():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    dataset = (
        Dataset.range(5000)
        .map(note)
        .group_by_window(
            lambda x: 0, lambda key, window: window.map(lambda x: note(x + 9000) % 9000), 4
        )
    )
    with iter(dataset) as iterator:
        for count in range(1, 41):
            assert int(next(iterator)) == count - 1
            windows = -(-count // 4)
            assert len(calls) == 4 * windows + count
    calls.clear()
    buckets = (
        Dataset.range(5000)
        .map(note)
        .bucket_by_sequence_length(lambda x: x % 2, [1], [3, 4], no_padding=True)
    )
    with iter(buckets) as iterator:
        assert next(iterator).tolist() == [0, 2, 4]
        assert calls == list(range(5))
        assert next(iterator).tolist() == [1, 3, 5, 7]
        assert calls == list(range(8))


def test_draws_in_a_window_depend_on_its_element_number():
    def drawn(key, window):
        return window.shuffle(5).batch(5)

    def make(dataset):
        windows = dataset.group_by_window(lambda x: x % 2, drawn, 5)
        return windows.with_options(hr.Options(seed=3))

    dataset = make(Dataset.range(40))
    first, second = outcomes(dataset), outcomes(dataset)
    assert first != second
    ahead = make(Dataset.range(40).prefetch(3)).prefetch(2)
    assert [outcomes(ahead), outcomes(ahead)] == [first, second]
    assert len({tuple(np.argsort(batch).tolist()) for batch in first}) > 2


def test_a_state_is_small_and_a_restore_calls_functions_for_held_elements_only():
    calls = []

    def note(x):
        calls.append(int(x))
        return np.full(1000, x)

    dataset = (
        Dataset.range(10_000)
        .map(note)
        .group_by_window(lambda x: x[0] % 3, lambda key, w: w.batch(20), 20)
    )
    with iter(dataset) as iterator:
        for _ in range(100):
            next(iterator)
        state = json.dumps(iterator.get_state())
        want = next(iterator)
    assert len(state) < 2000
    with iter(dataset) as iterator:
        iterator.set_state(json.loads(state))
        calls.clear()
        assert next(iterator).tolist() == want.tolist()
    assert len(calls) <= 3 * 20 + 20


@pytest.mark.parametrize(
    "make",
    [
        lambda ds: ds.group_by_window(lambda x: x % 70, lambda key, w: w.repeat(2), 3),
        lambda ds: ds.bucket_by_sequence_length(lambda x: x % 50, [20], [7, 9], no_padding=True),
        lambda ds: ds.scan(np.zeros(1, np.int64), lambda s, x: (np.add(s, x, out=s), x)),
        lambda ds: Dataset.sample_from_datasets([ds, ds.take(90)], seed=2),
    ],
)
def test_a_state_computed_later_is_that_of_its_chunk(make):
    dataset = make(Dataset.range(600).filter(lambda x: bool(x % 5)))

    def states(ask):
        iterator = build_iterator(dataset.plan, seed=1)
        try:
            while (chunk := iterator.next_chunk(3)) is not None:
                for index in range(chunk.size + 1):
                    yield ask(chunk.states, index)
        finally:
            iterator.close()

    later = list(states(lambda at, index: (at(index), at, index)))
    for number, (then, at, index) in enumerate(later):
        assert at(index) == then, f"{number=}"


def test_marks_stay_few_even_if_an_element_is_held_forever():
    seldom = Dataset.range(200_000).group_by_window(
        lambda x: int(x % 100_000 == 7), lambda key, window: window.take(1), 500
    )
    iterator = build_iterator(seldom.plan, seed=1)
    try:
        marks = []
        while iterator.next_chunk(1) is not None:
            (reread,) = [
                v for v in vars(iterator._collector).values() if isinstance(v, ReplayableInput)
            ]
            marks.append(len(reread._marks))
        assert max(marks) < 100
    finally:
        iterator.close()


def test_marks_are_kept_for_held_and_future_elements():
    reread = ReplayableInput(ListIterator(list(range(100))), "step", 10)
    for _ in range(10):
        reread.read_chunk(10)
    reread.discard_unused_marks([25, 27, 61])
    assert [mark.ordinal for mark in reread._marks] == [20, 60, 90]
    reread.discard_unused_marks([])
    assert [mark.ordinal for mark in reread._marks] == [90]


# --- buckets --------------------------------------------------------------------------------------


def ragged(n):
    return np.full(int(n), n)


@pytest.mark.parametrize("seed", range(6))
def test_buckets_are_windows_of_lengths_between_boundaries(seed):
    chance = random.Random(seed)
    lengths = [chance.randrange(12) for _ in range(chance.randrange(60))]
    sizes = [chance.randint(1, 5) for _ in range(4)]
    drop = chance.random() < 0.5
    dataset = Dataset.from_generator(lambda: map(ragged, lengths)).bucket_by_sequence_length(
        len, [2, 5, 9], sizes, drop_remainder=drop, padding_values=-1
    )

    def bucket(length):
        return sum(length >= boundary for boundary in (2, 5, 9))

    want = [
        [[n] * n + [-1] * (max(held) - n) for n in held]
        for key, held in windows_of(lengths, bucket, sizes.__getitem__)
        if len(held) == sizes[key] or not drop
    ]
    assert outcomes(dataset) == want, f"{seed=}"


def test_buckets_are_padded_to_their_boundary_if_requested():
    def rows(n):
        return {"x": np.ones((int(n), 2)), "n": n}

    buckets = (
        Dataset.range(6)
        .map(rows)
        .bucket_by_sequence_length(lambda e: e["n"], [3, 9], [2, 2, 2], pad_to_bucket_boundary=True)
    )
    assert [batch["x"].shape for batch in buckets] == [(2, 2, 2), (2, 8, 2), (1, 2, 2), (1, 8, 2)]
    shaped = (
        Dataset.range(6)
        .map(ragged)
        .bucket_by_sequence_length(len, [3], [2, 2], [None], -1, pad_to_bucket_boundary=True)
    )
    got = outcomes(shaped)
    assert got[0] == [[-1, -1], [1, -1]]
    assert [type(one) for one in got].count(str) == 3
    assert "the element has length 3, but `pad_to_bucket_boundary=True` requires" in got[1]


def test_buckets_without_padding_require_elements_of_one_shape():
    same = Dataset.range(7).bucket_by_sequence_length(lambda x: x, [4], [2, 3], no_padding=True)
    assert outcomes(same) == [[0, 1], [2, 3], [4, 5, 6]]
    uneven = (
        Dataset.range(3).map(ragged).bucket_by_sequence_length(len, [4], [2, 3], no_padding=True)
    )
    assert r"bucket_by_sequence_length (test_windows.py:" in outcomes(uneven)[0]
    assert "cannot stack" in outcomes(uneven)[0]


@pytest.mark.parametrize(
    ("boundaries", "sizes", "message"),
    [
        ([3, 3], [1, 1, 1], "increase strictly"),
        ([3, 5], [1, 1], "one value more than the 2 boundaries, .* but got 2"),
        ([0], [1, 1], r"`bucket_boundaries\[0\]` must be at least 1"),
        ([3], [1, 0], r"`bucket_batch_sizes\[1\]` must be at least 1"),
    ],
)
def test_boundaries_and_sizes_are_checked_immediately(boundaries, sizes, message):
    with pytest.raises(ValueError, match=message):
        Dataset.range(3).bucket_by_sequence_length(len, boundaries, sizes)


def test_specs_of_windows_and_buckets_need_few_calls():
    calls = []

    def note(n):
        calls.append(int(n))
        return ragged(n)

    rows = Dataset.range(1, 500).map(note)
    buckets = rows.bucket_by_sequence_length(len, [9], [100, 100])
    windows = rows.group_by_window(len, lambda key, window: window.padded_batch(9), 100)
    for dataset in (buckets, windows):
        assert dataset.element_spec == hr.ArraySpec((None, None), np.int64)
    assert len(calls) <= 4
    assert buckets.cardinality() == windows.cardinality() == hr.UNKNOWN_CARDINALITY
