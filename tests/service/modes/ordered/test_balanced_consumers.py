"""Ordered consumers with a cost function: the rows of each round are shared at similar costs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, InvalidArgumentError, UserFunctionError
from headrace.service import LocalCluster, ShardingPolicy, distribute
from headrace.service.modes.coordinated_reads.balance import balance_rows
from headrace.service.modes.coordinated_reads.round_shaping import redistribute_rows
from tests.service.counting_functions import CALLS, note
from tests.service.reading import slowly

pytestmark = pytest.mark.system

ROWS, BATCH = 150, 4


def length_of(number: Any) -> int:
    """Return a length between 1 and 64 that varies from row to row."""
    return int(number) * 37 % 64 + 1


def make_row(number: Any) -> dict[str, Any]:
    length = length_of(number)
    return {"id": number, "tokens": np.full(length, number), "length": np.int32(length)}


def squared_length(row: dict[str, Any]) -> int:
    return int(row["length"]) ** 2


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(number % 7 + 2).map(lambda each: each + 100 * number)


def padded(numbers: hr.Dataset) -> hr.Dataset:
    shapes = {"id": [], "tokens": [64], "length": []}
    return numbers.map(make_row).padded_batch(BATCH, padded_shapes=shapes)


PLANS: dict[str, Any] = {
    "rows": lambda: padded(hr.Dataset.range(ROWS).shuffle(40, seed=3).map(slowly)),
    "one batch": lambda: (
        hr.Dataset.range(ROWS)
        .map(lambda number: {"id": number, "length": np.int32(length_of(number))})
        .batch(BATCH)
    ),
    "a filter": lambda: padded(hr.Dataset.range(200).filter(lambda x: x % 3 > 0)),
    "files": lambda: padded(hr.Dataset.range(30).interleave(opened, cycle_length=3)),
}


def consumers(
    dataset: hr.Dataset,
    service: str,
    job: str,
    count: int,
    cost_fn: Any = squared_length,
    **terms: Any,
) -> list[hr.Dataset]:
    return [
        dataset.apply(
            distribute(
                ShardingPolicy.DYNAMIC,
                service,
                job,
                consumer_index=index,
                num_consumers=count,
                ordered=True,
                cost_fn=cost_fn,
                **terms,
            )
        )
        for index in range(count)
    ]


def as_lists(elements: Any) -> list[Any]:
    return [{name: leaf.tolist() for name, leaf in element.items()} for element in elements]


def expected_elements(batches: list[Any], count: int) -> list[list[Any]]:
    """Return the elements of each consumer, computed by a single process."""
    elements: list[list[Any]] = [[] for _ in range(count)]
    for start in range(0, len(batches) // count * count, count):
        round_ = batches[start : start + count]
        costs = [int(length) ** 2 for batch in round_ for length in batch["length"]]
        shares = redistribute_rows(round_, balance_rows(costs, count))
        for found, batch in zip(elements, shares, strict=True):
            found.append(batch)
    return [as_lists(each) for each in elements]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_are_divided_equally_for_any_number_of_workers(
    plan: str, count: int, workers: int
) -> None:
    dataset = PLANS[plan]()
    batches = list(dataset)
    with LocalCluster(num_workers=workers, processes=False) as cluster:
        found = [as_lists(each) for each in consumers(dataset, cluster.target, "job", count)]
    assert found == expected_elements(batches, count)
    rounds = len(batches) // count
    read = sorted(number for each in found for batch in each for number in batch["id"])
    assert read == sorted(int(n) for batch in batches[: rounds * count] for n in batch["id"])
    assert all(len(batch["id"]) == BATCH for each in found for batch in each[:-1])


@pytest.mark.parametrize("remainder", ["pad", "end_together"])
def test_remainder_option_applies_after_the_last_balanced_round(remainder: Any) -> None:
    dataset = PLANS["rows"]()  # 38 batches: 12 rounds of 3, and 2 more
    batches = list(dataset)
    with LocalCluster(num_workers=2, processes=False) as cluster:
        found = [
            list(each) for each in consumers(dataset, cluster.target, "job", 3, remainder=remainder)
        ]
    assert [as_lists(each[:12]) for each in found] == expected_elements(batches, 3)
    last = [each[12] for each in found]
    assert sorted(n for batch in last for n in batch["id"]) == sorted(
        n for batch in batches[36:] for n in batch["id"]
    )
    assert [len(batch["id"]) for batch in last] == ([4, 2, 0] if remainder == "pad" else [2, 2, 2])


@pytest.mark.parametrize("plan", ["rows", "files"])
def test_states_between_rounds_resume_with_other_consumers(plan: str) -> None:
    dataset = PLANS[plan]()
    batches = list(dataset)
    rounds = len(batches) // 2
    with LocalCluster(num_workers=2, processes=False) as cluster:
        states = []
        for each in consumers(dataset, cluster.target, "start", 2):
            with iter(each) as iterator:
                states.append([json.dumps(iterator.get_state())])
                for _ in iterator:
                    states[-1].append(json.dumps(iterator.get_state()))
        for number in range(1, rounds, 4):
            remaining = batches[2 * number :]
            for count in (1, 3):
                job = f"again {number} {count}"
                for index, each in enumerate(consumers(dataset, cluster.target, job, count)):
                    with iter(each) as iterator:
                        iterator.set_state(json.loads(states[index % 2][number]))
                        found = as_lists(iterator)
                    assert found == expected_elements(remaining, count)[index]
            local = iter(dataset)
            local.set_state(json.loads(states[0][number]))
            assert as_lists(local) == as_lists(remaining)


def test_balanced_rows_are_delivered_although_a_worker_is_killed() -> None:
    dataset = PLANS["rows"]()
    with LocalCluster(num_workers=2) as cluster:
        first, second = (iter(each) for each in consumers(dataset, cluster.target, "job", 2))
        one = [next(first) for _ in range(3)]
        cluster.add_worker()
        cluster.kill_worker(0)
        found = [as_lists([*one, *first]), as_lists(second)]
    assert found == expected_elements(list(dataset), 2)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("count", [4, 8])
def test_highest_cost_of_lognormal_lengths_is_within_two_percent_of_the_mean(
    count: int, power: int, service: str
) -> None:
    lengths = np.random.default_rng(0).lognormal(6.0, 0.5, 2048).astype(np.int64)
    dataset = hr.Dataset.from_tensor_slices({"length": lengths}).batch(16)

    def cost_fn(row: dict[str, Any]) -> int:
        return int(row["length"]) ** power

    def total_costs(batches: hr.Dataset) -> list[int]:
        return [int((batch["length"] ** power).sum()) for batch in batches]

    datasets = consumers(dataset, service, f"lognormal {power} {count}", count, cost_fn)
    before = np.array(total_costs(dataset)).reshape(-1, count)
    after = np.array([total_costs(each) for each in datasets]).T
    assert (before.sum(1) == after.sum(1)).all()
    assert (before.max(1) / before.mean(1)).mean() > 1.1
    assert (after.max(1) / after.mean(1)).max() <= 1.02


def packed_cost(row: dict[str, Any]) -> int:
    """Return the sum of squared lengths of the sequences in a packed row; 0 is padding."""
    segments = row["segment_ids"]
    return int((np.bincount(segments[segments > 0]) ** 2).sum())


def test_packed_rows_are_balanced_by_their_segments(service: str) -> None:
    generator = np.random.default_rng(1)
    rows = np.sort(generator.integers(0, 6, (64, 32)), axis=1)
    rows[::4] = 1  # one long sequence
    dataset = hr.Dataset.from_tensor_slices({"segment_ids": rows}).batch(4)
    found = [
        [sum(packed_cost({"segment_ids": row}) for row in batch["segment_ids"]) for batch in each]
        for each in consumers(dataset, service, "packed", 4, cost_fn=packed_cost)
    ]
    costs = np.array(found)
    assert (costs.max(0) <= 1.05 * costs.mean(0)).all()


# --- errors --------------------------------------------------------------------------------------


def fails_on_id_21(row: dict[str, Any]) -> int:
    if row["id"] == 21:
        raise ValueError("no cost")
    return squared_length(row)


def take_outcomes(iterator: Iterator[Any]) -> list[Any]:
    """Return the remaining elements, and the messages of errors."""
    found: list[Any] = []
    while True:
        try:
            found += as_lists([next(iterator)])
        except StopIteration:
            return found
        except (UserFunctionError, InvalidArgumentError) as error:
            found.append(str(error))


@pytest.mark.parametrize("plan", ["one batch", "a filter"])
def test_an_error_of_the_cost_function_takes_the_place_of_its_round(
    plan: str, service: str
) -> None:
    dataset = PLANS["one batch"]()
    if plan == "a filter":
        dataset = dataset.filter(lambda batch: True)
    datasets = consumers(dataset, service, f"fails in {plan}", 2, cost_fn=fails_on_id_21)
    expected = expected_elements(list(dataset), 2)
    for number, each in enumerate(datasets):
        with iter(each) as iterator:
            before = as_lists(next(iterator) for _ in range(2))
            with pytest.raises(UserFunctionError) as raised:
                next(iterator)
            message = str(raised.value)
            assert "fails_on_id_21" in message
            assert "for element 5" in message  # the sixth row of the round
            assert re.search(r"'id': 21\b", message)
            state = iterator.get_state()
            rest = as_lists(iterator)
        assert before + rest == expected[number][:2] + expected[number][3:]
        again = consumers(dataset, service, f"{plan} {number}", 2, cost_fn=fails_on_id_21)[number]
        with iter(again) as iterator:
            iterator.set_state(json.loads(json.dumps(state)))
            assert as_lists(iterator) == rest


def interrupts_once(row: dict[str, Any]) -> int:
    note("cost of an interrupted round")
    if CALLS["cost of an interrupted round"] == 12:
        raise KeyboardInterrupt
    return squared_length(row)


def test_an_interrupt_of_the_cost_function_loses_no_round() -> None:
    dataset = PLANS["one batch"]().take(4)
    with LocalCluster(num_workers=2, processes=False) as cluster:
        first, second = consumers(dataset, cluster.target, "job", 2, cost_fn=interrupts_once)
        with iter(first) as iterator:
            found = [next(iterator)]
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
            found += iterator
        assert [as_lists(found), as_lists(second)] == expected_elements(list(dataset), 2)


def test_rows_of_different_shapes_are_rejected_in_their_round(service: str) -> None:
    dataset = hr.Dataset.range(32).map(make_row).padded_batch(BATCH)
    found = [take_outcomes(iter(each)) for each in consumers(dataset, service, "shapes", 2)]
    for outcomes in found:
        assert len(outcomes) == 4
        assert all("padded_shapes" in each for each in outcomes)


def test_consumers_with_different_cost_functions_are_rejected() -> None:
    dataset = PLANS["one batch"]()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        first = consumers(dataset, cluster.target, "costs", 2)[0]
        with iter(first) as iterator:
            next(iterator)
            for cost_fn in (None, lambda row: 1.0):
                other = consumers(dataset, cluster.target, "costs", 2, cost_fn=cost_fn)[1]
                with pytest.raises(AlreadyExistsError, match="cost_fn="):
                    next(iter(other))


def test_explain_and_a_warning_say_that_each_consumer_computes_all_rows(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = consumers(PLANS["one batch"](), service, "explained", 2)[0]
    message = r"computed 2 times, once for each consumer: each computes `cost_fn` for all rows"
    assert re.search(message, first.explain())
    assert re.search(message, caplog.text)
