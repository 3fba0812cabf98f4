"""States over the service: where they go on, and who refuses them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

DYNAMIC = ShardingPolicy.DYNAMIC
Dataset = hr.Dataset


def opened(number: int) -> Dataset:
    return Dataset.range(10 * number, 10 * number + 10)


def tripled(number: Any) -> Any:
    return number * 3


BELOW: dict[str, Callable[[], Dataset]] = {
    "rows": lambda: Dataset.range(60).map(lambda x: x + 1),
    "interleave": lambda: Dataset.range(6).interleave(opened, cycle_length=2),
}
ABOVE: dict[str, Callable[[Dataset], Dataset]] = {
    "map": lambda ds: ds.map(tripled),
    "batch": lambda ds: ds.batch(4),
    "filter": lambda ds: ds.filter(lambda x: x % 2 == 0),
    "take": lambda ds: ds.take(40),
    "enumerate": lambda ds: ds.enumerate(),
    "map and batch": lambda ds: ds.map(tripled).batch(4),
}
IN_ORDER_ONLY: dict[str, Callable[[Dataset], Dataset]] = {
    "repeat": lambda ds: ds.repeat(2),
    "unbatch": lambda ds: ds.batch(4).unbatch(),
    "shuffle": lambda ds: ds.shuffle(10, seed=2, reshuffle_each_iteration=False),
}


def shown(elements: Any) -> list[str]:
    return [repr(map_leaves(lambda leaf: np.asarray(leaf).tolist(), each)) for each in elements]


def state_after(dataset: Dataset, count: int) -> tuple[list[str], dict[str, Any]]:
    with iter(dataset) as iterator:
        first = shown(next(iterator) for _ in range(count))
        return first, json.loads(json.dumps(iterator.get_state()))


def rest_of(dataset: Dataset, state: dict[str, Any]) -> list[str]:
    with iter(dataset) as iterator:
        iterator.set_state(state)
        return shown(iterator)


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("above", [*ABOVE, *IN_ORDER_ONLY])
def test_an_ordered_state_resumes_with_distribute_at_the_same_step(
    below: str, above: str, service: str
) -> None:
    step = {**ABOVE, **IN_ORDER_ONLY}[above]
    make = BELOW[below]
    count = random.randrange(1, 8)
    print("count", count)
    over = step(make().apply(distribute(DYNAMIC, service, ordered=True)))
    first, state = state_after(over, count)
    assert first + rest_of(over, state) == shown(step(make()))


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("above", ABOVE)
def test_states_with_and_without_steps_after_distribute_differ(
    below: str, above: str, is_ordered: bool, service: str
) -> None:
    here = ABOVE[above](BELOW[below]())
    over = ABOVE[above](BELOW[below]().apply(distribute(DYNAMIC, service, ordered=is_ordered)))
    whole = here.apply(distribute(DYNAMIC, service, ordered=is_ordered))
    kept: list[dict[str, Any]] = []
    for dataset in (here, over, whole):
        try:
            kept.append(state_after(dataset, 3)[1])
        except FailedPreconditionError:
            assert dataset is whole, "it has no states: the client runs a step of the whole stream"
    for state in kept:
        is_after = state["position"].get("service_steps") == [2]
        others = [here, whole] if is_after else [over]
        for dataset in others:
            with iter(dataset) as iterator:
                with pytest.raises(FailedPreconditionError) as caught:
                    iterator.set_state(state)
                if "cannot save or restore states" not in str(caught.value):
                    assert "`distribute` after step 2 (" in str(caught.value)
                    assert "no step after `distribute`" in str(caught.value)
                    assert "move `distribute` back" in str(caught.value)


def test_a_state_with_distribute_at_another_step_is_rejected(service: str) -> None:
    dataset = Dataset.range(60).map(tripled)
    share = distribute(DYNAMIC, service, ordered=True)
    _, state = state_after(dataset.apply(share).map(tripled).batch(4), 3)
    later = dataset.map(tripled).apply(share).batch(4)
    with pytest.raises(FailedPreconditionError, match=r"step 2 \(map\).* step 3 \(map\)"):
        rest_of(later, state)


@pytest.mark.parametrize("step", [lambda ds: ds, lambda ds: ds.map(tripled)])
def test_an_unordered_state_after_distribute_is_rejected_in_order(
    step: Callable[[Dataset], Dataset], service: str
) -> None:
    dataset = Dataset.range(60).map(tripled)
    _, state = state_after(step(dataset.apply(distribute(DYNAMIC, service))), 9)
    with pytest.raises(FailedPreconditionError, match="restore it without `ordered=True`"):
        rest_of(step(dataset.apply(distribute(DYNAMIC, service, ordered=True))), state)


def test_a_state_is_rejected_by_policies_without_states(service: str) -> None:
    dataset = Dataset.range(60).map(tripled)
    _, state = state_after(dataset.apply(distribute(DYNAMIC, service)), 9)
    with pytest.raises(FailedPreconditionError, match=r"Use ShardingPolicy\.DYNAMIC"):
        rest_of(dataset.apply(distribute(ShardingPolicy.OFF, service)), state)


# --- single-process states that cannot be resumed over the service are rejected -------------------


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(num_workers=1, processes=False) as cluster:
        yield cluster


def above_two(x):
    return bool(x > 2)


def iterator_of(x):
    return Dataset.range(int(x) % 4)


def summed(total, x):
    return total + x, total + x


OPENING = {
    "interleave": lambda: (
        Dataset.range(13).filter(above_two).interleave(iterator_of, cycle_length=3)
    ),
    "flat_map": lambda: Dataset.range(13).filter(above_two).shuffle(5).flat_map(iterator_of),
}
CACHED = {
    "scan": lambda: Dataset.range(9).scan(np.int64(0), summed).cache(),
    "take": lambda: Dataset.range(9).filter(above_two).take(5).cache().batch(2),
    "repeat": lambda: Dataset.range(9).filter(above_two).take(5).repeat(2).cache(),
}


def state_of(dataset, taken):
    with iter(dataset) as iterator:
        for _ in range(taken):
            next(iterator)
        return json.loads(json.dumps(iterator.get_state()))


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("plan", OPENING)
def test_a_state_of_a_step_that_opens_datasets_here_is_rejected(cluster, plan, taken):
    state = state_of(OPENING[plan](), taken)
    iterator = iter(OPENING[plan]().apply(distribute(DYNAMIC, cluster.target)))
    with iterator, pytest.raises(FailedPreconditionError, match="would open datasets"):
        iterator.set_state(state)


@pytest.mark.parametrize("which", [{}, {"num_consumers": 1, "consumer_index": 0, "job_name": "j"}])
@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("plan", CACHED)
def test_a_single_process_state_of_a_cache_is_rejected(cluster, plan, taken, which):
    state = state_of(CACHED[plan](), taken)
    terms = distribute(DYNAMIC, cluster.target, ordered=True, **which)
    iterator = iter(CACHED[plan]().apply(terms))
    with iterator, pytest.raises(FailedPreconditionError, match=r"cache.* caches nothing"):
        iterator.set_state(state)


@pytest.mark.parametrize("plan", ["scan", "take"])
def test_a_service_state_of_a_cache_resumes(cluster, plan):
    def read():
        return CACHED[plan]().apply(distribute(DYNAMIC, cluster.target, ordered=True))

    state = state_of(read(), 1)
    with iter(read()) as iterator:
        iterator.set_state(state)
        rest = [np.asarray(x).tolist() for x in iterator]
    assert rest == [np.asarray(x).tolist() for x in CACHED[plan]()][1:]
