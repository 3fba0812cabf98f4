"""Worker stage and client stage of a plan together yield its elements in order, from any state."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import headrace as hr
from headrace.element.chunk import concatenate
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, UserFunctionError
from headrace.execution.build import build_both_stages, build_client_stage, build_iterator
from headrace.execution.element_ids import element_id_runs
from headrace.execution.split_provider import PartialSplit
from headrace.plan.elements import FromSource
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.traverse import transform
from headrace.rewrites.partition import partition_plan
from headrace.sources.memory import ElementListSource

from .pipelines import STEPS, drawn, nested, odd_or_half

Dataset = hr.Dataset


def text(element):
    return repr(map_leaves(lambda leaf: np.asarray(leaf).tolist(), element))


def whole(plan, seed=7):
    return build_iterator(plan, seed=seed)


def in_both_stages(plan, *, bound=1 << 30, seed=7, ordered=True):
    """Return the client stage of a plan over its worker stage, both run in this process."""
    made = partition_plan(
        plan, ordered=ordered, max_shuffle_bytes=bound, element_bytes=lambda node: 8
    )

    return build_both_stages(plan, made.mode, seed=seed)


def read(iterator, chance=None):
    """Return the elements, and the state before each and after the last."""
    rows, states = [], [iterator.get_state()]
    while (
        chunk := iterator.next_chunk(chance.choice([1, 2, 7, 40]) if chance else 16)
    ) is not None:
        rows += map(text, chunk.rows())
        states[-1] = chunk.state_at(0)
        states += [chunk.state_at(index + 1) for index in range(chunk.size)]
        if len(rows) > 300:
            break
    iterator.close()
    return rows, states


FAILING = ("failing map",)
NAMES = [name for name in STEPS if name not in FAILING]


def random_dataset(chance):
    source = chance.choice(["range", "shuffle", "generators", "slices"])
    dataset = {
        "range": lambda: Dataset.range(chance.randint(0, 12)),
        "shuffle": lambda: Dataset.range(12).shuffle(5),
        "generators": lambda: Dataset.range(5).interleave(
            lambda x: Dataset.from_generator(lambda: iter(range(int(x)))), cycle_length=3
        ),
        "slices": lambda: Dataset.from_tensor_slices(np.arange(11)).map(odd_or_half),
    }[source]()
    names = [source]
    for name in chance.choices(NAMES, k=chance.randint(1, 4)):
        names.append(name)
        dataset = STEPS[name](dataset)
    return dataset, names


@pytest.mark.parametrize("seed", range(60))
def test_both_stages_yield_the_plan_in_order_from_any_state(seed):
    chance = random.Random(seed)
    dataset, names = random_dataset(chance)
    bound = chance.choice([0, 1 << 30])
    print(seed, names, bound)
    want, _ = read(whole(dataset.plan))
    got, states = read(in_both_stages(dataset.plan, bound=bound), chance)
    assert got == want
    for index in chance.sample(range(len(states)), min(4, len(states))):
        again = in_both_stages(dataset.plan, bound=bound)
        again.set_state(states[index])
        assert again.get_state() == states[index]
        assert read(again, chance)[0][: len(want) - index] == want[index:]


def opened(x):
    return Dataset.range(int(x) % 5 + 2).map(lambda y: y + 10)


def mostly_dropped(x):
    return bool(x % 6 == 1)


#: Plans whose client stage interleaves splits, or holds elements of several splits.
INTERLEAVED = {
    "interleave": lambda ds: ds.interleave(opened, cycle_length=3, block_length=2),
    "wide": lambda ds: ds.interleave(opened, cycle_length=20),
    "filtered": lambda ds: ds.interleave(opened, cycle_length=3).filter(mostly_dropped),
    "mapped, filtered": lambda ds: (
        ds.interleave(opened, cycle_length=2, block_length=3)
        .map(odd_or_half)
        .filter(lambda x: bool(x % 3))
        .map(lambda x: {"a": x, "b": [x, x]})
    ),
    "filtered, batched": lambda ds: (
        ds.interleave(opened, cycle_length=3).filter(lambda x: x % 2 == 0).batch(4)
    ),
    "shuffled, decoded": lambda ds: (
        ds.interleave(opened, cycle_length=3).shuffle(6).map(odd_or_half).batch(3)
    ),
    "shuffled, decoded, repeated": lambda ds: (
        ds.interleave(opened, cycle_length=3).shuffle(6).repeat(2).map(odd_or_half).take(40)
    ),
    "drawn": lambda ds: ds.interleave(drawn, cycle_length=3).map(odd_or_half).repeat(3),
    "threaded": lambda ds: (
        ds.interleave(drawn, cycle_length=3, num_parallel_calls=2)
        .map(odd_or_half, num_parallel_calls=2, deterministic=False)
        .filter(lambda x: bool(x % 3))
    ),
    "opened at the client": lambda ds: (
        ds.interleave(drawn, cycle_length=2).shuffle(5).flat_map(drawn).batch(5)
    ),
    "two of them": lambda ds: (
        ds.interleave(opened, cycle_length=2)
        .shuffle(3)
        .concatenate(ds.filter(lambda x: bool(x > 2)).shuffle(4))
        .repeat(2)
        .map(odd_or_half)
    ),
    "nothing left": lambda ds: (
        ds.interleave(opened, cycle_length=3).filter(lambda x: bool(x < 0)).concatenate(ds)
    ),
}


@pytest.mark.parametrize("bound", [0, 1 << 30])
@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_splits_have_the_order_of_a_single_process(name, bound):
    dataset = INTERLEAVED[name](Dataset.range(9).shuffle(9).map(odd_or_half))
    chance = random.Random(bound)
    want, _ = read(whole(dataset.plan))
    got, states = read(in_both_stages(dataset.plan, bound=bound), chance)
    assert got == want
    for index in chance.sample(range(len(states)), min(8, len(states))):
        again = in_both_stages(dataset.plan, bound=bound)
        again.set_state(states[index])
        assert again.get_state() == states[index]
        assert read(again, chance)[0] == want[index:]


class SplitsOfWorkers:
    """Splits computed by several workers in arbitrary order, and then merged.

    A split may arrive in parts: a worker is lost in the middle of it, and another one continues.
    """

    def __init__(self, plan, made, chance, seed=7):
        self._splits = {}
        splits = list(range(made.num_splits))
        chance.shuffle(splits)
        while splits:
            count = chance.randint(1, 4)
            mine, splits = splits[:count], splits[count:]
            self._read(plan, made, [(split, split + 1) for split in mine], chance, seed)
            for split in mine:
                # Some elements are lost, and read again.
                chunks, elements = self._splits[split]
                kept = chance.randint(0, len(chunks))
                if kept < len(chunks):
                    first = chunks[kept].metadata["ordinal"][0]
                    self._splits[split] = chunks[:kept], elements
                    part = PartialSplit(split, ((int(first), None),))
                    self._read(plan, made, [part], chance, seed)

    def _read(self, plan, made, grants, chance, seed):
        waiting = iter(grants)
        iterator = build_iterator(
            plan,
            seed=seed,
            next_splits=lambda: next(waiting, None),
            with_element_ids=True,
            mode=made.mode,
        )
        while (chunk := iterator.next_chunk(chance.choice([1, 3, 20]))) is not None:
            for index in range(chunk.size):
                one = chunk.slice(index, index + 1)
                split = int(one.metadata["split"][0])
                self._splits.setdefault(split, ([], 0))[0].append(one)
        for ended in iterator.take_finished():
            for split in range(ended.first_split, ended.first_split + ended.num_splits):
                self._splits[split] = self._splits.get(split, ([], 0))[0], ended.num_elements
        iterator.close()

    def open(self, split, first):
        chunks, elements = self._splits[split]
        return Merged([one for one in chunks if one.metadata["ordinal"][0] >= first], elements)


class Merged:
    def __init__(self, chunks, elements):
        self._chunks = chunks
        self.num_elements = elements

    def next_chunk(self, limit):
        if not self._chunks:
            return None
        taken, self._chunks = self._chunks[:limit], self._chunks[limit:]
        return concatenate(taken)

    def close(self):
        pass


@pytest.mark.parametrize("seed", range(40))
def test_splits_computed_by_workers_in_arbitrary_order_yield_the_plan(seed):
    chance = random.Random(seed)
    if seed % 2:
        dataset, names = random_dataset(chance)
    else:
        name = chance.choice([*INTERLEAVED])
        dataset, names = INTERLEAVED[name](Dataset.range(9).shuffle(9).map(odd_or_half)), [name]
    print(seed, names)
    plan = dataset.plan
    made = partition_plan(
        plan,
        ordered=True,
        max_shuffle_bytes=chance.choice([0, 1 << 30]),
        element_bytes=lambda node: 8,
    )
    above = build_client_stage(made, SplitsOfWorkers(plan, made, chance), seed=7)
    assert read(above, chance)[0] == read(whole(plan))[0]


def fails_at_four(x):
    if x % 7 == 4:
        raise KeyError(int(x))
    return x


def read_with_errors(iterator, limit):
    """Return elements and errors, and the state before each of them and after the last."""
    found, states = [], [iterator.get_state()]
    while True:
        try:
            chunk = iterator.next_chunk(limit)
        except UserFunctionError:
            found.append("error")
            states.append(iterator.get_state())
            continue
        if chunk is None:
            iterator.close()
            return found, states
        found += map(text, chunk.rows())
        states[-1] = chunk.state_at(0)
        states += [chunk.state_at(index + 1) for index in range(chunk.size)]


def fails_within(x):
    return Dataset.range(int(x) % 6).map(fails_at_four).flat_map(nested)


def fails_at_the_end(x):
    return Dataset.range(int(x) % 6).map(lambda y: fails_at_four(y % 5))


def fails_for_most(x):
    if x % 4:
        raise KeyError(int(x))
    return x


def opens_or_fails(x):
    if x % 3 == 2:
        raise ValueError(int(x))
    return Dataset.range(int(x) % 4)


ERRORS = {
    "map": lambda ds: ds.map(fails_at_four),
    "several of a split": lambda ds: ds.flat_map(lambda x: Dataset.range(9)).map(fails_at_four),
    "batches": lambda ds: ds.flat_map(lambda x: Dataset.range(9)).map(fails_at_four).batch(2),
    "failing filter": lambda ds: ds.filter(fails_at_four).flat_map(nested).enumerate(),
    "interleave": lambda ds: ds.interleave(fails_within, cycle_length=3),
    "at the ends": lambda ds: ds.interleave(fails_at_the_end, cycle_length=2).map(
        lambda x: -x, num_parallel_calls=2
    ),
    "nothing to open": lambda ds: ds.interleave(opens_or_fails, cycle_length=3),
    "nothing to open for": lambda ds: ds.map(fails_at_four).interleave(opened, cycle_length=3),
    "over an interleave": lambda ds: ds.interleave(opened, cycle_length=3).map(fails_at_four),
    "over what a filter left": lambda ds: (
        ds.interleave(opened, cycle_length=3, block_length=2)
        .filter(lambda x: bool(x % 3))
        .map(fails_at_four)
    ),
    "in a row, over an interleave": lambda ds: ds.interleave(
        lambda x: Dataset.range(x, x + 9), cycle_length=2
    ).map(fails_for_most),
    "over a shuffle": lambda ds: (
        ds.interleave(opened, cycle_length=3).shuffle(6).map(fails_at_four).batch(2)
    ),
    "over what is chosen": lambda ds: (
        ds.flat_map(opened).skip(3).take(30).shard(3, 1).map(fails_at_four, num_parallel_calls=2)
    ),
    "below a shuffle and over it": lambda ds: (
        ds.interleave(opened, cycle_length=3)
        .filter(fails_at_four)
        .shuffle(6)
        .map(lambda x: fails_at_four(x + 3))
    ),
    "over passes of nothing else": lambda ds: (
        ds.take(5).skip(4).flat_map(lambda x: Dataset.range(4, 5)).repeat(3).map(fails_at_four)
    ),
    "over shuffles end to end": lambda ds: (
        ds.flat_map(opened)
        .shuffle(6)
        .map(fails_at_four)
        .concatenate(ds.flat_map(opened).take(9).map(fails_at_four))
        .map(lambda x: fails_at_four(x + 3))
        .take(40)
        .map(lambda x: fails_at_four(x + 2))
    ),
    "over a shuffle of some": lambda ds: (
        ds.flat_map(opened)
        .shuffle(6)
        .map(fails_at_four)
        .concatenate(ds.flat_map(opened))
        .map(lambda x: fails_at_four(x + 3))
        .shuffle(4)
    ),
    "opened at the client": lambda ds: (
        ds.interleave(opened, cycle_length=3)
        .shuffle(6)
        .map(fails_at_four)
        .flat_map(lambda x: Dataset.range(int(x) % 3))
    ),
}


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_raised_in_their_turn_and_once(name, limit):
    plan = ERRORS[name](Dataset.range(12)).plan
    want, _ = read_with_errors(whole(plan), limit)
    got, states = read_with_errors(in_both_stages(plan), limit)
    assert got == want
    assert "error" in want
    for index in random.Random(limit).sample(range(len(states)), min(12, len(states))):
        again = in_both_stages(plan)
        again.set_state(states[index])
        assert read_with_errors(again, limit)[0] == want[index:]


def test_a_state_without_deferred_errors_continues_without_them():
    """The mode of the state has no deferred errors: failed elements were dropped before."""
    dataset = Dataset.range(3).flat_map(lambda x: Dataset.range(x * 10, x * 10 + 6))
    plan = dataset.shuffle(4, seed=5).take(12).map(fails_at_four).plan
    read_then = {
        "first_ordinal": 0,
        "num_read": 7,
        "failed": 2,
        "input": {"split": 0, "ordinal": 0},
    }
    state = {"count": 3, "input": {"drawn": 3, "emptied": 0, **read_then}}
    stages = build_both_stages(plan, "ordered + pushed down", seed=7)
    stages.set_state(state)
    got, _ = read_with_errors(stages, 1)
    assert got == [*map(str, [0, 3, 13, 14, 10, 20, 12, 22]), "error", "24"]
    made = partition_plan(plan, ordered=True, element_bytes=lambda node: 8)
    assert (made.mode, made.worker_mode) == (
        "ordered + pushed down + deferred errors",
        "ordered + pushed down",
    )


def slowly(x):
    time.sleep(0.002 if x % 3 == 0 else 0)
    return x + 1


@pytest.mark.parametrize(
    "steps",
    [
        lambda ds, **free: ds.flat_map(opened).map(slowly, num_parallel_calls=3, **free),
        lambda ds, **free: ds.interleave(opened, cycle_length=2).map(
            slowly, num_parallel_calls=3, **free
        ),
        lambda ds, **free: (
            ds.map(slowly, num_parallel_calls=2, **free)
            .interleave(opened, cycle_length=2, num_parallel_calls=2, **free)
            .shuffle(5)
            .map(slowly, num_parallel_calls=2, **free)
        ),
    ],
    ids=["flat_map", "interleave", "twice"],
)
@pytest.mark.parametrize("bound", [0, 1 << 30])
def test_in_ordered_mode_no_step_is_unordered_even_if_requested(steps, bound):
    want, _ = read(whole(steps(Dataset.range(9)).plan))
    assert (
        read(in_both_stages(steps(Dataset.range(9), deterministic=False).plan, bound=bound))[0]
        == want
    )


@pytest.mark.parametrize("limit", [1, 3, 16])
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("mode", ["ordered", "unordered"])
def test_a_batch_that_is_one_split_is_not_filled_from_the_next_split(mode, drop_remainder, limit):
    plan = Dataset.range(43).map(fails_at_four).batch(4, drop_remainder=drop_remainder).plan
    waiting = iter([(0, 3), (3, 8), (8, 11)])
    iterator = build_iterator(
        plan, seed=7, next_splits=lambda: next(waiting, None), with_element_ids=True, mode=mode
    )
    found, _ = read_with_errors(iterator, limit)
    rows = [
        [x for x in range(4 * split, min(4 * split + 4, 43)) if x % 7 != 4] for split in range(11)
    ]
    assert [each for each in found if each != "error"] == [
        repr(each) for each in rows[: 10 if drop_remainder else 11]
    ]
    assert found.count("error") == 6


UNORDERED = {
    "batches of a filter": lambda ds: ds.filter(lambda x: bool(x % 3)).batch(4),
    "remainders dropped": lambda ds: (
        ds.filter(lambda x: bool(x % 3)).batch(4, drop_remainder=True).map(lambda x: x + 1)
    ),
    "shuffled, taken": lambda ds: ds.flat_map(opened).shuffle(7).take(1000),
    "taken apart": lambda ds: ds.flat_map(opened).batch(4).map(lambda x: x * 2).unbatch(),
    "repeated": lambda ds: ds.interleave(drawn, cycle_length=3).repeat(2).batch(3),
}


@pytest.mark.parametrize("name", UNORDERED)
@pytest.mark.parametrize("workers", [1, 3])
def test_in_unordered_mode_both_stages_yield_the_elements_of_the_plan(name, workers):
    dataset = UNORDERED[name](Dataset.range(20))
    made = partition_plan(dataset.plan, ordered=False)
    assert not made.is_ordered
    each = -(-made.num_splits // workers)
    chunks = []
    for first in range(0, made.num_splits, each):
        waiting = iter([(first, min(first + each, made.num_splits))])
        iterator = build_iterator(
            dataset.plan,
            seed=7,
            next_splits=lambda waiting=waiting: next(waiting, None),
            with_element_ids=True,
            mode=made.mode,
        )
        while (chunk := iterator.next_chunk(3)) is not None:
            assert element_id_runs(chunk)
            chunks.append(chunk)
    above = transform(
        made.client_stage,
        lambda node: (
            FromSource(source=ElementListSource([row for chunk in chunks for row in chunk.rows()]))
            if isinstance(node, ReadSplits)
            else node
        ),
    )
    got, want = (elements_in(build_iterator(plan, seed=7)) for plan in (above, dataset.plan))
    if name == "remainders dropped":
        assert len(got) == len(want)
    else:
        assert got == want


def elements_in(iterator):
    """Return the numbers in all elements, batches or not, in order of size."""
    found = []
    while (chunk := iterator.next_chunk(9)) is not None:
        found += [int(x) for row in chunk.rows() for x in np.ravel(row)]
    iterator.close()
    return sorted(found)


SINGLE_PROCESS = {
    "rows": lambda ds: ds.map(odd_or_half),
    "batches of rows": lambda ds: ds.map(odd_or_half).batch(3),
    "a filter, batched": lambda ds: ds.filter(lambda x: bool(x % 3)).batch(2),
    "a filter, shuffled": lambda ds: ds.filter(lambda x: bool(x % 3)).shuffle(4).take(9),
    "passes": lambda ds: ds.filter(lambda x: bool(x % 3)).shuffle(4).repeat(2).enumerate(),
    "rows of parts": lambda ds: Dataset.from_source(Parts()).map(odd_or_half).enumerate().batch(4),
}


class Parts(hr.Source):
    """Five indices of 0 to 4 numbers."""

    size = 5

    def open(self, start, stop, position=None, *, pass_number=()):
        return hr.Dataset.range(start).plan.source.open(position or 0, start)


@pytest.mark.parametrize("name", SINGLE_PROCESS)
def test_a_state_of_a_single_process_is_accepted(name):
    dataset = SINGLE_PROCESS[name](Dataset.range(14).shuffle(5))
    want, states = read(whole(dataset.plan), random.Random(3))
    for index, state in enumerate(states):
        stages = in_both_stages(dataset.plan)
        stages.set_state(state)
        assert read(stages)[0] == want[index:]


@pytest.mark.parametrize(
    "steps",
    [
        lambda ds: ds.flat_map(opened).shuffle(3),
        lambda ds: ds.interleave(opened, cycle_length=2),
        lambda ds: Dataset.from_source(Parts()).filter(lambda x: bool(x % 2)).enumerate(),
    ],
    ids=["flat_map", "interleave", "filtered parts"],
)
def test_a_state_within_a_split_without_an_element_count_is_rejected(steps):
    plan = steps(Dataset.range(9)).plan
    iterator = whole(plan)
    iterator.next_chunk(1)
    state = iterator.get_state()
    iterator.close()
    with pytest.raises(FailedPreconditionError, match="in the middle of"):
        in_both_stages(plan).set_state(state)
