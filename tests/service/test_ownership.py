"""Elements that came over the service are the consumer's: what a worker keeps does not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.element.structure import flatten
from headrace.service import LocalCluster, distribute

Dataset = hr.Dataset

PASSES = 3


def large() -> np.ndarray:
    return np.arange(4 * 20_000, dtype=np.int64).reshape(4, 20_000)


def negate(x: np.ndarray) -> np.ndarray:
    np.negative(x, out=x)
    return x


KEPT = {
    "one element": lambda: Dataset.from_tensors(large()),
    "several arrays": lambda: Dataset.from_tensors({"a": large(), "b": (np.arange(9), 3)}),
    "slices": lambda: Dataset.from_tensor_slices(large()),
    "small slices": lambda: Dataset.from_tensor_slices(np.arange(4000).reshape(2000, 2)),
    "batches": lambda: Dataset.from_tensor_slices(large()).batch(2),
    "a cache": lambda: Dataset.range(4).map(lambda x: np.full(20_000, x)).cache(),
    "a function that changes its argument": lambda: Dataset.from_tensor_slices(large()).map(negate),
    "a function above a cache": lambda: (
        Dataset.from_tensor_slices(large()).cache().map(negate).prefetch(1)
    ),
}


@pytest.mark.parametrize("protocol", ["local", "shm", "tcp"])
@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_consumers_do_not_see_each_others_writes(mode: str, protocol: str) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        for name, make in KEPT.items():
            expected = list(make())
            remote = (
                make()
                .repeat(PASSES)
                .apply(distribute(mode, cluster.target, data_transfer_protocol=protocol))
            )
            found: list[Any] = []
            for element in remote:
                found.append([np.array(leaf) for leaf in flatten(element)[0]])
                for leaf in flatten(element)[0]:
                    if isinstance(leaf, np.ndarray):
                        leaf[...] = -7
            assert len(found) == PASSES * len(expected), name
            for index, leaves in enumerate(found):
                wanted = flatten(expected[index % len(expected)])[0]
                assert all(map(np.array_equal, leaves, wanted)), f"{name}, element {index}"
