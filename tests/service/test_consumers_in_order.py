"""Consumer i of n gets elements i, i + n, ... of the order of one process, whoever is killed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
    from_dataset_id,
    register_dataset,
)

pytestmark = pytest.mark.system

DYNAMIC = ShardingPolicy.DYNAMIC


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(number % 7 + 2).map(lambda each: each + 100 * number)


def slowly(number: int) -> int:
    time.sleep(0.001)
    return number


PLANS: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(200).shuffle(50, seed=3).map(slowly).batch(4),
    "files": lambda: hr.Dataset.range(50).interleave(opened, cycle_length=3).batch(3),
    "a filter": lambda: hr.Dataset.range(300).filter(lambda x: x % 3 > 0).batch(4),
    "shuffled values": lambda: hr.Dataset.range(50).flat_map(opened).shuffle(30, seed=1).batch(5),
}


def lists(elements: Any) -> list[list[int]]:
    return [np.ravel(element).tolist() for element in elements]


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with DispatchServer(DispatcherConfig(client_timeout_ms=3000)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)), WorkerServer(WorkerConfig(address)):
            yield address


def shares(
    dataset: hr.Dataset, service: str, job: str, consumers: int, **terms: Any
) -> list[hr.Dataset]:
    return [
        dataset.apply(
            distribute(
                DYNAMIC,
                service,
                job,
                consumer_index=index,
                num_consumers=consumers,
                ordered=True,
                **terms,
            )
        )
        for index in range(consumers)
    ]


@pytest.mark.parametrize("plan", PLANS)
def test_each_consumer_gets_its_elements_though_workers_are_killed(plan: str) -> None:
    dataset = PLANS[plan]()
    expected = lists(dataset)
    rounds = len(expected) // 2
    with LocalCluster(num_workers=2) as cluster:
        first, second = (iter(each) for each in shares(dataset, cluster.target, "job", 2))
        one = lists(next(first) for _ in range(5))
        cluster.add_worker()
        cluster.kill_worker(0)
        one += lists(first)  # the other one lags by an epoch: it keeps nobody from anything
        two = lists(next(second) for _ in range(5))
        cluster.kill_worker(1)
        two += lists(second)
    assert one == expected[: 2 * rounds : 2]
    assert two == expected[1 : 2 * rounds : 2]


@pytest.mark.parametrize("rows", [46, 48, 49, 50])
@pytest.mark.parametrize("kind", ["of known length", "of mapped rows", "of a filter"])
def test_the_end_is_as_the_remainder_says(kind: str, rows: int, service: str) -> None:
    rows_of: dict[str, Any] = {
        "of known length": lambda data: data,
        "of mapped rows": lambda data: data.shuffle(9, seed=1).map(lambda x: x + 7),
        "of a filter": lambda data: data.filter(lambda x: x >= 0),
    }
    dataset = rows_of[kind](hr.Dataset.range(rows)).batch(4)
    whole = lists(dataset)
    rounds = len(whole) // 3
    last = whole[3 * rounds :]
    for remainder in ("drop", "pad", "end_together"):
        job = f"{kind} {rows} {remainder}"
        got = [lists(each) for each in shares(dataset, service, job, 3, remainder=remainder)]
        assert [each[:rounds] for each in got] == [whole[i : 3 * rounds : 3] for i in range(3)]
        ends = [each[rounds:] for each in got]
        if remainder == "drop" or not last:
            assert ends == [[], [], []]
        elif remainder == "pad":
            assert ends == [[each] for each in [*last, [], []][:3]]
        else:
            parts = np.array_split(np.concatenate(last), 3)
            assert ends == [[part.tolist()] for part in parts]


@pytest.mark.parametrize("plan", ["index part", "values"])
def test_consumers_draw_from_one_seed_and_each_pass_has_its_order(plan: str, service: str) -> None:
    make = hr.Dataset.range(60).shuffle(60)
    if plan == "values":
        make = hr.Dataset.range(60).filter(lambda x: x >= 0).shuffle(60)
    passes = []
    first, second = shares(make, service, f"seed {plan}", 2)
    for _ in range(2):
        one, two = lists(first), lists(second)
        assert sorted(each for (each,) in one + two) == list(range(60))
        passes.append(one)
    assert passes[0] != passes[1]


@pytest.mark.parametrize("plan", PLANS)
def test_a_place_is_that_of_one_process_for_any_number_of_consumers(plan: str) -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        go_on_from_a_place(plan, cluster.target)


def go_on_from_a_place(plan: str, service: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dataset = PLANS[plan]()
    expected = lists(dataset)
    steps = random.Random(seed).randrange(1, 8)
    states = []
    for each in shares(dataset, service, f"place {plan} {seed}", 2):
        with iter(each) as iterator:
            for _ in range(steps):
                next(iterator)
            states.append(json.dumps(iterator.get_state()))
    left = expected[2 * steps :]
    again = [iter(each) for each in shares(dataset, service, f"again {plan} {seed}", 3)]
    for index, iterator in enumerate(again):
        iterator.set_state(json.loads(states[index % 2]))  # all name the same place
        assert lists(iterator) == left[index : len(left) // 3 * 3 : 3]
    for state in states:
        here = iter(dataset)
        here.set_state(json.loads(state))
        assert lists(here) == left


def test_consumer_0_goes_on_from_its_state_in_the_same_job_after_it_was_gone(service: str) -> None:
    dataset = PLANS["files"]()
    expected = lists(dataset)
    first, second = shares(dataset, service, "returns", 2)
    iterator = iter(first)
    got = lists(next(iterator) for _ in range(6))
    state = iterator.get_state()
    iterator.close()
    assert lists(second) == expected[1 : len(expected) // 2 * 2 : 2]
    iterator = iter(first)
    iterator.set_state(state)
    assert got + lists(iterator) == expected[: len(expected) // 2 * 2 : 2]


def test_consumers_that_differ_are_refused() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        refuse_those_that_differ(cluster.target)


def refuse_those_that_differ(service: str) -> None:
    dataset = PLANS["rows"]()
    first, _ = shares(dataset, service, "differ", 2)
    others = [
        shares(dataset, service, "differ", 3)[1],
        shares(dataset, service, "differ", 2, remainder="pad")[1],
        shares(dataset.map(lambda x: x), service, "differ", 2)[1],
    ]
    with iter(first) as iterator:
        next(iterator)
        for other in others:
            with pytest.raises(AlreadyExistsError, match=r"'differ' .* other terms"):
                next(iter(other))


def test_a_bucket_and_a_cost_function_are_refused(service: str) -> None:
    bucketed = hr.Dataset.range(30).bucket_by_sequence_length(lambda x: x, [10, 20], [2, 2, 2])
    with pytest.raises(FailedPreconditionError, match=r"bucket_by_sequence_length.* several"):
        shares(bucketed, service, "bucket", 2)
    with pytest.raises(ValueError, match="cost_fn"):
        shares(PLANS["rows"](), service, "cost", 2, cost_fn=len)


def test_what_was_registered_is_read_by_its_id(service: str) -> None:
    dataset = PLANS["rows"]()
    name = register_dataset(service, dataset)
    got = [
        lists(
            from_dataset_id(
                DYNAMIC,
                service,
                name,
                job_name="by id",
                consumer_index=index,
                num_consumers=2,
                ordered=True,
            )
        )
        for index in range(2)
    ]
    expected = lists(dataset)
    assert got == [expected[::2], expected[1::2]]


def test_workers_make_each_consumer_only_its_own_where_they_can(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    (first, _) = shares(PLANS["rows"](), service, "own", 2)
    assert not caplog.records
    lists(first)
    shares(PLANS["a filter"](), service, "all", 2)
    assert "all are made for each of the consumers" in caplog.text
