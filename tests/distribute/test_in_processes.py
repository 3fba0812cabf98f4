"""Distributed datasets that end in `in_processes`, or contain it."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest

import headrace as hr
from headrace.distribute import AutoShardPolicy, DistributedDataset, InputContext
from headrace.service import process_pool
from tests.service.reading import wait_until

pytestmark = pytest.mark.system


def as_int(x: Any) -> Any:
    return int(x)


@pytest.fixture(scope="module", autouse=True)
def _warm_pool() -> Iterator[None]:
    """Keep a pool of one process during the tests of this module."""
    datasets = [hr.Dataset.range(2).map(as_int).in_processes(1)]
    assert len(list(datasets[0])) == 2
    yield
    datasets.clear()
    gc.collect()
    wait_until(lambda: not process_pool._pools)


def open_worker(dataset: hr.Dataset, worker: int, workers: int = 2) -> Any:
    context = InputContext(workers, worker, 2)
    return iter(DistributedDataset(dataset, context, seed=7))


def read(iterator: Any) -> list[list[int]]:
    with iterator:
        return [rows_of(step) for step in iterator]


def rows_of(step: Any) -> list[int]:
    return [row for values in step.values for row in values.tolist()]


def policy(policy: AutoShardPolicy) -> hr.Options:
    return hr.Options(auto_shard_policy=policy)


def write_files(folder: Any) -> hr.Dataset:
    for name in range(4):
        (folder / f"{name}.txt").write_text("".join(f"{10 * name + row}\n" for row in range(6)))
    names = [str(folder / f"{name}.txt") for name in range(4)]
    return hr.Dataset.from_tensor_slices(names).interleave(hr.TextLineDataset).map(as_int)


@pytest.mark.parametrize("batches_in_pool", [True, False])
def test_workers_divide_each_batch(batches_in_pool: bool):
    data = hr.Dataset.range(24).shuffle(24).map(as_int)  # without a seed
    data = data.batch(6).in_processes(1) if batches_in_pool else data.in_processes(1).batch(6)
    found = [read(open_worker(data, worker)) for worker in range(2)]
    assert [[len(rows) for rows in each] for each in found] == [[3] * 4] * 2
    assert sorted(x for each in found for rows in each for x in rows) == list(range(24))


@pytest.mark.parametrize("chosen", [AutoShardPolicy.AUTO, AutoShardPolicy.FILE])
@pytest.mark.parametrize("batches_in_pool", [True, False])
def test_workers_read_their_own_files(tmp_path: Any, chosen: Any, batches_in_pool: bool):
    data = write_files(tmp_path)
    pooled = data.batch(2).in_processes(1) if batches_in_pool else data.in_processes(1).batch(2)
    pooled = pooled.with_options(policy(chosen))
    local = data.batch(2).with_options(policy(chosen))
    found = [read(open_worker(pooled, worker)) for worker in range(2)]
    assert found == [read(open_worker(local, worker)) for worker in range(2)]
    rows = sorted(x for each in found for batch in each for x in batch)
    assert rows == sorted(10 * name + row for name in range(4) for row in range(6))


@pytest.mark.parametrize("has_files", [True, False])
def test_a_state_continues_with_another_number_of_workers(tmp_path: Any, has_files: bool):
    data = write_files(tmp_path) if has_files else hr.Dataset.range(24).shuffle(24).map(as_int)
    data = data.in_processes(1).batch(4)
    workers = [open_worker(data, worker) for worker in range(2)]
    seen = [x for each in workers for x in rows_of(next(each))]
    states = [json.loads(json.dumps(each.get_state())) for each in workers]
    for each in workers:
        each.close()
    resumed = [open_worker(data, worker) for worker in range(2)]
    merged = states[0]
    if has_files:
        positions = [s["distributed"]["streams"][i] for i, s in enumerate(states)]
        merged = {**states[0], "distributed": {"streams": positions}}
    for each in resumed:
        each.set_state(merged)
    rest = [x for each in resumed for batch in read(each) for x in batch]
    assert sorted(seen + rest) == (
        sorted(10 * name + row for name in range(4) for row in range(6))
        if has_files
        else list(range(24))
    )
    (alone,) = [open_worker(data, 0, 1)]
    alone.set_state(merged)
    assert sorted(seen + [x for batch in read(alone) for x in batch]) == sorted(seen + rest)


def test_off_reads_everything_on_every_worker():
    data = hr.Dataset.range(8).map(as_int).in_processes(1).batch(8)
    for chosen, expected in ((AutoShardPolicy.OFF, [0, 1, 2, 3]), (AutoShardPolicy.AUTO, [4, 5])):
        part = data.with_options(policy(chosen))
        assert read(open_worker(part, 1))[0][: len(expected)] == expected, chosen
