"""Several processes that read the elements of the same ordered consumer, each all of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import (
    LocalCluster,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from tests.service.reading import slowly

pytestmark = pytest.mark.system

PLANS: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(200).shuffle(200).map(slowly).batch(4),
    "a filter": lambda: hr.Dataset.range(240).shuffle(240).filter(lambda x: x % 3 > 0).batch(4),
}


def readers(
    dataset: hr.Dataset, service: str, job: str, count: int, group: int, **terms: Any
) -> list[list[hr.Dataset]]:
    """Return the datasets of each reader, by consumer."""
    return [
        [
            dataset.apply(
                distribute(
                    ShardingPolicy.DYNAMIC,
                    service,
                    job,
                    consumer_index=index,
                    num_consumers=count,
                    ordered=True,
                    readers_per_consumer=group,
                    reader_index=reader,
                    **terms,
                )
            )
            for reader in range(group)
        ]
        for index in range(count)
    ]


def lists(elements: Any) -> list[list[int]]:
    return [np.ravel(element).tolist() for element in elements]


@pytest.mark.parametrize("cost_fn", [None, lambda row: int(row) + 1])
@pytest.mark.parametrize("plan", PLANS)
def test_readers_of_a_consumer_get_equal_elements_in_each_epoch(
    plan: str, cost_fn: Any, service: str
) -> None:
    dataset = PLANS[plan]()
    job = f"{plan} {cost_fn is None}"
    datasets = readers(dataset, service, job, 2, 3, cost_fn=cost_fn)
    epochs = []
    for _ in range(2):
        found = [[lists(each) for each in group] for group in datasets]
        for group in found:
            assert group[0] == group[1] == group[2]
        rows = [row for group in found for batch in group[0] for row in batch]
        assert len(rows) == len(set(rows)) == len(list(dataset)) // 2 * 8
        epochs.append(rows)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("plan", PLANS)
def test_a_lost_reader_resumes_from_its_state_although_a_worker_was_killed(plan: str) -> None:
    dataset = PLANS[plan]()
    with LocalCluster(num_workers=2) as cluster:
        ((first, second),) = readers(dataset, cluster.target, "job", 1, 2)
        expected = lists(first)
        iterator = iter(second)
        found = lists(next(iterator) for _ in range(5))
        state = json.dumps(iterator.get_state())
        iterator.close()
        cluster.add_worker()
        cluster.kill_worker(0)
        with iter(second) as iterator:
            iterator.set_state(json.loads(state))
            found += lists(iterator)
    assert found == expected


def test_states_are_valid_for_every_reader_and_number_of_consumers() -> None:
    dataset = PLANS["rows"]()
    with LocalCluster(num_workers=2, processes=False) as cluster:
        datasets = readers(dataset, cluster.target, "job", 2, 2)
        with iter(datasets[0][1]) as iterator:
            for _ in range(4):
                next(iterator)
            state = iterator.get_state()
        local = iter(dataset)
        local.set_state(state)
        remaining = lists(local)
        for index, group in enumerate(readers(dataset, cluster.target, "again", 3, 2)):
            for each in group:
                with iter(each) as iterator:
                    iterator.set_state(state)
                    assert lists(iterator) == remaining[index : len(remaining) // 3 * 3 : 3]


def test_a_registered_dataset_is_read_by_several_readers(service: str) -> None:
    dataset_id = register_dataset(service, PLANS["rows"]())
    found = [
        lists(
            from_dataset_id(
                "distributed_epoch",
                service,
                dataset_id,
                job_name="readers by id",
                consumer_index=0,
                num_consumers=1,
                ordered=True,
                readers_per_consumer=2,
                reader_index=reader,
            )
        )
        for reader in range(2)
    ]
    assert found[0] == found[1]


def test_readers_with_other_numbers_or_the_same_index_are_rejected() -> None:
    dataset = PLANS["rows"]()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        ((first, _),) = readers(dataset, cluster.target, "job", 1, 2)
        with iter(first) as iterator:
            next(iterator)
            ((_, _, other),) = readers(dataset, cluster.target, "job", 1, 3)
            with pytest.raises(AlreadyExistsError, match="readers_per_consumer=3"):
                next(iter(other))
            ((same, _),) = readers(dataset, cluster.target, "job", 1, 2)
            with pytest.raises(FailedPreconditionError, match="another reader_index"):
                next(iter(same))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"reader_index": 0}, "must be set together"),
        ({"readers_per_consumer": 2}, "must be set together"),
        ({"readers_per_consumer": 2, "reader_index": 2}, "less than `readers_per_consumer`"),
        ({"readers_per_consumer": 2, "reader_index": 0, "ordered": False}, "`ordered=True`"),
        (
            {
                "readers_per_consumer": 2,
                "reader_index": 0,
                "num_consumers": None,
                "consumer_index": None,
            },
            "requires `num_consumers`",
        ),
    ],
)
def test_wrong_reader_arguments_are_rejected(terms: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "job_name": "job",
        "consumer_index": 0,
        "num_consumers": 1,
        "ordered": True,
        **terms,
    }
    with pytest.raises(ValueError, match=message):
        distribute(ShardingPolicy.DYNAMIC, "localhost:1", **arguments)


def test_explain_says_how_often_elements_are_computed(service: str) -> None:
    ((first, _), _) = readers(PLANS["rows"](), service, "explained", 2, 2)
    assert "computed 2 times, once for each reader of one consumer" in first.explain()
    ((first, _), _) = readers(PLANS["a filter"](), service, "explained again", 2, 2)
    message = "computed 4 times, once for each of the 2 readers of each consumer: the position"
    assert message in first.explain()
