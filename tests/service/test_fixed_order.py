"""A shuffle that does not reshuffle has one order over the service, too: for all, and for ever."""

from __future__ import annotations

import json

import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

Dataset = hr.Dataset
DYNAMIC = ShardingPolicy.DYNAMIC
COUNT, TAKEN = 24, 9


@pytest.fixture
def cluster():
    with LocalCluster(num_workers=2, processes=False) as cluster:
        yield cluster


def is_positive(x):
    return bool(x >= 0)


PLANS = {
    "rows": lambda: shuffled(Dataset.range(COUNT)),
    "values": lambda: shuffled(Dataset.range(COUNT).filter(is_positive)),
    "below a filter": lambda: shuffled(Dataset.range(COUNT)).filter(is_positive),
}


def sampled():
    """Return a dataset that one worker reads whole."""
    halves = [Dataset.range(COUNT // 2), Dataset.range(COUNT // 2, COUNT)]
    return Dataset.sample_from_datasets(halves, rerandomize_each_iteration=False)


def shuffled(dataset):
    return dataset.shuffle(COUNT, reshuffle_each_iteration=False)


def numbers(elements):
    return [int(x) for x in elements]


def saved(iterator):
    return json.loads(json.dumps(iterator.get_state()))


def over(cluster, dataset, **how):
    return dataset.apply(distribute(DYNAMIC, cluster.target, wait_timeout=20, **how))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("goes_on", ["here", "over"])
@pytest.mark.parametrize("began", ["here", "over"])
@pytest.mark.parametrize("plan", PLANS)
def test_another_program_goes_on_from_a_state_in_its_order(cluster, plan, began, goes_on, ordered):
    # each program makes the dataset again, and draws for itself
    def made(where):
        dataset = PLANS[plan]()
        return iter(dataset if where == "here" else over(cluster, dataset, ordered=ordered))

    with made(began) as first, made(goes_on) as second:
        came = numbers(next(first) for _ in range(TAKEN))
        state = saved(first)
        assert len(state["fixed_seeds"]) == 1
        rest = numbers(first)
        second.set_state(state)
        assert saved(second)["fixed_seeds"] == state["fixed_seeds"]
        found = numbers(second)
    if ordered or {began, goes_on} == {"here"}:
        assert found == rest
    assert sorted(came + found) == list(range(COUNT))


def test_what_was_drawn_for_a_sample_is_in_the_state_too(cluster):
    with iter(over(cluster, sampled(), ordered=True)) as first:
        numbers(next(first) for _ in range(TAKEN))
        state, rest = saved(first), numbers(first)
    for goes_on in (sampled(), over(cluster, sampled(), ordered=True)):
        with iter(goes_on) as second:
            second.set_state(state)
            assert numbers(second) == rest


@pytest.mark.parametrize("plan", PLANS)
def test_consumers_in_order_that_each_drew_for_themselves_share_one_order(cluster, plan):
    one, other = (
        numbers(
            over(
                cluster,
                PLANS[plan](),
                ordered=True,
                job_name=f"consumers {plan}",
                num_consumers=2,
                consumer_index=index,
            )
        )
        for index in range(2)
    )
    assert len(one) == len(other) == COUNT // 2
    assert sorted(one + other) == list(range(COUNT))


def test_all_passes_of_consumers_in_order_have_that_order(cluster):
    datasets = [
        over(
            cluster,
            shuffled(Dataset.range(COUNT)),
            ordered=True,
            job_name="passes",
            num_consumers=2,
            consumer_index=i,
        )
        for i in range(2)
    ]
    first = [numbers(each) for each in datasets]
    second = [numbers(each) for each in datasets]
    assert first == second
    assert sorted(first[0] + first[1]) == list(range(COUNT))


@pytest.mark.parametrize("plan", PLANS)
def test_consumers_go_on_from_a_state_of_one_process_in_its_order(cluster, plan):
    with iter(PLANS[plan]()) as alone:
        numbers(next(alone) for _ in range(TAKEN))
        state, rest = saved(alone), numbers(alone)
    found = []
    for index in range(3):
        dataset = over(
            cluster,
            PLANS[plan](),
            ordered=True,
            job_name=f"restored {plan}",
            num_consumers=3,
            consumer_index=index,
        )
        with iter(dataset) as iterator:
            iterator.set_state(state)
            found.append(numbers(iterator))
    assert [x for each in zip(*found, strict=True) for x in each] == rest


def test_clients_of_a_job_that_each_drew_for_themselves_share_one_order(cluster):
    one, other = (
        iter(over(cluster, shuffled(Dataset.range(COUNT)), job_name="shared")) for _ in range(2)
    )
    with one, other:
        came = numbers([next(one), next(other)])
        came += numbers(one) + numbers(other)
    assert sorted(came) == list(range(COUNT))


def test_passes_of_a_job_with_a_name_have_one_order(cluster):
    dataset = shuffled(Dataset.range(COUNT))
    read = [
        numbers(over(cluster, each, ordered=True, job_name=f"job {number}").repeat(2))
        for number, each in enumerate([dataset, dataset])
    ]
    assert all(each[:COUNT] == each[COUNT:] for each in read)
    assert read[0] != read[1]


def test_the_seed_of_the_options_decides_over_the_service_too(cluster):
    def seeded():
        return shuffled(Dataset.range(COUNT)).with_options(hr.Options(seed=5))

    alone = numbers(seeded())
    assert numbers(over(cluster, seeded(), ordered=True)) == alone
    assert numbers(over(cluster, seeded(), ordered=True, job_name="seeded")) == alone


def test_a_client_that_goes_on_in_another_order_than_that_of_the_job_is_refused(cluster):
    with iter(over(cluster, shuffled(Dataset.range(COUNT)))) as before:
        state = saved(before)
    dataset = over(cluster, shuffled(Dataset.range(COUNT)), job_name="begun")
    with iter(dataset) as first, iter(dataset) as second:
        next(first)
        second.set_state(state)
        with pytest.raises(hr.errors.FailedPreconditionError, match="another order of the steps"):
            next(second)


def test_a_state_without_the_seeds_of_such_steps_is_refused():
    with iter(shuffled(Dataset.range(COUNT))) as iterator:
        state = saved(iterator)
        del state["fixed_seeds"]
        with pytest.raises(hr.errors.FailedPreconditionError, match="'fixed_seeds'"):
            iterator.set_state(state)
