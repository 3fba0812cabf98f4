"""Semantics of the steps, as in tf.data, with values computed by hand."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidElementError, UserFunctionError

Dataset = hr.Dataset


def values(dataset):
    with iter(dataset) as iterator:
        return [x.tolist() if hasattr(x, "tolist") else x for x in iterator]


def test_interleave_takes_blocks_in_turn_and_refills_free_slots():
    dataset = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    assert values(dataset) == (
        [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4 + [3] * 2 + [4] * 2
        + [5] * 6
    )  # fmt: skip


def test_a_shuffle_yields_no_element_before_the_buffer_reached_it():
    order = values(Dataset.range(1000).shuffle(10, seed=1))
    assert sorted(order) == list(range(1000))
    assert all(value < position + 10 for position, value in enumerate(order))
    assert order != list(range(1000))


def test_each_epoch_is_reshuffled_unless_disabled():
    dataset = Dataset.range(50).shuffle(50, seed=3)
    assert values(dataset) != values(dataset)
    fixed = Dataset.range(50).shuffle(50, seed=3, reshuffle_each_iteration=False)
    assert values(fixed) == values(fixed)
    epochs = values(Dataset.range(50).shuffle(50, seed=3).repeat(2))
    assert epochs[:50] != epochs[50:]
    assert values(Dataset.range(50).shuffle(50, seed=3)) == values(
        Dataset.range(50).shuffle(50, seed=3)
    )


def test_a_full_shuffle_has_every_order_equally_often():
    seen = Counter(tuple(values(Dataset.range(3).shuffle(3, seed=s))) for s in range(1200))
    # Six orders, 200 each, give or take five standard deviations (12.9 each).
    assert len(seen) == 6
    assert max(seen.values()) < 265
    assert min(seen.values()) > 135


def test_a_cache_calls_the_function_once_for_all_iterators():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(4).map(note).cache()
    assert values(dataset) == values(dataset) == values(dataset.map(lambda x: x)) == [0, 1, 2, 3]
    assert calls == [0, 1, 2, 3]


def test_a_cache_that_was_not_read_to_its_end_is_filled_again():
    dataset = Dataset.range(4).cache()
    assert values(dataset.take(2)) == [0, 1]
    assert values(dataset) == [0, 1, 2, 3]


def test_tuples_are_passed_as_arguments():
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(10, 13))
    assert values(pairs.map(lambda a, b: int(a) + int(b))) == [10, 12, 14]
    assert values(pairs.map(lambda a, b: a + b)) == [10, 12, 14]
    assert values(Dataset.range(3).enumerate().filter(lambda i, x: i != 1).map(lambda i, x: x)) == [
        0,
        2,
    ]


def test_the_first_element_does_not_wait_for_the_second():
    release = threading.Event()

    def slow():
        yield 1
        release.wait(30)
        yield 2

    with iter(Dataset.from_generator(slow).map(lambda x: x + 0 if x else x)) as iterator:
        assert next(iterator) == 1
        release.set()
        assert next(iterator) == 2


def test_parallel_calls_overlap_in_time():
    both = threading.Barrier(2, timeout=20)

    def meet(x):
        both.wait()
        return x

    assert values(Dataset.range(2).map(meet, num_parallel_calls=2)) == [0, 1]


def test_options_make_parallel_steps_unordered():
    slow = threading.Event()
    options = hr.Options()
    options.deterministic = False
    dataset = Dataset.range(4).map(
        lambda x: (slow.wait(20) if x == 0 else None, x)[1], num_parallel_calls=2
    )
    with iter(dataset.with_options(options)) as iterator:
        assert next(iterator) != 0
        slow.set()
        assert len(list(iterator)) == 3


@pytest.mark.parametrize("calls", [None, 2])
def test_an_error_is_raised_in_its_turn_and_iteration_continues(calls):
    def fail(x):
        if x in (3, 4):
            raise KeyError("no such thing")
        return x if x >= 0 else -x

    got, errors = [], []
    with iter(Dataset.range(8).map(fail, num_parallel_calls=calls)) as iterator:
        while True:
            try:
                got.append(int(next(iterator)))
            except StopIteration:
                break
            except UserFunctionError as error:
                got.append((error.position, error.original_type))
                errors.append(error)
    assert got == [0, 1, 2, (3, "KeyError"), (4, "KeyError"), 5, 6, 7]
    for error in errors:
        assert "no such thing" in str(error)
        assert "in fail" in str(error)
        assert isinstance(error.__cause__, KeyError)


def test_a_failing_predicate_or_nested_dataset_is_a_user_function_error():
    with pytest.raises(UserFunctionError, match="filter"):
        values(Dataset.range(3).filter(lambda x: {}[int(x)]))
    with pytest.raises(UserFunctionError, match="must return a Dataset, but returned int"):
        values(Dataset.range(3).flat_map(lambda x: 5))
    with pytest.raises(UserFunctionError, match=r"interleave.*raised ZeroDivisionError"):
        values(Dataset.range(3).interleave(lambda x: 1 // 0))


def test_ragged_elements_cannot_be_batched():
    dataset = Dataset.range(4).map(lambda x: np.zeros(int(x))).batch(4)
    with pytest.raises(InvalidElementError, match="pad or truncate"):
        values(dataset)


def test_an_abandoned_iterator_leaves_no_thread():
    dataset = Dataset.range(1000).map(lambda x: np.sum(x), num_parallel_calls=2).prefetch(2)
    before = threading.active_count()
    for _ in dataset:
        break
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_repeat_of_nothing_ends():
    assert values(Dataset.range(0).repeat()) == []
    assert values(Dataset.range(5).filter(lambda x: x > 9).repeat()) == []


def test_zip_of_a_structure_and_the_shortest():
    dataset = Dataset.zip({"a": Dataset.range(3), "b": (Dataset.range(5), Dataset.range(9))})
    assert [(e["a"], e["b"]) for e in dataset] == [(i, (i, i)) for i in range(3)]
