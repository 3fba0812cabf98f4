"""Consumer i of n gets elements i, i + n, ... of the order of one process, whoever is killed."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, FailedPreconditionError, UserFunctionError
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
from tests.service.counting_functions import CALLS, note
from tests.service.reading import slowly

pytestmark = pytest.mark.system

DYNAMIC = ShardingPolicy.DYNAMIC


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(number % 7 + 2).map(lambda each: each + 100 * number)


PLANS: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(200).shuffle(50, seed=3).map(slowly).batch(4),
    "rows without the rest": lambda: (
        hr.Dataset.range(203).shuffle(50, seed=3).map(slowly).batch(4, drop_remainder=True)
    ),
    "files": lambda: hr.Dataset.range(50).interleave(opened, cycle_length=3).batch(3),
    "a filter": lambda: hr.Dataset.range(300).filter(lambda x: x % 3 > 0).batch(4),
    "shuffled values": lambda: hr.Dataset.range(50).flat_map(opened).shuffle(30, seed=1).batch(5),
}


def lists(elements: Any) -> list[list[int]]:
    return [np.ravel(element).tolist() for element in elements]


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
            with pytest.raises(
                AlreadyExistsError, match=r"'differ' .* different options"
            ) as refused:
                next(iter(other))
        assert "the datasets differ: step 5 is map " in str(refused.value)
        whole = dataset.apply(distribute(DYNAMIC, service, "differ", ordered=True))
        with pytest.raises(AlreadyExistsError, match=r"'differ' .* `num_consumers`"):
            next(iter(whole))


@pytest.mark.parametrize("plan", ["rows", "a filter"])
def test_a_consumer_that_is_read_already_or_was_is_refused(plan: str) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = PLANS[plan]()

        def consumer() -> hr.DatasetIterator:
            return iter(shares(dataset, cluster.target, "taken", 2)[0])

        with consumer() as iterator:
            next(iterator)
            state = iterator.get_state()
            with pytest.raises(
                FailedPreconditionError, match=r"each `consumer_index` has one client"
            ):
                next(consumer())
        with pytest.raises(FailedPreconditionError, match=r"which has departed: .*`set_state`"):
            next(consumer())
        with consumer() as iterator:
            iterator.set_state(state)
            next(iterator)


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
    assert re.search(r"computed 2 times, .* after filter \(\S*test_ordered", caplog.text)


def counted(number: int) -> int:
    note("of consumers")
    return number


def test_batches_that_drop_the_rest_are_computed_once(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = hr.Dataset.range(161).map(counted).batch(8, drop_remainder=True).map(lambda x: x + 1)
    both = shares(dataset, service, "without the rest", 2)
    got = [row for each in both for batch in lists(each) for row in batch]
    assert sorted(got) == list(range(1, 161))
    assert CALLS["of consumers"] == 160
    assert not caplog.records
    assert "each element is computed once" in both[0].explain()


def test_explain_names_the_step_after_which_elements_are_computed_for_each_consumer(
    service: str,
) -> None:
    dataset = hr.Dataset.range(30).map(slowly).filter(lambda x: x % 3 > 0).batch(4)
    (first, _) = shares(dataset, service, "explained", 2)
    words = r"computed 2 times, once for each consumer: .* after filter \(\S*test_ordered_consumers"
    assert re.search(words, first.explain())


# --- errors and places ---------------------------------------------------------------------------


def fails_on_fours(number: int) -> int:
    if int(number) % 10 == 4:
        raise ValueError(f"no {int(number)}")
    return number


FAILING: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(16).map(fails_on_fours),
    "batches with a row that fails": lambda: hr.Dataset.range(32).map(fails_on_fours).batch(4),
    "batches that fail": lambda: (
        hr.Dataset.range(32).batch(4).map(lambda batch: batch + 0 * fails_on_fours(batch[0]))
    ),
    "a filter": lambda: hr.Dataset.range(30).filter(lambda x: x % 2 == 0).map(fails_on_fours),
    "datasets": lambda: hr.Dataset.range(4).flat_map(
        lambda n: hr.Dataset.range(5).map(lambda each: fails_on_fours(each + n * 5))
    ),
    "batches of one": lambda: hr.Dataset.range(16).map(fails_on_fours).batch(1),
}


def pulled(iterator: Iterator[Any], most: int = 1000) -> list[Any]:
    """Return what comes next: elements, and what errors say."""
    got: list[Any] = []
    while len(got) < most:
        try:
            got.append(np.ravel(next(iterator)).tolist())
        except StopIteration:
            break
        except UserFunctionError as error:
            got += re.findall(r"no \d+", str(error))[:1]
    return got


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("plan", FAILING)
def test_a_state_after_an_error_goes_on_with_what_was_left(plan: str, index: int) -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        go_on_after_each_error(plan, index, cluster.target)


def go_on_after_each_error(plan: str, index: int, service: str) -> None:
    dataset = FAILING[plan]()
    job = f"failing {plan} {index}"
    with iter(shares(dataset, service, job, 2)[index]) as iterator:
        whole = pulled(iterator)
    after_errors = [at + 1 for at, each in enumerate(whole) if isinstance(each, str)]
    assert after_errors or (plan, index) == ("rows", 1)
    for steps in sorted({each for at in after_errors for each in (at, at + 1)}):
        with iter(shares(dataset, service, f"{job} {steps}", 2)[index]) as iterator:
            before = pulled(iterator, steps)
            state = json.dumps(iterator.get_state())
        assert before == whole[:steps]
        with iter(shares(dataset, service, f"{job} {steps} again", 2)[index]) as iterator:
            iterator.set_state(json.loads(state))
            assert iterator.get_state() == json.loads(state)
            assert pulled(iterator) == whole[steps:]


@pytest.mark.parametrize("plan", ["rows", "a filter", "datasets"])
def test_one_process_goes_on_from_a_state_after_an_error_without_a_loss(plan: str) -> None:
    dataset = FAILING[plan]()
    before: list[Any] = []
    with (
        LocalCluster(num_workers=1, processes=False) as cluster,
        iter(shares(dataset, cluster.target, "error", 2)[0]) as iterator,
    ):
        while not before or not isinstance(before[-1], str):
            before += pulled(iterator, 1)
        state = iterator.get_state()
    here = iter(dataset)
    here.set_state(state)
    given = [each for each in pulled(iter(dataset)) if not isinstance(each, str)]
    rest = [each for each in pulled(here) if not isinstance(each, str)]
    # A row that fails has its place in a round; its neighbour came to the other consumer.
    rounds = len(before) - 1
    assert rest == given[2 * rounds + (plan == "rows") :]


def test_errors_of_the_last_elements_alone_come_with_them() -> None:
    dataset = hr.Dataset.range(46).map(fails_on_fours).batch(2)  # 21 batches, and 2 more
    ends = {
        "pad": [[42, 43], [45], []],
        "end_together": [[42], [43], [45]],
    }
    with LocalCluster(num_workers=1, processes=False) as cluster:
        for remainder, expected in ends.items():
            parts = shares(dataset, cluster.target, remainder, 3, remainder=remainder)
            for each, last in zip(parts, expected, strict=True):
                assert pulled(iter(each))[-2:] == ["no 44", last]


def test_the_last_elements_come_after_a_round_that_failed_as_a_whole() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = (
            hr.Dataset.range(52)
            .batch(4)
            .map(lambda batch: batch + 0 * fails_on_fours(batch[0]))  # batches 1, 6 and 11 fail
        )
        first, second = shares(dataset, cluster.target, "whole", 2, remainder="pad")
        last = [48, 49, 50, 51]
        assert pulled(iter(first))[-2:] == [[40, 41, 42, 43], last]
        assert pulled(iter(second))[-3:] == [[36, 37, 38, 39], "no 44", []]


# --- seeds ---------------------------------------------------------------------------------------


SHUFFLED: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(40).shuffle(40),
    "values": lambda: hr.Dataset.range(40).filter(lambda x: x >= 0).shuffle(40),
    "datasets": lambda: hr.Dataset.range(4).flat_map(
        lambda n: hr.Dataset.range(10).shuffle(10).map(lambda each: each + 10 * n)
    ),
}


@pytest.mark.parametrize("plan", SHUFFLED)
def test_a_state_names_the_seed_of_the_options(plan: str) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        go_on_with_the_seed_of_the_options(plan, cluster.target)


def go_on_with_the_seed_of_the_options(plan: str, service: str) -> None:
    dataset = SHUFFLED[plan]().with_options(hr.Options(seed=5))
    expected = lists(dataset)
    states = []
    for each in shares(dataset, service, f"options {plan}", 2):
        with iter(each) as iterator:
            for _ in range(8):
                next(iterator)
            states.append(iterator.get_state())
    assert states[0] == states[1]
    assert states[0]["seed"] == 5
    here = iter(dataset)
    here.set_state(states[0])
    assert lists(here) == expected[16:]
    again = [iter(each) for each in shares(dataset, service, f"options again {plan}", 3)]
    for index, iterator in enumerate(again):
        iterator.set_state(states[0])
        assert lists(iterator) == expected[16 + index :: 3]


def test_one_client_in_order_names_the_seed_of_the_options(service: str) -> None:
    dataset = SHUFFLED["values"]().with_options(hr.Options(seed=5))
    expected = lists(dataset)
    with iter(dataset.apply(distribute(DYNAMIC, service, ordered=True))) as iterator:
        assert lists(next(iterator) for _ in range(8)) == expected[:8]
        state = iterator.get_state()
    here = iter(dataset)
    here.set_state(state)
    assert lists(here) == expected[8:]


# --- jobs ----------------------------------------------------------------------------------------


def test_a_job_of_a_restore_goes_with_the_client() -> None:
    dataset = PLANS["rows"]()
    with DispatchServer(DispatcherConfig(client_timeout_ms=3000)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)):
            (first, _) = shares(dataset, address, "restored", 2)
            with iter(first) as iterator:
                next(iterator)
                state = iterator.get_state()
            jobs = len(dispatcher.stats().jobs)
            for _ in range(3):
                with iter(first) as iterator:
                    iterator.set_state(state)
                    next(iterator)
                    state = iterator.get_state()
            deadline = time.monotonic() + 30
            while len(dispatcher.stats().jobs) > jobs and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(dispatcher.stats().jobs) == jobs
