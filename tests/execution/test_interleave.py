"""Interleave: datasets are read in turn, and opened and read only on request."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.execution.build import build_iterator
from headrace.execution.nested_dataset import NestedDataset
from tests.stopwatch import Stopwatch

from .contract import assert_keeps_contract, copied, plain, read
from .test_prefetch import Gate

Dataset = hr.Dataset


def started(dataset: hr.Dataset, seed: int = 7):
    return build_iterator(dataset.plan, seed=seed)


def in_turn(lengths, cycle: int, block: int) -> list[int]:
    """Interleave lists of numbers element by element: outer * 100 + ordinal."""
    outer, slots = iter(range(len(lengths))), [None] * cycle
    found, current, has_ended = [], 0, False
    while True:
        if slots[current] is None and not has_ended:
            number = next(outer, None)
            if number is None:
                has_ended = True
            else:
                slots[current] = [number * 100 + n for n in range(lengths[number])]
        if slots[current] is not None:
            block_now, slots[current] = slots[current][:block], slots[current][block:]
            found += block_now
            if len(block_now) < block:
                slots[current] = None
        elif has_ended and all(slot is None for slot in slots):
            return found
        current = (current + 1) % cycle


LENGTHS = st.lists(st.integers(0, 9), max_size=8)


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    cycle=st.integers(1, 5),
    block=st.integers(1, 3),
    threads=st.sampled_from([None, 2]),
    calls=st.booleans(),
    largest=st.sampled_from([1, 9, 60]),
    seed=st.integers(0, 2**32),
)
def test_datasets_are_read_in_turn_from_any_state(
    lengths, cycle, block, threads, calls, largest, seed
):
    def nested(outer):
        dataset = Dataset.range(int(outer) * 100, int(outer) * 100 + lengths[int(outer)])
        return dataset.map(lambda x: x if x >= 0 else -x) if calls else dataset

    def make():
        return started(
            Dataset.range(len(lengths)).interleave(
                nested, cycle_length=cycle, block_length=block, num_parallel_calls=threads
            )
        )

    outcomes = assert_keeps_contract(make, seed, most=200, restores=3, largest=largest)
    assert outcomes == [plain(np.int64(x)) for x in in_turn(lengths, cycle, block)]


def odd_or_half(x):
    return x * 2 if x % 2 else x // 2


def fails_at_three(x):
    if x % 5 == 3:
        raise ValueError(int(x))
    return x + 1


def nested_with_errors(outer):
    if outer % 4 == 1:
        raise KeyError(int(outer))
    return Dataset.range(int(outer) % 5).map(fails_at_three)


OUTER = {
    "used concatenate": lambda: Dataset.range(1).concatenate(Dataset.range(1, 7)),
    "shuffled index": lambda: Dataset.range(9).shuffle(5),
    "shuffled values": lambda: Dataset.range(14).filter(lambda x: x % 3 != 0).shuffle(5),
    "repeated": lambda: Dataset.range(4).map(odd_or_half).repeat(2),
    "cached": lambda: Dataset.range(6).map(odd_or_half).cache().repeat(2),
    "failing": lambda: Dataset.range(12).map(fails_at_three),
    "threads": lambda: Dataset.range(9).map(odd_or_half, num_parallel_calls=2).prefetch(2),
    "interleaved": lambda: Dataset.range(4).interleave(
        lambda x: Dataset.range(int(x)), cycle_length=2
    ),
}
NESTED = {
    "columns": lambda x: Dataset.range(int(x) % 6),
    "shuffled": lambda x: Dataset.range(int(x) % 7).shuffle(4),
    "failing": nested_with_errors,
    "nested": lambda x: Dataset.range(3).interleave(
        lambda y: Dataset.range(int(y)).shuffle(3), cycle_length=2
    ),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("threads", [None, 2])
def test_any_outer_input_and_nested_dataset_is_restored(outer, nested, threads):
    for cycle, block in ((1, 1), (3, 2), (4, 1)):
        dataset = OUTER[outer]().interleave(
            NESTED[nested], cycle_length=cycle, block_length=block, num_parallel_calls=threads
        )
        for seed in range(2):
            assert_keeps_contract(lambda dataset=dataset: started(dataset), seed, restores=5)


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("cycle", [1, 2, 4])
def test_threads_change_neither_elements_nor_states_nor_errors(nested, cycle):
    def outcomes(threads):
        dataset = Dataset.range(13).interleave(
            NESTED[nested], cycle_length=cycle, num_parallel_calls=threads
        )
        return assert_keeps_contract(lambda: started(dataset), 3, most=200, restores=0)

    assert outcomes(None) == outcomes(1) == outcomes(3)


def test_functions_are_called_only_for_requested_elements():
    opened, calls = [], []

    def note(x):
        calls.append(int(x))
        return x

    def nested(x):
        opened.append(int(x))
        return Dataset.range(100).map(note)

    with iter(Dataset.range(50).interleave(nested, cycle_length=3)) as iterator:
        for expected in ([0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]):
            next(iterator)
            assert opened == expected
        assert len(calls) == 5


def test_an_array_dataset_is_not_opened_before_its_turn():
    opened = []

    def nested(x):
        opened.append(int(x))
        return Dataset.range(4)

    with iter(Dataset.range(50).interleave(nested, cycle_length=2)) as iterator:
        for _ in range(8):
            next(iterator)
        assert opened == [0, 1]
        next(iterator)
        assert opened == [0, 1, 2]


@pytest.mark.parametrize("calls", [False, True])
def test_a_read_that_needs_all_elements_opens_their_datasets_and_no_others(calls):
    opened, computed = [], []

    def note(x):
        computed.append(int(x))
        return x if x >= 0 else -x

    def nested(x):
        opened.append(int(x))
        if x == 11:
            raise ValueError
        dataset = Dataset.range(int(x) * 100, int(x) * 100 + 3)
        return dataset.map(note) if calls else dataset

    iterator = started(Dataset.range(50).interleave(nested, cycle_length=4))
    expected, found = in_turn([3] * 8, 4, 1), []
    for count in (13, 5, 2):
        before = len(found)
        while len(found) < before + count:
            chunk = iterator.next_needed_chunk(before + count - len(found))
            found += [int(x) for x in chunk.rows()]
        assert found == expected[: len(found)]
        assert opened == sorted({x // 100 for x in found})
        assert not calls or computed == found
    assert iterator.next_needed_chunk(4).size == 4
    assert iterator.next_needed_chunk(30).size < 30
    assert opened == list(range(12))
    with pytest.raises(hr.errors.UserFunctionError, match="element 11"):
        iterator.next_needed_chunk(30)
    assert iterator.next_needed_chunk(1).rows()[0] == 1200


def test_a_batch_is_read_in_few_chunks_across_its_datasets():
    iterator = started(Dataset.range(50).interleave(lambda x: Dataset.range(3), cycle_length=4))
    assert iterator.next_needed_chunk(100).size == 100
    assert sum(1 for _ in iter(lambda: iterator.next_chunk(100), None)) > 5


def test_elements_that_need_calls_form_one_chunk_over_many_turns():
    calls: list[int] = []

    def note(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(3).interleave(
        lambda n: Dataset.range(int(n) * 100, int(n) * 100 + 9).map(note), cycle_length=3
    )
    iterator = build_iterator(dataset.plan, seed=1)
    found = [int(x) for _ in range(3) for x in iterator.next_chunk(1).rows()]
    states: list[object] = []
    while len(found) < 10:
        chunk = iterator.next_chunk(10 - len(found))
        states += [copied(chunk.state_at(index)) for index in range(chunk.size)]
        found += map(int, chunk.rows())
    states.append(copied(iterator.get_state()))
    assert found == [0, 100, 200, 1, 101, 201, 2, 102, 202, 3]
    assert calls == found  # and no others
    rest: list[int] = []
    sizes: list[int] = []
    while (chunk := iterator.next_chunk(1000)) is not None:
        rest += map(int, chunk.rows())
        sizes.append(chunk.size)
    assert rest[-1] == 208
    assert max(sizes) >= 9, sizes  # whole rounds of turns at once
    for index, state in enumerate(states):
        iterator.set_state(state)
        again = [int(x) for _ in range(2) for x in iterator.next_chunk(1).rows()]
        assert again == (found + rest)[3 + index :][:2]
    iterator.close()


@pytest.mark.parametrize("lengths", [[200, 200, 200, 200], [200, 7, 90, 40]])
def test_elements_that_need_calls_are_read_singly_after_the_first(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read_inner = NestedDataset.read

    def noted(inner: NestedDataset, *wish: object) -> bool:
        reads.append(inner.number)
        return read_inner(inner, *wish)

    monkeypatch.setattr(NestedDataset, "read", noted)
    dataset = Dataset.range(len(lengths)).interleave(
        lambda n: Dataset.range(lengths[int(n)]).map(lambda x: int(x)), cycle_length=2
    )
    iterator = build_iterator(dataset.plan)
    elements = 0
    while (chunk := iterator.next_chunk(1000)) is not None:
        elements += chunk.size
    iterator.close()
    assert elements == sum(lengths)
    # A read costs as much as twenty elements that come one by one.
    assert len(reads) <= 3 * len(lengths), reads


def test_an_epoch_of_a_shuffle_starts_with_its_first_request():
    read: list[int] = []

    def generated(number):
        for value in range(3):
            read.append(int(number))
            yield value

    def shuffled(number):
        dataset = Dataset.from_generator(lambda: generated(number))
        return dataset.shuffle(5, seed=3).repeat(2)

    with iter(Dataset.range(2).interleave(shuffled, cycle_length=2)) as iterator:
        counts = []
        for _ in range(12):
            next(iterator)
            counts.append(len(read))
    assert counts == [3, 6, 6, 6, 6, 6, 9, 12, 12, 12, 12, 12]


def test_columns_stay_columns():
    data = {"a": np.arange(400).reshape(200, 2), "b": [b"x"] * 200}
    dataset = Dataset.range(8).interleave(
        lambda x: Dataset.from_tensor_slices(data), cycle_length=4, block_length=2
    )
    iterator = started(dataset)
    columnar = [chunk.is_columnar for chunk in iter(lambda: iterator.next_chunk(64), None)]
    assert columnar.count(True) > len(columnar) // 2


def test_datasets_of_different_kinds_are_mixed_as_rows():
    kinds = [np.arange(40), np.arange(40.0), np.arange(80).reshape(40, 2)]
    dataset = Dataset.range(3).interleave(
        lambda x: Dataset.from_tensor_slices(kinds[int(x)]), cycle_length=3
    )
    found = [(str(np.asarray(x).dtype), np.asarray(x).shape) for x in dataset]
    assert found == [("int64", ()), ("float64", ()), ("int64", (2,))] * 40


def test_nested_shuffles_differ_by_element_and_epoch_but_repeat_with_a_seed():
    dataset = Dataset.range(3).flat_map(lambda x: Dataset.range(20).shuffle(20)).batch(20)

    def order(seed, epoch=0):
        iterator = build_iterator(dataset.plan, seed=seed, epochs=(epoch,))
        chunks = iter(lambda: iterator.next_chunk(1), None)
        return [tuple(row.tolist()) for chunk in chunks for row in chunk.rows()]

    first = order(5)
    assert len({*first}) == 3
    assert order(5) == first
    assert not {*order(5, 1)} & {*first}
    assert not {*order(6)} & {*first}


def test_an_infinite_nested_dataset_is_read_in_turn():
    dataset = Dataset.range(2).interleave(
        lambda x: Dataset.range(int(x), int(x) + 1).repeat(), cycle_length=2
    )
    assert [int(x) for x, _ in zip(dataset, range(6), strict=False)] == [0, 1, 0, 1, 0, 1]


def test_files_are_read_in_turn_and_a_missing_one_is_reported_in_its_turn(tmp_path: Path):
    for number in (0, 2):
        (tmp_path / f"{number}.txt").write_bytes(
            b"".join(b"%d%d\n" % (number, n) for n in range(3))
        )
    names = [str(tmp_path / f"{number}.txt") for number in range(3)]
    for threads in (None, 2):
        dataset = Dataset.from_tensor_slices(names).interleave(
            hr.TextLineDataset, cycle_length=3, num_parallel_calls=threads
        )
        seen = []
        with iter(dataset) as iterator:
            while len(seen) < 8:
                try:
                    x = next(iterator, None)
                except Exception:
                    x = "error"
                if x is None:
                    break
                seen.append(x)
        assert seen == [b"00", "error", b"20", b"01", b"21", b"02", b"22"], threads


def test_in_unordered_mode_a_blocked_dataset_does_not_block_others():
    gate = Gate()

    def nested(x):
        dataset = Dataset.range(int(x) * 10, int(x) * 10 + 3)
        return dataset.map(lambda y: gate(y) if y == 1 else y)

    dataset = Dataset.range(4).interleave(
        nested, cycle_length=2, num_parallel_calls=2, deterministic=False
    )
    iterator = started(dataset)
    seen = []
    while len(seen) < 10:
        seen += [int(x) for x in iterator.next_chunk(1).rows()]
    assert 1 not in seen
    state = iterator.get_state()
    gate.is_open.set()
    rest = []
    while (chunk := iterator.next_chunk(5)) is not None:
        rest += [int(x) for x in chunk.rows()]
    assert sorted(seen + rest) == sorted(x * 10 + n for x in range(4) for n in range(3))
    iterator.set_state(state)
    again = []
    while (chunk := iterator.next_chunk(5)) is not None:
        again += [int(x) for x in chunk.rows()]
    assert sorted(again) == sorted(rest)
    iterator.close()


def test_an_exit_in_a_nested_function_reaches_the_consumer():
    def nested(x):
        return Dataset.range(3).map(lambda y: sys.exit(2) if x == 1 else y)

    for threads in (None, 2):
        iterator = started(
            Dataset.range(3).interleave(nested, cycle_length=2, num_parallel_calls=threads)
        )
        with pytest.raises(SystemExit):
            read(iterator, random.Random(1), 100)
        iterator.close()


def test_close_does_not_wait_for_a_blocked_nested_function():
    gate = Gate()
    iterator = started(
        Dataset.range(3).interleave(
            lambda x: Dataset.range(3).map(lambda y: gate(y) if x == 1 else y),
            cycle_length=2,
            num_parallel_calls=2,
        )
    )
    assert iterator.next_chunk(1).rows() == [0]
    assert gate.is_inside.wait(10.0)
    with Stopwatch() as watch:
        iterator.close()
    assert watch.seconds < 5.0
    gate.is_open.set()
