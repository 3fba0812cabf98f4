"""Unordered positions, which count returned elements and can be resumed by any reader."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import DeadlineExceededError, FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute
from tests.service.reading import slowly

pytestmark = pytest.mark.system

DYNAMIC = ShardingPolicy.DYNAMIC


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(number % 7 + 2).map(lambda each: each + 100 * number)


PLANS: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(700).map(lambda x: x + 1),
    "shuffled rows": lambda: hr.Dataset.range(700).shuffle(100).map(lambda x: x + 1),
    "batches": lambda: hr.Dataset.range(700).shuffle(30).map(lambda x: x + 1).batch(7),
    "files": lambda: hr.Dataset.range(90).interleave(opened, cycle_length=3, block_length=2),
    "a filter": lambda: hr.Dataset.range(90).flat_map(opened).filter(lambda x: x % 5 < 2),
    "batches of a filter": lambda: (
        hr.Dataset.range(90).flat_map(opened).filter(lambda x: x % 5 < 3).batch(4)
    ),
    "shuffled values": lambda: hr.Dataset.range(90).flat_map(opened).shuffle(40),
    "batches of shuffled values": lambda: (
        hr.Dataset.range(90).flat_map(opened).shuffle(40).batch(6)
    ),
    "repeated": lambda: hr.Dataset.range(40).flat_map(opened).repeat(3),
    "one unit": lambda: hr.Dataset.zip(
        hr.Dataset.range(60).filter(lambda x: x % 2 > 0), hr.Dataset.range(30)
    ).map(lambda odd, number: odd * 100 + number),
}


def numbers_of(elements: Any) -> list[int]:
    return [int(each) for element in elements for each in np.ravel(element)]


def taken(iterator: Any, count: int) -> list[int]:
    """Return the numbers in the next elements; fewer at the end."""
    return numbers_of(element for _, element in zip(range(count), iterator, strict=False))


@pytest.mark.parametrize("plan", PLANS)
def test_any_position_resumes_on_other_workers_and_in_one_process(plan: str, service: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    make = PLANS[plan]
    everything = Counter(numbers_of(make()))
    count = len(list(make()))
    with LocalCluster(num_workers=1, processes=False) as other:
        elsewhere = make().apply(distribute(DYNAMIC, other.target))
        for number in [0, chance.randrange(1, count - 1), count]:
            iterator = iter(make().apply(distribute(DYNAMIC, service)))
            first = taken(iterator, number)
            state = json.dumps(iterator.get_state())
            iterator.close()
            there = iter(elsewhere)
            there.set_state(json.loads(state))
            some = taken(there, 1 + chance.randrange(3))
            then = json.dumps(there.get_state())
            there.close()
            here = iter(make())
            here.set_state(json.loads(then))
            more = taken(here, chance.randrange(4))
            back = json.dumps(here.get_state())
            here.close()
            again = iter(elsewhere)
            again.set_state(json.loads(back))
            rest = numbers_of(again)
            assert Counter(first + some + more + rest) == everything
            assert Counter(first + numbers_of(restored(make(), state))) == everything


def restored(dataset: hr.Dataset, state: str) -> Any:
    iterator = iter(dataset)
    iterator.set_state(json.loads(state))
    return iterator


def test_a_state_of_rows_is_small_at_any_position(service: str) -> None:
    dataset = hr.Dataset.range(100_000).shuffle(1000).map(lambda x: x)
    iterator = iter(dataset.apply(distribute(DYNAMIC, service)))
    for count in (1, 5000, 60_000):
        taken(iterator, count)
        state = iterator.get_state()
        assert state["position"].keys() == {"positions"}
        assert len(json.dumps(state)) < 8192
    iterator.close()


def test_elements_held_by_prefetch_and_batch_are_not_counted(service: str) -> None:
    over = hr.Dataset.range(500).map(lambda x: x).apply(distribute(DYNAMIC, service))
    dataset = over.map(lambda x: x * 2).batch(8).prefetch(5)
    iterator = iter(dataset)
    first = taken(iterator, 13)
    state = json.dumps(iterator.get_state())
    iterator.close()
    rest = numbers_of(restored(dataset, state))
    assert sorted(first + rest) == [2 * number for number in range(500)]


@pytest.mark.parametrize("step", [lambda ds: ds.shuffle(10), lambda ds: ds.unbatch()])
def test_a_buffering_step_over_unordered_elements_has_no_state(step: Any, service: str) -> None:
    over = hr.Dataset.range(60).batch(5).apply(distribute(DYNAMIC, service))
    iterator = iter(step(over))
    next(iterator)
    with pytest.raises(FailedPreconditionError, match=r"(shuffle|unbatch).* buffers elements"):
        iterator.get_state()
    iterator.close()


@pytest.mark.parametrize("plan", ["rows", "shuffled rows", "batches"])
def test_a_single_process_state_resumes_over_the_service(plan: str, service: str) -> None:
    make = PLANS[plan]
    iterator = iter(make())
    first = taken(iterator, 11)
    state = json.dumps(iterator.get_state())
    dataset = make().apply(distribute(DYNAMIC, service))
    there = restored(dataset, state)
    some = taken(there, 3)
    later = json.dumps(there.get_state())
    there.close()
    rest = numbers_of(restored(dataset, later))
    assert Counter(first + some + rest) == Counter(first + numbers_of(iterator))


def test_an_unordered_state_is_rejected_by_ordered_reading(service: str) -> None:
    dataset = PLANS["files"]()
    iterator = iter(dataset.apply(distribute(DYNAMIC, service)))
    taken(iterator, 9)
    state = iterator.get_state()
    iterator.close()
    in_order = iter(dataset.apply(distribute(DYNAMIC, service, ordered=True)))
    with pytest.raises(FailedPreconditionError, match="restore it without `ordered=True`"):
        in_order.set_state(state)


def test_a_state_counts_returned_elements_although_workers_are_killed() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    dataset = hr.Dataset.range(60).interleave(opened, cycle_length=3).map(slowly)
    everything = Counter(numbers_of(dataset))
    with LocalCluster(num_workers=2) as cluster:
        over = dataset.apply(distribute(DYNAMIC, cluster.target))
        got: list[int] = []
        iterator = iter(over)
        for turn in range(3):
            got += taken(iterator, chance.randrange(20, 70))
            cluster.add_worker()
            cluster.kill_worker(turn)
            got += taken(iterator, chance.randrange(5))
            state = json.dumps(iterator.get_state())
            iterator.close()
            iterator = restored(over, state)
        got += numbers_of(iterator)
    assert Counter(got) == everything


def test_a_state_with_another_number_of_splits_is_rejected(service: str) -> None:
    rows = np.arange(400)
    iterator = iter(hr.Dataset.from_tensor_slices(rows).apply(distribute(DYNAMIC, service)))
    taken(iterator, 390)
    state = iterator.get_state()
    iterator.close()
    state["position"]["positions"]["delivered"] = [[395, 420]]
    again = restored(hr.Dataset.from_tensor_slices(rows), json.dumps(state))
    with pytest.raises(FailedPreconditionError, match=r"splits up to 420, but the dataset has 400"):
        next(again)


@pytest.mark.parametrize(
    ("mode", "visitation"),
    [(ShardingPolicy.OFF, None), (ShardingPolicy.DYNAMIC, "at_most_once")],
)
def test_a_state_without_exactly_once_is_rejected_with_the_fix(
    mode: ShardingPolicy, visitation: str | None, service: str
) -> None:
    dataset = hr.Dataset.range(60).apply(distribute(mode, service, visitation=visitation))
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(FailedPreconditionError, match=r"delivered exactly once.*Use Sharding"):
        iterator.get_state()
    iterator.close()


@pytest.mark.parametrize("plan", ["rows", "files", "shuffled values"])
def test_clients_of_a_job_get_one_state_that_any_number_resumes(plan: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    dataset = PLANS[plan]()
    everything = Counter(numbers_of(dataset))
    got: list[int] = []
    with LocalCluster(num_workers=2, processes=False) as cluster:
        clients = [iter(one_of(dataset, cluster)) for _ in range(3)]
        for iterator in clients:
            got += taken(iterator, 1)
        for iterator in clients:
            got += taken(iterator, chance.randrange(30))
        states = in_parallel([each.get_state for each in clients])
        assert states[0] == states[1] == states[2]
        # A second time, at another step.
        got += taken(clients[1], 5)
        again = in_parallel([each.get_state for each in clients])
        assert again[0] == again[1] == again[2] != states[0]
        state = json.dumps(again[0])
        for iterator in clients:
            iterator.close()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        first, second = (restored(one_of(dataset, cluster), state) for _ in range(2))
        more = taken(first, 1) + taken(second, 1)
        other = restored(one_of(dataset, cluster), json.dumps(states[0]))
        with pytest.raises(FailedPreconditionError, match="another saved state"):
            next(other)
        with pytest.raises(FailedPreconditionError, match="starts from the beginning"):
            next(iter(one_of(dataset, cluster)))
        rests = in_parallel([lambda: numbers_of(first), lambda: numbers_of(second)])
        more += [number for rest in rests for number in rest]
    assert Counter(got + more) == everything
    assert Counter(got + numbers_of(restored(dataset, state))) == everything


def one_of(dataset: hr.Dataset, cluster: LocalCluster, **terms: Any) -> hr.Dataset:
    """Return what one of several clients of a job reads."""
    return dataset.apply(distribute(DYNAMIC, cluster.target, "job", **terms))


def in_parallel(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60.0) for future in [pool.submit(call) for call in calls]]


def test_a_client_without_a_contributed_position_is_named() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = PLANS["rows"]()
        first, second = (iter(one_of(dataset, cluster, wait_timeout=0.5)) for _ in range(2))
        taken(first, 3)
        taken(second, 3)
        with pytest.raises(
            DeadlineExceededError, match=r"waited 0\.5 s for the positions of .*-\d+-"
        ):
            first.get_state()
        second.close()
        with pytest.raises(FailedPreconditionError, match="1 of 2 clients have left"):
            first.get_state()
        first.close()


def five() -> Iterator[int]:
    yield from range(5)


OTHER_TERMS: dict[str, Any] = {
    # In one process such a place counts what is read, and over the service what is given.
    "a filter over a generator": lambda: hr.Dataset.range(2).interleave(
        lambda _: hr.Dataset.from_generator(five).filter(lambda x: x % 2 == 0), cycle_length=2
    ),
    "a filter over positions": lambda: hr.Dataset.range(2).interleave(
        lambda _: hr.Dataset.range(9).filter(lambda x: x % 3 > 0), cycle_length=2
    ),
    "units that are kept": lambda: (
        hr.Dataset.range(3).cache().interleave(lambda x: hr.Dataset.range(x, 9), cycle_length=2)
    ),
}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("plan", OTHER_TERMS)
def test_a_single_process_position_resumes_exactly_or_is_rejected(
    service: str, plan: str, ordered: bool
) -> None:
    dataset = OTHER_TERMS[plan]()
    whole = numbers_of(dataset)
    for count in range(len(whole) + 1):
        with iter(dataset) as here:
            taken(here, count)
            state = here.get_state()
        remote = dataset.apply(distribute(DYNAMIC, service, ordered=ordered))
        with iter(remote) as there:
            try:
                there.set_state(state)
                rest = numbers_of(there)
            except FailedPreconditionError:
                continue
        assert sorted(rest) == sorted(whole[count:]), (count, state)
        assert not ordered or rest == whole[count:], (count, state)
