"""States that were saved over the service once can be read for ever, wherever that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system

Dataset = hr.Dataset
SAVED = Path(__file__).parent / "states_of_version_3.json"
"""Name -> [state, the elements after it]. Never changed: only added to."""

AT = 9
"""Elements that were read before each state was saved."""


def plus_one(x: Any) -> Any:
    return x + 1


def is_kept(x: Any) -> bool:
    return bool(x % 3)


def several(x: Any) -> Dataset:
    return Dataset.range(10 * int(x), 10 * int(x) + int(x) % 5 + 2)


def seeded(dataset: Dataset) -> Dataset:
    return dataset.with_options(hr.Options(seed=7))


Step = Callable[[Dataset], Dataset]

#: What workers make, and in order also the client.
PLANS: dict[str, Callable[[], Dataset]] = {
    "rows": lambda: seeded(Dataset.range(60).shuffle(20).map(plus_one)),
    "one order for ever": lambda: seeded(
        Dataset.range(60).shuffle(20, reshuffle_each_iteration=False).map(plus_one)
    ),
    "batches": lambda: seeded(Dataset.range(60).shuffle(20).map(plus_one).batch(4)),
    "flat_map": lambda: Dataset.range(20).flat_map(several),
    "interleave": lambda: Dataset.range(20).interleave(several, cycle_length=3, block_length=2),
    "interleave, filtered": lambda: (
        Dataset.range(20).interleave(several, cycle_length=3).map(plus_one).filter(is_kept)
    ),
    "batches of a filter": lambda: Dataset.range(20).flat_map(several).filter(is_kept).batch(4),
    "shuffled values": lambda: seeded(Dataset.range(20).flat_map(several).shuffle(6)),
    "repeated": lambda: Dataset.range(5).flat_map(several).repeat(3),
    "concatenated": lambda: Dataset.range(4).flat_map(several).concatenate(Dataset.range(9)),
}
#: Steps that stand after `distribute`.
AFTER: dict[str, tuple[Callable[[], Dataset], Step]] = {
    "rows, then batched": (PLANS["rows"], lambda ds: ds.batch(4)),
    "interleave, then filtered": (PLANS["interleave"], lambda ds: ds.filter(is_kept)),
    "interleave, then shuffled": (PLANS["interleave"], lambda ds: seeded(ds.shuffle(6))),
}


@pytest.fixture(scope="module")
def share() -> Iterator[Callable[[bool], Step]]:
    """Return what sends a dataset to the service, in order or not."""
    with LocalCluster(num_workers=1, processes=False) as cluster:

        def shared(is_ordered: bool) -> Step:
            terms = distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=is_ordered)
            return lambda dataset: dataset.apply(terms)

        yield shared


def shown(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def rest_of(dataset: Dataset, state: Any) -> list[Any]:
    with iter(dataset) as iterator:
        iterator.set_state(state)
        return shown(iterator)


def numbers_in(elements: list[Any]) -> list[int]:
    return sorted(int(number) for element in elements for number in np.ravel(element))


def saved(dataset: Dataset) -> list[Any]:
    """Return what the file holds for a dataset that is read over the service: how it was made."""
    with iter(dataset) as iterator:
        for _ in range(AT):
            next(iterator)
        return [iterator.get_state(), shown(iterator)]


def kept(name: str) -> tuple[Any, list[Any]]:
    state, rest = json.loads(SAVED.read_text(encoding="utf-8"))[name]
    return state, rest


@pytest.mark.parametrize("name", PLANS)
def test_a_state_in_order_is_read_with_the_same_rest(
    name: str, share: Callable[[bool], Step]
) -> None:
    state, rest = kept(f"in order: {name}")
    assert rest
    assert state["position"].keys() == {"splits", "partition_mode"}
    assert rest_of(PLANS[name](), state) == rest
    assert rest_of(share(True)(PLANS[name]()), state) == rest


@pytest.mark.parametrize("name", PLANS)
def test_a_state_in_no_order_is_read_with_the_same_elements(
    name: str, share: Callable[[bool], Step]
) -> None:
    state, rest = kept(f"in no order: {name}")
    assert rest
    assert state["position"].keys() == {"positions"}
    assert numbers_in(rest_of(PLANS[name](), state)) == numbers_in(rest)
    assert numbers_in(rest_of(share(False)(PLANS[name]()), state)) == numbers_in(rest)


@pytest.mark.parametrize(
    ("name", "is_ordered"),
    # In no order a shuffle holds elements that no state says.
    [(name, order) for name in AFTER for order in (True, False) if order or "shuffled" not in name],
)
def test_a_state_of_steps_after_distribute_is_read_with_the_same_elements(
    name: str, is_ordered: bool, share: Callable[[bool], Step]
) -> None:
    make, step = AFTER[name]
    state, rest = kept(f"{'in order' if is_ordered else 'in no order'}: {name}")
    assert rest
    assert state["position"].keys() == {"stream", "service_steps"}
    found = rest_of(step(share(is_ordered)(make())), state)
    assert found == rest if is_ordered else numbers_in(found) == numbers_in(rest)
