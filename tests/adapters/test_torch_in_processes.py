"""Sharding of datasets with `in_processes`, by rank and by worker process of a DataLoader."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import distributed
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - a backend without peers
from torch.utils.data import DataLoader

import headrace as hr
from headrace.service import process_pool
from tests.service.reading import wait_until

pytestmark = pytest.mark.system


def negate(x: Any) -> Any:
    return -x


def is_wanted(x: Any) -> bool:
    return bool(x % 3)


@pytest.fixture(scope="module", autouse=True)
def _warm_pool() -> Iterator[None]:
    """Keep a pool of 2 processes during the tests of this module."""
    datasets = [hr.Dataset.range(2).map(negate).in_processes(2)]
    assert elements(datasets[0]) == [0, -1]
    yield
    datasets.clear()
    gc.collect()
    wait_until(lambda: not process_pool._pools)


def elements(dataset: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in dataset]


def in_pool(dataset: hr.Dataset) -> hr.Dataset:
    return dataset.in_processes(2)


def in_this_process(dataset: hr.Dataset) -> hr.Dataset:
    return dataset


NUMBERS = hr.Dataset.range(23)

DATASETS: dict[str, Callable[[Callable[[hr.Dataset], hr.Dataset]], hr.Dataset]] = {
    "last step": lambda pool: pool(NUMBERS.map(negate)),
    "map after it": lambda pool: pool(NUMBERS.map(negate)).map(lambda x: x * 10),
    "batch after it": lambda pool: pool(NUMBERS.map(negate)).batch(3),
    "batch before it": lambda pool: pool(NUMBERS.map(negate).batch(3)).prefetch(2),
    "shuffle": lambda pool: pool(NUMBERS.shuffle(23, seed=1).map(negate)),
    "shuffle after it": lambda pool: pool(NUMBERS.map(negate)).shuffle(5, seed=1),
    "unknown number": lambda pool: pool(NUMBERS.filter(is_wanted).map(negate)),
    "batches of an unknown number": lambda pool: (
        pool(NUMBERS.filter(is_wanted).map(negate)).map(lambda x: x * 10).batch(2)
    ),
    "zip": lambda pool: hr.Dataset.zip(NUMBERS, pool(NUMBERS.map(negate))).map(lambda x, y: x * y),
    "take after it": lambda pool: pool(NUMBERS.map(negate)).take(9),
    "unordered": lambda pool: pool(
        NUMBERS.map(negate, num_parallel_calls=2, deterministic=pool is in_this_process).filter(
            is_wanted
        )
    ),
}


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("name", DATASETS)
def test_ranks_have_the_shards_of_a_dataset_of_one_process(name: str, drop_remainder: bool):
    local, pooled = DATASETS[name](in_this_process), DATASETS[name](in_pool)
    whole, found = elements(local), []
    assert elements(pooled) == whole
    for rank in range(2):
        loaders = [
            hr.torch.loader(dataset, shard=(2, rank), drop_remainder=drop_remainder)
            for dataset in (local, pooled)
        ]
        expected, mine = map(elements, loaders)
        assert mine == expected
        assert elements(loaders[1]) == elements(loaders[0])  # the second epoch
        found.append(mine)
    if drop_remainder:
        whole = whole[: len(whole) // 2 * 2]
    assert found == [whole[rank::2] for rank in range(2)]


def test_each_rank_computes_only_its_share(tmp_path: Any):
    def record(x: Any) -> Any:
        with open(tmp_path / "calls", "a") as file:
            file.write(f"{x}\n")
        return x

    pooled = hr.Dataset.range(8).map(record).in_processes(2).map(negate).batch(2)
    assert elements(hr.torch.loader(pooled, shard=(2, 1))) == [[-2, -3], [-6, -7]]
    calls = (tmp_path / "calls").read_text().split()
    assert sorted(calls) == ["2", "3", "6", "7"]


@pytest.mark.parametrize("name", ["shuffle", "map after it", "batch after it", "unknown number"])
def test_a_state_continues_at_each_element_and_on_another_number_of_ranks(name: str):
    pooled = DATASETS[name](in_pool)
    whole = elements(pooled)
    loader = hr.torch.loader(pooled, shard=(2, 1))
    states, mine = [], []
    for element in loader:
        mine.append(np.asarray(element).tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert mine == whole[: len(whole) // 2 * 2][1::2]
    for number, state in enumerate(states[:-1], 1):
        loader = hr.torch.loader(pooled, shard=(2, 1))
        loader.load_state_dict(state)
        assert elements(loader) == mine[number:]
    for rank in range(3):
        loader = hr.torch.loader(pooled, shard=(3, rank))
        loader.load_state_dict(states[1])
        rest = whole[4:]
        assert elements(loader) == rest[: len(rest) // 3 * 3][rank::3]
        assert len(elements(loader)) == len(whole) // 3  # the next epoch is complete


def test_processes_stay_between_epochs_of_a_shard():
    pooled = hr.Dataset.range(8).map(negate).in_processes(1)
    loader = hr.torch.loader(pooled, shard=(2, 0))
    assert elements(loader) == [0, -2, -4, -6]
    loader.close()
    pids = [worker.pid for worker in process_pool._pools[1]._cluster.workers]
    assert elements(hr.torch.loader(pooled, shard=(2, 1))) == [-1, -3, -5, -7]
    assert [worker.pid for worker in process_pool._pools[1]._cluster.workers] == pids
    del pooled, loader
    gc.collect()
    wait_until(lambda: 1 not in process_pool._pools)


def test_an_order_without_a_seed_needs_a_common_one():
    pooled = NUMBERS.shuffle(23).map(negate).in_processes(2)
    with pytest.raises(hr.errors.FailedPreconditionError, match="pass a seed to `shuffle`"):
        hr.torch.loader(pooled, shard=(2, 0))


def test_ranks_agree_on_a_seed():
    store, found, fixed = distributed.HashStore(), [], []
    try:
        for rank in range(2):
            distributed.init_process_group("fake", rank=rank, world_size=2, store=store)
            data = hr.Dataset.range(20).shuffle(20).map(negate).in_processes(2)
            loader = hr.torch.loader(data)
            found.append([elements(loader), elements(loader)])
            # Each rank draws its own default seed for an order that stays the same.
            data = hr.Dataset.range(20).shuffle(20, reshuffle_each_iteration=False)
            fixed.append(elements(hr.torch.loader(data.map(negate).in_processes(2))))
            manual = hr.Dataset.range(6).shard(2, rank).map(negate).in_processes(2)
            assert elements(hr.torch.loader(manual)) == [-rank, -rank - 2, -rank - 4]
            distributed.destroy_process_group()
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    everything = sorted(range(-19, 1))
    for epoch in range(2):
        assert sorted(found[0][epoch] + found[1][epoch]) == everything
    assert found[0][0] != found[0][1]
    assert sorted(fixed[0] + fixed[1]) == everything


GLOO = """
    import sys
    import torch.distributed as distributed
    import headrace as hr

    def negate(x):
        return -x

    if __name__ == "__main__":
        rank = int(sys.argv[1])
        distributed.init_process_group(
            "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2
        )
        data = hr.Dataset.range(21).shuffle(21).map(negate).in_processes(1).batch(2)
        loader = hr.torch.loader(data)
        print(*(int(x) for batch in loader for x in batch))
        print(*(int(x) for batch in loader for x in batch))
        distributed.destroy_process_group()
"""


def test_ranks_of_a_process_group_read_disjoint_shards(tmp_path: Any):
    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(GLOO))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for epoch in range(2):
        read = [int(x) for output in outputs for x in output[epoch].split()]
        # Ten whole batches and one of a single row, which is dropped, or which one of them lacks.
        assert len(read) == len(set(read)) >= 19


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_worker_processes_of_a_dataloader_read_every_element_once():
    loader = hr.torch.loader(hr.Dataset.range(12).shuffle(12).in_processes(1).map(negate))
    workers = DataLoader(loader, batch_size=None, num_workers=2)
    assert sorted(elements(workers)) == [*range(-11, 1)]


def test_steps_that_every_rank_runs_are_named(caplog: Any):
    data = NUMBERS.map(negate).filter(is_wanted).in_processes(2)
    assert elements(hr.torch.loader(data, shard=(2, 0)))
    assert "runs for all elements in each of the 2 processes" in caplog.text
