"""Ordered consumers: consumer i of n gets elements i, i + n, ... even if workers are killed."""

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
    "rows with drop_remainder": lambda: (
        hr.Dataset.range(203).shuffle(50, seed=3).map(slowly).batch(4, drop_remainder=True)
    ),
    "files": lambda: hr.Dataset.range(50).interleave(opened, cycle_length=3).batch(3),
    "a filter": lambda: hr.Dataset.range(300).filter(lambda x: x % 3 > 0).batch(4),
    "shuffled values": lambda: hr.Dataset.range(50).flat_map(opened).shuffle(30, seed=1).batch(5),
}


def lists(elements: Any) -> list[list[int]]:
    return [np.ravel(element).tolist() for element in elements]


def consumer_datasets(
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
def test_each_consumer_gets_its_elements_although_workers_are_killed(plan: str) -> None:
    dataset = PLANS[plan]()
    expected = lists(dataset)
    rounds = len(expected) // 2
    with LocalCluster(num_workers=2) as cluster:
        first, second = (
            iter(each) for each in consumer_datasets(dataset, cluster.target, "job", 2)
        )
        one = lists(next(first) for _ in range(5))
        cluster.add_worker()
        cluster.kill_worker(0)
        one += lists(first)  # the other consumer is an epoch behind, which delays no one else
        two = lists(next(second) for _ in range(5))
        cluster.kill_worker(1)
        two += lists(second)
    assert one == expected[: 2 * rounds : 2]
    assert two == expected[1 : 2 * rounds : 2]


@pytest.mark.parametrize("rows", [46, 48, 49, 50])
@pytest.mark.parametrize("kind", ["of known length", "of mapped rows", "of a filter"])
def test_the_remainder_option_determines_the_last_elements(
    kind: str, rows: int, service: str
) -> None:
    rows_of: dict[str, Any] = {
        "of known length": lambda data: data,
        "of mapped rows": lambda data: data.shuffle(9, seed=1).map(lambda x: x + 7),
        "of a filter": lambda data: data.filter(lambda x: x >= 0),
    }
    dataset = rows_of[kind](hr.Dataset.range(rows)).batch(4)
    expected = lists(dataset)
    rounds = len(expected) // 3
    last = expected[3 * rounds :]
    for remainder in ("drop", "pad", "end_together"):
        job = f"{kind} {rows} {remainder}"
        got = [
            lists(each) for each in consumer_datasets(dataset, service, job, 3, remainder=remainder)
        ]
        assert [each[:rounds] for each in got] == [expected[i : 3 * rounds : 3] for i in range(3)]
        ends = [each[rounds:] for each in got]
        if remainder == "drop" or not last:
            assert ends == [[], [], []]
        elif remainder == "pad":
            assert ends == [[each] for each in [*last, [], []][:3]]
        else:
            parts = np.array_split(np.concatenate(last), 3)
            assert ends == [[part.tolist()] for part in parts]


@pytest.mark.parametrize("plan", ["index part", "values"])
def test_consumers_share_one_seed_and_each_epoch_has_its_own_order(plan: str, service: str) -> None:
    make = hr.Dataset.range(60).shuffle(60)
    if plan == "values":
        make = hr.Dataset.range(60).filter(lambda x: x >= 0).shuffle(60)
    epochs = []
    first, second = consumer_datasets(make, service, f"seed {plan}", 2)
    for _ in range(2):
        one, two = lists(first), lists(second)
        assert sorted(each for (each,) in one + two) == list(range(60))
        epochs.append(one)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("plan", PLANS)
def test_a_position_is_valid_for_any_number_of_consumers(plan: str) -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        check_resume_from_position(plan, cluster.target)


def check_resume_from_position(plan: str, service: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dataset = PLANS[plan]()
    expected = lists(dataset)
    steps = random.Random(seed).randrange(1, 8)
    states = []
    for each in consumer_datasets(dataset, service, f"position {plan} {seed}", 2):
        with iter(each) as iterator:
            for _ in range(steps):
                next(iterator)
            states.append(json.dumps(iterator.get_state()))
    remaining = expected[2 * steps :]
    resumed = [
        iter(each) for each in consumer_datasets(dataset, service, f"again {plan} {seed}", 3)
    ]
    for index, iterator in enumerate(resumed):
        iterator.set_state(json.loads(states[index % 2]))  # all have the same position
        assert lists(iterator) == remaining[index : len(remaining) // 3 * 3 : 3]
    for state in states:
        local = iter(dataset)
        local.set_state(json.loads(state))
        assert lists(local) == remaining


def test_consumer_0_resumes_from_its_state_in_the_same_job_after_leaving(service: str) -> None:
    dataset = PLANS["files"]()
    expected = lists(dataset)
    first, second = consumer_datasets(dataset, service, "returns", 2)
    iterator = iter(first)
    got = lists(next(iterator) for _ in range(6))
    state = iterator.get_state()
    iterator.close()
    assert lists(second) == expected[1 : len(expected) // 2 * 2 : 2]
    iterator = iter(first)
    iterator.set_state(state)
    assert got + lists(iterator) == expected[: len(expected) // 2 * 2 : 2]


def test_consumers_with_different_options_are_rejected() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        check_different_options_rejected(cluster.target)


def check_different_options_rejected(service: str) -> None:
    dataset = PLANS["rows"]()
    first, _ = consumer_datasets(dataset, service, "differ", 2)
    others = [
        consumer_datasets(dataset, service, "differ", 3)[1],
        consumer_datasets(dataset, service, "differ", 2, remainder="pad")[1],
        consumer_datasets(dataset.map(lambda x: x), service, "differ", 2)[1],
    ]
    with iter(first) as iterator:
        next(iterator)
        for other in others:
            with pytest.raises(AlreadyExistsError, match=r"'differ' .* different options") as error:
                next(iter(other))
        assert "the datasets differ: step 5 is map " in str(error.value)
        expected = dataset.apply(distribute(DYNAMIC, service, "differ", ordered=True))
        with pytest.raises(AlreadyExistsError, match=r"'differ' .* `num_consumers`"):
            next(iter(expected))


@pytest.mark.parametrize("plan", ["rows", "a filter"])
def test_a_consumer_index_that_is_or_was_read_is_rejected(plan: str) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = PLANS[plan]()

        def consumer() -> hr.DatasetIterator:
            return iter(consumer_datasets(dataset, cluster.target, "taken", 2)[0])

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


def test_bucketing_is_rejected(service: str) -> None:
    bucketed = hr.Dataset.range(30).bucket_by_sequence_length(lambda x: x, [10, 20], [2, 2, 2])
    with pytest.raises(FailedPreconditionError, match=r"bucket_by_sequence_length.* several"):
        consumer_datasets(bucketed, service, "bucket", 2)


def test_a_registered_dataset_is_read_by_its_id(service: str) -> None:
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


def test_workers_compute_only_the_elements_of_the_consumer_if_possible(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    (first, _) = consumer_datasets(PLANS["rows"](), service, "own", 2)
    assert not caplog.records
    lists(first)
    consumer_datasets(PLANS["a filter"](), service, "all", 2)
    assert re.search(r"computed 2 times, .* after filter \(\S*test_ordered", caplog.text)


def counted(number: int) -> int:
    note("of consumers")
    return number


@pytest.mark.parametrize("step", ["batch", "padded_batch"])
def test_batches_with_drop_remainder_are_computed_once(
    service: str, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    CALLS["of consumers"] = 0
    batches = getattr(hr.Dataset.range(161).map(counted), step)(8, drop_remainder=True)
    dataset = batches.map(lambda x: x + 1)
    both = consumer_datasets(dataset, service, f"without the rest of {step}", 2)
    got = [row for each in both for batch in lists(each) for row in batch]
    assert sorted(got) == list(range(1, 161))
    assert CALLS["of consumers"] == 160
    assert not caplog.records
    assert "each element is computed once" in both[0].explain()


def test_explain_names_the_step_that_prevents_dividing_the_work(
    service: str,
) -> None:
    dataset = hr.Dataset.range(30).map(slowly).filter(lambda x: x % 3 > 0).batch(4)
    (first, _) = consumer_datasets(dataset, service, "explained", 2)
    message = (
        r"computed 2 times, once for each consumer: .* after filter \(\S*test_ordered_consumers"
    )
    assert re.search(message, first.explain())


# --- errors and positions ------------------------------------------------------------------------


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


def take_outcomes(iterator: Iterator[Any], limit: int = 1000) -> list[Any]:
    """Return the next elements and the messages of errors."""
    got: list[Any] = []
    while len(got) < limit:
        try:
            got.append(np.ravel(next(iterator)).tolist())
        except StopIteration:
            break
        except UserFunctionError as error:
            got += re.findall(r"no \d+", str(error))[:1]
    return got


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("plan", FAILING)
def test_a_state_after_an_error_resumes_with_the_remaining_elements(plan: str, index: int) -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        check_resume_after_each_error(plan, index, cluster.target)


def check_resume_after_each_error(plan: str, index: int, service: str) -> None:
    dataset = FAILING[plan]()
    job = f"failing {plan} {index}"
    with iter(consumer_datasets(dataset, service, job, 2)[index]) as iterator:
        expected = take_outcomes(iterator)
    after_errors = [at + 1 for at, each in enumerate(expected) if isinstance(each, str)]
    assert after_errors or (plan, index) == ("rows", 1)
    for steps in sorted({each for at in after_errors for each in (at, at + 1)}):
        with iter(consumer_datasets(dataset, service, f"{job} {steps}", 2)[index]) as iterator:
            before = take_outcomes(iterator, steps)
            state = json.dumps(iterator.get_state())
        assert before == expected[:steps]
        with iter(
            consumer_datasets(dataset, service, f"{job} {steps} again", 2)[index]
        ) as iterator:
            iterator.set_state(json.loads(state))
            assert iterator.get_state() == json.loads(state)
            assert take_outcomes(iterator) == expected[steps:]


@pytest.mark.parametrize("plan", ["rows", "a filter", "datasets"])
def test_a_single_process_resumes_after_an_error_without_loss(plan: str) -> None:
    dataset = FAILING[plan]()
    before: list[Any] = []
    with (
        LocalCluster(num_workers=1, processes=False) as cluster,
        iter(consumer_datasets(dataset, cluster.target, "error", 2)[0]) as iterator,
    ):
        while not before or not isinstance(before[-1], str):
            before += take_outcomes(iterator, 1)
        state = iterator.get_state()
    local = iter(dataset)
    local.set_state(state)
    outcomes = [each for each in take_outcomes(iter(dataset)) if not isinstance(each, str)]
    remaining = [each for each in take_outcomes(local) if not isinstance(each, str)]
    # A failed row has its position in a round; the other consumer received the next row.
    rounds = len(before) - 1
    assert remaining == outcomes[2 * rounds + (plan == "rows") :]


def test_errors_of_the_remainder_are_raised_with_it() -> None:
    dataset = hr.Dataset.range(46).map(fails_on_fours).batch(2)  # 21 batches, and 2 more
    ends = {
        "pad": [[42, 43], [45], []],
        "end_together": [[42], [43], [45]],
    }
    with LocalCluster(num_workers=1, processes=False) as cluster:
        for remainder, expected in ends.items():
            parts = consumer_datasets(dataset, cluster.target, remainder, 3, remainder=remainder)
            for each, last in zip(parts, expected, strict=True):
                assert take_outcomes(iter(each))[-2:] == ["no 44", last]


def test_the_remainder_follows_a_round_that_failed_completely() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = (
            hr.Dataset.range(52)
            .batch(4)
            .map(lambda batch: batch + 0 * fails_on_fours(batch[0]))  # batches 1, 6 and 11 fail
        )
        first, second = consumer_datasets(dataset, cluster.target, "whole", 2, remainder="pad")
        last = [48, 49, 50, 51]
        assert take_outcomes(iter(first))[-2:] == [[40, 41, 42, 43], last]
        assert take_outcomes(iter(second))[-3:] == [[36, 37, 38, 39], "no 44", []]


# --- seeds ---------------------------------------------------------------------------------------


SHUFFLED: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(40).shuffle(40),
    "values": lambda: hr.Dataset.range(40).filter(lambda x: x >= 0).shuffle(40),
    "datasets": lambda: hr.Dataset.range(4).flat_map(
        lambda n: hr.Dataset.range(10).shuffle(10).map(lambda each: each + 10 * n)
    ),
}


@pytest.mark.parametrize("plan", SHUFFLED)
def test_a_state_contains_the_seed_of_the_options(plan: str) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        check_seed_of_options(plan, cluster.target)


def check_seed_of_options(plan: str, service: str) -> None:
    dataset = SHUFFLED[plan]().with_options(hr.Options(seed=5))
    expected = lists(dataset)
    states = []
    for each in consumer_datasets(dataset, service, f"options {plan}", 2):
        with iter(each) as iterator:
            for _ in range(8):
                next(iterator)
            states.append(iterator.get_state())
    assert states[0] == states[1]
    assert states[0]["seed"] == 5
    local = iter(dataset)
    local.set_state(states[0])
    assert lists(local) == expected[16:]
    resumed = [
        iter(each) for each in consumer_datasets(dataset, service, f"options again {plan}", 3)
    ]
    for index, iterator in enumerate(resumed):
        iterator.set_state(states[0])
        assert lists(iterator) == expected[16 + index :: 3]


def test_a_state_of_a_single_ordered_client_contains_the_option_seed(service: str) -> None:
    dataset = SHUFFLED["values"]().with_options(hr.Options(seed=5))
    expected = lists(dataset)
    with iter(dataset.apply(distribute(DYNAMIC, service, ordered=True))) as iterator:
        assert lists(next(iterator) for _ in range(8)) == expected[:8]
        state = iterator.get_state()
    local = iter(dataset)
    local.set_state(state)
    assert lists(local) == expected[8:]


# --- jobs ----------------------------------------------------------------------------------------


def test_the_job_of_a_restored_state_is_removed_with_its_client() -> None:
    dataset = PLANS["rows"]()
    with DispatchServer(DispatcherConfig(client_timeout_ms=3000)) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)):
            (first, _) = consumer_datasets(dataset, address, "restored", 2)
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
