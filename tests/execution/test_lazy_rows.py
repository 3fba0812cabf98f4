"""Lazy rows: elements that need a call of a user's function are computed one by one."""

from __future__ import annotations

import json

import numpy as np
import pytest

import headrace as hr
from headrace.execution.build import build_iterator
from headrace.execution.iterator import END

Dataset = hr.Dataset


class Calls:
    """Counts the elements that a pipeline's functions were called for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x):
        self.count += 1
        if int(np.sum(x)) % 7 == 3:
            raise ValueError("seven and three")
        return x + 1 if x % 2 else x - 1

    def numbers(self, stop):
        for number in range(stop):
            self.count += 1
            yield number if number % 5 != 2 else None  # None is no element: an error

    def odd(self, x):
        self.count += 1
        return x % 2 == 1 if x >= 0 else False

    def small(self, x):
        self.count += 1
        return x < 100 if x != 4 else 1 // 0

    def number(self, x):
        self.count += 1
        return x % 2 if x % 5 else x % 3

    def summed(self, total, x):
        return total + x, total * self(x)

    def written(self, value, x):
        self.count += 1
        value[x] = x
        return value, x


def generated(calls, stop=11):
    return Dataset.from_generator(lambda: calls.numbers(stop))


PIPELINES = {
    "map": lambda c: Dataset.range(11).map(c),
    "two maps": lambda c: Dataset.range(11).map(lambda x: x if x > 1 else -x).map(c),
    "filter": lambda c: Dataset.range(11).filter(c.odd),
    "generator": generated,
    "generator and map": lambda c: generated(c).map(lambda x: x if x > 1 else -x),
    "enumerate": lambda c: generated(c).enumerate(),
    "take": lambda c: generated(c).take(6),
    "skip": lambda c: generated(c).skip(3),
    "shard": lambda c: generated(c).shard(3, 1),
    "repeat": lambda c: generated(c, 4).repeat(3),
    "repeat without elements": lambda c: generated(c, 0).repeat(2),
    "take of a map after a filter": lambda c: Dataset.range(30).filter(c.odd).map(c).take(5),
    "zip": lambda c: Dataset.zip((generated(c), Dataset.range(9).map(c))),
    "zip with numbers": lambda c: Dataset.zip({"a": generated(c), "b": Dataset.range(6)}),
    "nested zip": lambda c: Dataset.zip((generated(c), Dataset.zip((generated(c), generated(c))))),
    "zip of a batch": lambda c: Dataset.zip((generated(c), Dataset.range(9).batch(2).map(np.sum))),
    "concatenate": lambda c: generated(c, 4).concatenate(Dataset.range(5).map(c)),
    "flat_map": lambda c: Dataset.range(4).flat_map(lambda n: generated(c, int(n) + 2)),
    "interleave": lambda c: Dataset.range(5).interleave(
        lambda n: generated(c, int(n) * 3 % 7), cycle_length=3
    ),
    "interleave of blocks": lambda c: Dataset.range(5).interleave(
        lambda n: Dataset.range(9 - int(n)).map(c), cycle_length=2, block_length=3
    ),
    "interleave of both kinds": lambda c: Dataset.range(4).interleave(
        lambda n: generated(c, 5) if n % 2 else Dataset.range(5), cycle_length=3, block_length=2
    ),
    "shuffle": lambda c: generated(c, 40).shuffle(4, seed=3),
    "shuffle after a filter": lambda c: Dataset.range(40).filter(c.odd).shuffle(5, seed=3),
    "shuffle that fails": lambda c: (
        Dataset.range(40).filter(lambda x: x >= 0).map(c).shuffle(6, seed=3)
    ),
    "take of a shuffle": lambda c: generated(c, 40).shuffle(4, seed=3).take(9),
    "enumerate of an interleave": lambda c: (
        Dataset.range(5)
        .interleave(lambda n: generated(c, int(n) * 3 % 7), cycle_length=3)
        .enumerate()
    ),
    "batch of an interleave": lambda c: (
        Dataset.range(5)
        .interleave(lambda n: generated(c, int(n) * 5 % 9), cycle_length=3, block_length=2)
        .batch(4)
    ),
    "repeat of a filter that keeps nothing": lambda c: (
        generated(c, 3).filter(lambda x: x > 5).repeat(2)
    ),
    "scan": lambda c: generated(c).scan(0, lambda total, x: (total + x, (total, x))),
    "scan that fails": lambda c: Dataset.range(30).scan(np.zeros(2), c.summed),
    "scan of a large value": lambda c: generated(c, 40).scan(np.zeros(1 << 15), c.written),
    "map of a scan of a filter": lambda c: (
        Dataset.range(30).filter(c.odd).scan(0, c.summed).map(lambda x: x if x > 1 else -x)
    ),
    "take_while": lambda c: generated(c).take_while(lambda x: x < 7),
    "take_while to the end": lambda c: generated(c).take_while(c.small),
    "take_while over a map": lambda c: Dataset.range(30).map(c).take_while(c.small).take(9),
    "sample": lambda c: Dataset.sample_from_datasets(
        [generated(c), Dataset.range(9).map(c), Dataset.range(100, 107)], seed=3
    ),
    "sample that stops": lambda c: Dataset.sample_from_datasets(
        [generated(c), generated(c, 5)], [0.7, 0.3], seed=3, stop_on_empty_dataset=True
    ),
    "sample with weights that are read": lambda c: Dataset.sample_from_datasets(
        [generated(c), generated(c, 7)], Dataset.from_tensors([0.7, 0.3]).repeat(), seed=3
    ),
    "choose": lambda c: Dataset.choose_from_datasets(
        [generated(c, 9), Dataset.range(9).map(c), Dataset.range(100, 107)],
        Dataset.range(3).repeat(),
    ),
    "choose by a function": lambda c: Dataset.choose_from_datasets(
        [generated(c, 9), Dataset.range(9).map(c)], Dataset.range(30).map(c.number)
    ),
    "enumerate of a sample of shuffles": lambda c: Dataset.sample_from_datasets(
        [generated(c, 20).shuffle(4, seed=1), Dataset.range(20).filter(c.odd)], seed=2
    ).enumerate(),
    "group_by_window": lambda c: generated(c, 30).group_by_window(
        lambda x: x % 3, lambda key, window: window.map(c), window_size=3
    ),
    "padded_batch": lambda c: generated(c, 30).padded_batch(4),
    "ragged_batch": lambda c: generated(c, 30).ragged_batch(4),
    "unique": lambda c: generated(c, 30).map(lambda x: x // 2 % 9).unique(),
    "unique of a map that fails": lambda c: Dataset.range(30).map(c).map(str).unique(),
    "unbatch": lambda c: Dataset.range(12).map(c).batch(3).unbatch(),
    "map after unbatch": lambda c: Dataset.range(12).map(c).batch(3).unbatch().map(lambda x: x),
    "prefetch": lambda c: Dataset.range(40).map(c).prefetch(16),
}
CASES = pytest.mark.parametrize("name", PIPELINES)


def plain(row):
    return repr(row)


def outcome_of(ask, *arguments):
    try:
        return ask(*arguments)
    except Exception as error:
        return type(error).__name__


def state_of(iterator):
    """Return the state of an iterator that was read without lazy rows."""
    state = iterator.get_state()
    return (lambda index: state), 0


def lazy_rows_of(iterator):
    """Yield the outcomes of lazy rows, each with the state after it."""
    while (singles := outcome_of(iterator.lazy_rows)) is not None:
        if isinstance(singles, str):
            yield singles, state_of(iterator)
            continue
        rows, states = singles
        count = 0
        while (row := outcome_of(next, rows, END)) is not END:
            failed = isinstance(row, str)
            count += 1
            yield row, state_of(iterator) if failed else (states, count)
            if failed:
                break


def by_rows(iterator):
    """Return the outcomes, and the state before each of them and after the last."""
    outcomes, places = [], [state_of(iterator)]
    for row, state in lazy_rows_of(iterator):
        outcomes.append(plain(row))
        places.append(state)
    return outcomes, places


def by_chunks(iterator, limit):
    outcomes = []
    while (chunk := outcome_of(iterator.next_chunk, limit)) is not None:
        outcomes += [plain(chunk)] if isinstance(chunk, str) else map(plain, chunk.rows())
    return outcomes


def started(name, calls=None):
    return build_iterator(PIPELINES[name](calls or Calls()).plan, seed=1)


@CASES
def test_lazy_rows_equal_the_rows_of_chunks(name):
    want = by_chunks(started(name), 1)
    assert by_rows(started(name))[0] == want
    assert by_chunks(started(name), 4) == want


@CASES
def test_errors_of_lazy_rows_equal_those_of_chunks(name):
    def message(ask, iterator):
        found = []
        while True:
            try:
                if ask(iterator) is None:
                    return found
            except Exception as error:
                found.append((str(error), getattr(error, "position", None)))

    def all_singly(iterator):
        singles = iterator.lazy_rows()
        return None if singles is None else list(singles[0])

    assert message(all_singly, started(name)) == message(lambda it: it.next_chunk(1), started(name))


@CASES
def test_a_state_continues_correctly_however_late_it_is_computed(name):
    outcomes, places = by_rows(started(name))
    used = started(name)
    for number, (states, index) in enumerate(places):
        state = json.loads(json.dumps(states(index)))
        for iterator in (started(name), used):
            iterator.set_state(state)
            rest, _ = by_rows(iterator)
            assert rest == outcomes[number:], f"place {number}: {state}"
            iterator.set_state(state)
            assert by_chunks(iterator, 3) == outcomes[number:]


@CASES
def test_chunks_may_follow_lazy_rows_that_ended_or_failed(name):
    want = by_chunks(started(name), 1)
    for begin in range(3):
        iterator, got, turn = started(name), [], begin
        while True:
            if turn % 3:
                singles = outcome_of(iterator.lazy_rows)
                if singles is None:
                    break
                got += [plain(singles)] if isinstance(singles, str) else to_the_end(singles[0])
            else:
                chunk = outcome_of(iterator.next_chunk, 2)
                if chunk is None:
                    break
                got += [plain(chunk)] if isinstance(chunk, str) else map(plain, chunk.rows())
            turn += 1
        assert got == want
        iterator.close()


def to_the_end(rows):
    """Return the outcomes of lazy rows up to an error, or to their end."""
    got = []
    while (row := outcome_of(next, rows, END)) is not END:
        got.append(plain(row))
        if isinstance(row, str):
            break
    return got


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in ("prefetch",)])
def test_no_function_is_called_for_an_unrequested_element(name):
    calls, alone = Calls(), Calls()
    rows, chunks = started(name, calls), started(name, alone)
    singles = lazy_rows_of(rows)
    for _ in range(9):
        got, _ = next(singles, (END, None))
        chunk = outcome_of(chunks.next_chunk, 1)
        assert calls.count <= alone.count
        assert (got is END) == (chunk is None)
    rows.close()
    chunks.close()


@CASES
def test_a_loop_over_the_dataset_yields_the_same_elements_and_states(name):
    want = by_chunks(started(name), 1)
    dataset = PIPELINES[name](Calls())
    got, states = [], []
    with iter(dataset) as iterator:
        while True:
            states.append(json.loads(json.dumps(iterator.get_state())))
            try:
                got.append(plain(next(iterator)))
            except StopIteration:
                break
            except Exception as error:
                got.append(plain(type(error).__name__))
        assert got == want
    with iter(dataset) as other:
        for number in range(0, len(states), 3):
            other.set_state(states[number])
            rest = []
            while (row := outcome_of(next, other, END)) is not END:
                rest.append(plain(row))
            assert rest == want[number:]


def test_prefetch_and_its_reader_hold_at_most_buffer_size_elements():
    calls = Calls()
    with iter(Dataset.range(10**6).filter(calls.odd).prefetch(32)) as iterator:
        for taken in range(1, 200):
            next(iterator)
            assert calls.count <= 2 * (taken + 32)


def test_unbatch_computes_one_input_element_at_a_time():
    calls = Calls()
    dataset = Dataset.range(30).map(lambda x: x * 2 + 1).filter(calls.odd).batch(10).unbatch()
    with iter(dataset) as iterator:
        for taken in range(1, 30):
            next(iterator)
            assert calls.count == -(-taken // 10) * 10


@pytest.mark.parametrize("fails_at", [None, 5])
@pytest.mark.parametrize("taken", [40, 900])
def test_elements_skipped_by_a_restore_are_not_all_held_in_memory(fails_at, taken):
    limits = []

    class Reader:
        def __init__(self, position):
            self.at = position or 0

        def read_one(self):
            self.at += 1
            if self.at - 1 == fails_at:
                raise ValueError(fails_at)
            return np.zeros(2)

        def read(self, limit):
            limits.append(limit)
            return hr.Chunk.of_rows([self.read_one() for _ in range(limit)])

        def get_position(self):
            return self.at

        def close(self):
            pass

    class Frames(hr.Source):
        size = 1
        runs_user_code = True

        def open(self, start, stop, position=None, *, pass_number=()):
            return Reader(position)

    dataset = Dataset.from_source(Frames())
    with iter(dataset) as first, iter(dataset) as again:
        for _ in range(taken):
            outcome_of(next, first)
        again.set_state(first.get_state())
        limits.clear()
        next(again)
    assert max(limits, default=0) <= 16
    assert sum(limits) <= taken


@pytest.mark.parametrize("first_fails", [False, True])
def test_zip_reads_its_inputs_in_the_same_order_by_row_and_by_chunk(first_fails):
    def fails_at_the_end():
        yield from (10, 11)
        raise KeyError

    def by_chunks(iterator):
        while (chunk := iterator.next_chunk(1)) is not None:
            yield from chunk.rows()

    def one_by_one(iterator):
        while (found := iterator.lazy_rows()) is not None:
            yield from found[0]

    failing, whole = Dataset.from_generator(fails_at_the_end), Dataset.range(2).map(str)
    if first_fails:
        plan = Dataset.zip(failing, whole.batch(1).unbatch()).plan
    else:
        plan = Dataset.zip(whole, failing.batch(1).unbatch()).plan
    found = []
    for read in (by_chunks, one_by_one):
        iterator = build_iterator(plan, seed=1)
        outcomes = []
        for _ in range(3):  # once more after each error
            try:
                outcomes += map(str, read(iterator))
            except hr.errors.UserFunctionError:
                outcomes.append("error")
        found.append(outcomes)
    assert found[0] == found[1]
    assert len([each for each in found[0] if each != "error"]) == 2
