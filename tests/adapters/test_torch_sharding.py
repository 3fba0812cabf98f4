"""Sharding of plans by rank and worker process, without PyTorch."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

import headrace as hr
from headrace.adapters.torch_sharding import (
    WHOLE_DATASET,
    DataShard,
    draws_without_seed,
    find_repeated_step,
    is_read_ahead,
    is_sharded_manually,
    may_end_at_different_steps,
    shard_plan,
)
from headrace.distribute import AutoShardPolicy
from headrace.errors import FailedPreconditionError

SIZES = [0, 1, 4, 7, 12, 13]


def read(plan: Any) -> list[int]:
    return [int(x) for x in hr.Dataset(plan)]


def read_shards(plan: Any, ranks: int, processes: int, **options: Any) -> list[list[list[int]]]:
    """Return the elements that each worker process of each rank reads."""
    return [
        [
            read(shard_plan(plan, DataShard(ranks, rank), DataShard(processes, process), **options))
            for process in range(processes)
        ]
        for rank in range(ranks)
    ]


def interleave_workers(lists: list[list[int]]) -> list[int]:
    """Interleave the elements of worker processes as a DataLoader does."""
    rounds = itertools.zip_longest(*lists)
    return [x for each in rounds for x in each if x is not None]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_shards_are_disjoint_and_ranks_get_equal_numbers(size: int, ranks: int, processes: int):
    plan = hr.Dataset.range(size).shuffle(size or 1, seed=1).plan
    whole = read(plan)
    parts = read_shards(plan, ranks, processes, drop_remainder=True)
    by_rank = [interleave_workers(lists) for lists in parts]
    assert by_rank == [whole[: size - size % ranks][rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("size", SIZES)
def test_every_element_is_read_once_if_the_remainder_is_kept(size: int):
    plan = hr.Dataset.range(size).plan
    parts = read_shards(plan, 3, 2, drop_remainder=False)
    found = [x for lists in parts for part in lists for x in part]
    assert sorted(found) == list(range(size))


@pytest.mark.parametrize("size", [0, 2, 3, 10, 11, 40])
def test_ranks_end_together_if_the_cardinality_is_unknown(size: int):
    mapped: list[int] = []

    def negate(x: Any) -> Any:
        mapped.append(int(x))
        return -x

    plan = hr.Dataset.range(size).filter(lambda x: x % 3).map(negate).prefetch(2).plan
    whole = [x for x in range(size) if x % 3]
    rounds = len(whole) // 2
    parts = read_shards(plan, 2, 2, drop_remainder=True)
    assert [[-x for x in interleave_workers(lists)] for lists in parts] == [
        whole[: 2 * rounds][rank::2] for rank in range(2)
    ]
    assert sorted(mapped) == sorted(whole[: 2 * rounds])  # each rank runs it only for its elements
    kept = read_shards(plan, 2, 1, drop_remainder=False)
    assert sorted(-x for lists in kept for part in lists for x in part) == whole


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("drop", [True, False])
def test_a_round_is_restored_at_each_position_and_after_each_failure(block: int, drop: bool):
    def picky(x: Any) -> bool:
        if x in (4, 5, 11):
            raise OSError(f"no image {x}")
        return bool(x != 3)

    plan = hr.Dataset.range(25).filter(picky).batch(block, drop).plan
    part = hr.Dataset(shard_plan(plan, DataShard(3, 1), WHOLE_DATASET, drop_remainder=True))

    def rest_of(iterator: Any, states: list[Any]) -> list[Any]:
        found: list[Any] = []
        while True:
            states.append(json.loads(json.dumps(iterator.get_state())))
            try:
                found.append(next(iterator).tolist())
            except StopIteration:
                return found
            except hr.errors.UserFunctionError as error:
                found.append(str(error.__cause__))

    states: list[Any] = []
    whole = rest_of(iter(part), states)
    images = [x for x in range(25) if x not in (3, 4, 5, 11)]
    batches = [images[at : at + block] for at in range(0, len(images), block)]
    if drop:
        batches = [batch for batch in batches if len(batch) == block]
    mine = batches[: len(batches) // 3 * 3][1::3]
    assert [x for x in whole if isinstance(x, list)] == mine
    assert [x for x in whole if isinstance(x, str)] == [f"no image {x}" for x in (4, 5, 11)]
    for at, state in enumerate(states):
        iterator = iter(part)
        iterator.set_state(state)
        assert rest_of(iterator, []) == whole[at:], at


@pytest.mark.parametrize("rows", range(14))
@pytest.mark.parametrize("drop", [True, False])
def test_shards_have_the_batches_of_the_whole_dataset(rows: int, drop: bool):
    known = hr.Dataset.range(rows).map(lambda x: -x).batch(2, drop)
    unknown = hr.Dataset.range(rows).filter(lambda x: x >= 0).map(lambda x: -x).batch(2, drop)
    whole = [batch.tolist() for batch in known]
    for dataset in (known, unknown, unknown.prefetch(1), known.map(lambda x: x)):
        for rank in range(3):
            plan = shard_plan(dataset.plan, DataShard(3, rank), WHOLE_DATASET, drop_remainder=True)
            found = [batch.tolist() for batch in hr.Dataset(plan)]
            assert found == whole[: len(whole) // 3 * 3][rank::3]
        plan = shard_plan(
            dataset.plan, DataShard(2, 1), DataShard(2, 0), drop_remainder=False, start=1
        )
        assert [batch.tolist() for batch in hr.Dataset(plan)] == whole[1:][1::2][0::2]


def test_steps_repeated_by_every_reader_are_named():
    def opened(x: Any) -> hr.Dataset:
        return hr.Dataset.range(3)

    def found(dataset: hr.Dataset) -> str:
        return find_repeated_step(
            shard_plan(dataset.plan, DataShard(2, 0), DataShard(2, 1), drop_remainder=True)
        )

    rows = hr.Dataset.range(9)
    assert found(rows.map(abs).batch(2)) == ""  # each rank runs it only for its rows
    assert found(rows.filter(lambda x: x > 2).map(abs)) == ""
    assert found(rows.filter(lambda x: x > 2).map(abs).batch(2)) == ""
    assert found(rows.map(abs).filter(lambda x: x > 2).batch(2)).startswith("map")
    assert found(rows.map(abs).batch(2).shuffle(2)).startswith("map")
    assert found(rows.interleave(opened).batch(2)).startswith("interleave")
    assert find_repeated_step(rows.interleave(opened).batch(2).plan) == ""


def test_ranks_with_different_files_may_end_at_different_steps():
    options = hr.Options()
    options.auto_shard_policy = AutoShardPolicy.FILE
    plan = hr.Dataset.range(10).filter(lambda x: x > 2).plan
    assert not may_end_at_different_steps(plan, DataShard(2, 0))
    assert may_end_at_different_steps(hr.Dataset(plan).with_options(options).plan, DataShard(2, 0))


def test_another_number_of_ranks_resumes_after_the_read_rounds():
    plan = hr.Dataset.range(20).plan
    parts = read_shards(plan, 3, 1, drop_remainder=True, start=8)
    assert parts == [[[8, 11, 14, 17]], [[9, 12, 15, 18]], [[10, 13, 16, 19]]]


def test_files_are_sharded_with_the_file_policy(tmp_path: Any):
    names = [str(tmp_path / f"{n}.txt") for n in range(4)]
    for n, name in enumerate(names):
        (tmp_path / name).write_text(f"{n}0\n{n}1\n")
    options = hr.Options()
    options.auto_shard_policy = AutoShardPolicy.FILE
    dataset = hr.TextLineDataset(names).with_options(options)
    parts = read_shards(dataset.plan, 2, 2, drop_remainder=True)
    assert parts == [[[0, 1], [20, 21]], [[10, 11], [30, 31]]]
    with pytest.raises(hr.errors.InvalidArgumentError, match="4 files"):
        read_shards(dataset.plan, 5, 1, drop_remainder=True)
    with pytest.raises(FailedPreconditionError, match="restore it on the same rank"):
        read_shards(dataset.plan, 2, 1, drop_remainder=True, start=4)


def test_a_shard_hint_is_replaced():
    options = hr.Options()
    options.auto_shard_policy = AutoShardPolicy.HINT
    dataset = hr.Dataset.range(8).shard(hr.service.SHARD_HINT, 0).map(lambda x: x * 10)
    parts = read_shards(dataset.with_options(options).plan, 2, 1, drop_remainder=True)
    assert parts == [[[0, 20, 40, 60]], [[10, 30, 50, 70]]]


def test_an_unordered_step_is_not_sharded_by_element():
    def opened(x: Any) -> hr.Dataset:
        return hr.Dataset.range(3).map(lambda y: x * 10 + y)

    dataset = hr.Dataset.range(4).interleave(opened, num_parallel_calls=2, deterministic=False)
    with pytest.raises(FailedPreconditionError, match="order differs between the"):
        shard_plan(dataset.plan, WHOLE_DATASET, DataShard(2, 0), drop_remainder=True)
    parts = read_shards(dataset.plan, 2, 1, drop_remainder=True)  # rounds keep the order
    assert interleave_workers([part for (part,) in parts]) == read(
        hr.Dataset.range(4).interleave(opened).plan
    )
    assert (
        len(read(shard_plan(dataset.plan, WHOLE_DATASET, WHOLE_DATASET, drop_remainder=True))) == 12
    )
    mapped = hr.Dataset.range(9).map(lambda x: -x, num_parallel_calls=2, deterministic=False)
    parts = read_shards(mapped.plan, 2, 2, drop_remainder=False)  # the map runs on each one's part
    assert sorted(-x for lists in parts for part in lists for x in part) == list(range(9))


def test_manual_sharding_is_detected():
    assert is_sharded_manually(hr.Dataset.range(9).shard(2, 1).batch(2).plan, DataShard(2, 1))
    assert not is_sharded_manually(hr.Dataset.range(9).shard(3, 1).plan, DataShard(2, 1))
    with pytest.raises(FailedPreconditionError, match=r"shard\(2, 0\), but this is rank 1 of 2"):
        is_sharded_manually(hr.Dataset.range(9).shard(2, 0).plan, DataShard(2, 1))


def test_prefetching_and_unseeded_steps_are_detected():
    dataset = hr.Dataset.range(9)
    assert is_read_ahead(dataset.prefetch(1).with_options(hr.Options()).take(3).plan)
    assert not is_read_ahead(dataset.prefetch(1).map(abs).plan)
    assert draws_without_seed(dataset.shuffle(2).batch(2).plan)
    assert not draws_without_seed(dataset.shuffle(2, seed=0).map(abs).plan)


def test_without_pytorch_using_the_loader_names_the_missing_package():
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import headrace as hr\n"
        "assert 'loader' in dir(hr.torch)\n"
        "try:\n"
        "    hr.torch.loader\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "hr.torch.loader requires PyTorch" in done.stdout, done.stderr
    assert "pip install 'headrace[torch]'" in done.stdout
