"""In order, steps over a shuffle of values run on workers where what it holds fits the client."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import UserFunctionError
from headrace.plan.elements import FromSource
from headrace.service import LocalCluster, ShardingPolicy, distribute
from headrace.service.modes.ordered.ordered_partition import OrderedPartition

pytestmark = pytest.mark.system

DYNAMIC = ShardingPolicy.DYNAMIC


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with LocalCluster(num_workers=2) as cluster:
        yield cluster.target


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(100 * number, 100 * number + number % 5 + 3)


READ = hr.Dataset.range(30).interleave(opened, cycle_length=4, block_length=2)


def spread(number: int, size: int = 8) -> np.ndarray:
    return np.full(size, int(number))


def made_by(number: int) -> np.ndarray:
    return np.array([int(number), os.getpid()])


HALVES = ["ordered", "ordered + pushed down", "ordered + pushed down + deferred errors"]
SHUFFLED = READ.shuffle(25).with_options(hr.Options(seed=5))


def in_order(dataset: hr.Dataset, service: str, job: str | None = None, **terms: Any) -> hr.Dataset:
    return dataset.apply(distribute(DYNAMIC, service, job, ordered=True, **terms))


def cut_of(served: hr.Dataset) -> OrderedPartition:
    plan = served.plan
    assert isinstance(plan, FromSource)
    chosen = plan.source.ordered_partition
    assert isinstance(chosen, OrderedPartition)
    return chosen


def kept_at(half: str, served: hr.Dataset) -> hr.Dataset:
    """Return a dataset that is cut in a way, whatever would be measured."""
    cut_of(served).fix_mode(half)
    return served


def lists(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def test_a_function_with_small_elements_is_called_only_by_workers(service: str) -> None:
    dataset = SHUFFLED.map(made_by).batch(4)
    served = in_order(dataset, service)
    assert re.search(r"workers +map ", served.explain())
    assert "16 bytes per element, measured" in served.explain()
    got, want = lists(served), lists(dataset)
    assert [[row[0] for row in batch] for batch in got] == [
        [row[0] for row in batch] for batch in want
    ]
    makers = {row[1] for batch in got for row in batch}
    assert os.getpid() not in makers


def test_an_unordered_plan_that_falls_back_to_order_is_pushed_down(service: str) -> None:
    dataset = SHUFFLED.take(20).repeat().take(60).map(made_by)
    served = dataset.apply(distribute(DYNAMIC, service))
    assert os.getpid() not in {row[1] for row in lists(served)}


def test_elements_too_large_for_the_shuffle_are_computed_here(service: str) -> None:
    dataset = READ.shuffle(1 << 30, seed=1).map(made_by)
    served = in_order(dataset, service)
    assert re.search(r"client +map .*would exceed the memory limit", served.explain())
    assert [row[0] for row in lists(served)] == [row[0] for row in lists(dataset)]
    assert {row[1] for row in lists(served)} == {os.getpid()}


def not_at(pid: int, number: int) -> int:
    if os.getpid() == pid:
        raise OSError("no such device")
    return number


def test_a_function_that_fails_here_stays_here_and_fails_as_before(service: str) -> None:
    dataset = SHUFFLED.map(functools.partial(not_at, os.getpid()))
    served = in_order(dataset, service)
    assert re.search(r"client +map ", served.explain())
    assert re.search(r"unknown element size: .*OSError", served.explain())
    with pytest.raises(UserFunctionError, match="no such device"):
        next(iter(served))


@pytest.mark.parametrize("first", HALVES)
def test_a_state_resumes_with_its_own_partition_mode(first: str, service: str) -> None:
    second = "ordered + pushed down + deferred errors" if first == "ordered" else "ordered"
    dataset = SHUFFLED.map(spread).batch(3)
    want = lists(dataset)
    with iter(kept_at(first, in_order(dataset, service))) as iterator:
        got = lists(next(iterator) for _ in range(7))
        state = json.loads(json.dumps(iterator.get_state()))
    assert state["position"]["partition_mode"] == first
    for going_on in (kept_at(second, in_order(dataset, service)), in_order(dataset, service)):
        there = iter(going_on)
        there.set_state(state)
        rest = lists(next(there) for _ in range(4))
        after = json.loads(json.dumps(there.get_state()))
        assert got + rest + lists(there) == want
        here = iter(dataset)
        here.set_state(after)
        assert got + rest + lists(here) == want
    assert cut_of(going_on).mode == "ordered + pushed down + deferred errors", (
        "the state of one reading decides nothing"
    )


def test_all_epochs_of_a_named_job_have_one_partition(service: str) -> None:
    dataset = SHUFFLED.map(spread)
    with iter(kept_at("ordered", in_order(dataset, service))) as iterator:
        got = lists(next(iterator) for _ in range(7))
        state = iterator.get_state()
    served = in_order(dataset, service, "all passes")
    iterator = iter(served)
    iterator.set_state(state)
    assert got + lists(iterator) == lists(dataset)
    again = iter(dataset)
    assert len(list(served)) == len(list(again))
    assert cut_of(served).mode == "ordered"


def test_a_single_process_position_resumes_with_any_partition_mode(service: str) -> None:
    dataset = hr.Dataset.range(60).filter(lambda x: x % 3 > 0).shuffle(9, seed=2).map(spread)
    want = lists(dataset)
    here = iter(dataset)
    here.set_state({**here.get_state(), "epoch": 0})
    got = lists(next(here) for _ in range(11))
    state = here.get_state()
    for half in HALVES:
        there = iter(kept_at(half, in_order(dataset, service)))
        there.set_state(state)
        assert got + lists(there) == want
    any_order = iter(dataset.apply(distribute(DYNAMIC, service)))
    any_order.set_state(state)
    assert got + lists(any_order) == want


def test_consumers_with_different_partitions_share_one_order(service: str) -> None:
    dataset = SHUFFLED.map(spread).batch(3)
    want = lists(dataset)
    rounds = len(want) // 2
    consumers = [
        in_order(dataset, service, "chose otherwise", consumer_index=index, num_consumers=2)
        for index in range(2)
    ]
    kept_at("ordered", consumers[0])
    assert re.search(r"workers +map ", consumers[1].explain())
    states = []
    for index, consumer in enumerate(consumers):
        iterator = iter(consumer)
        first = lists(next(iterator) for _ in range(4))
        states.append(iterator.get_state())
        assert first + lists(iterator) == want[index : 2 * rounds : 2]
    assert [state["position"]["partition_mode"] for state in states] == [
        "ordered",
        "ordered + pushed down + deferred errors",
    ]
    again = [
        in_order(dataset, service, "went on", consumer_index=index, num_consumers=2)
        for index in range(2)
    ]
    for index, consumer in enumerate(again):
        iterator = iter(consumer)
        iterator.set_state(states[1 - index])
        assert lists(iterator) == want[8 + index : 2 * rounds : 2]


def test_functions_are_measured_once_at_the_first_epoch(service: str) -> None:
    calls = []

    def noted(number: int) -> int:
        calls.append(number)
        return number

    served = in_order(SHUFFLED.map(noted), service)
    iterator = iter(served)
    assert not calls
    next(iterator)
    assert len(calls) == 4
    assert len(list(served)) == len(list(SHUFFLED))
    served.explain()
    assert len(calls) == 4
