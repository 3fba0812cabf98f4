"""Every n-th block of elements: which those are, from any place on."""

from __future__ import annotations

import pytest

from headrace.data.dataset import Dataset
from headrace.execution.build import start
from headrace.plan.ordering import ShardBlocks
from headrace.plan.traverse import cardinality


def plan_of(size: int, index: int, **terms: int) -> ShardBlocks:
    return ShardBlocks(input=Dataset.range(size).plan, num_shards=3, index=index, **terms)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 11, 12, 13, 40])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_third_block_comes_and_is_counted(size: int, index: int) -> None:
    expected = [x for x in range(size) if x // 4 % 3 == index]
    plan = plan_of(size, index, block=4)
    assert [int(x) for x in Dataset(plan)] == expected
    assert cardinality(plan) == len(expected)


def test_a_shard_of_batches_is_a_batch_of_blocks_from_any_place_on() -> None:
    batches = [batch.tolist() for batch in Dataset.range(100).shuffle(9, seed=2).batch(4)]
    shuffled = Dataset.range(100).shuffle(9, seed=2).plan
    blocks = Dataset(ShardBlocks(input=shuffled, num_shards=3, index=1, block=4))
    dataset = blocks.map(lambda x: x).batch(4)
    iterator = iter(dataset)
    states, got = [iterator.get_state()], []
    for batch in iterator:
        got.append(batch.tolist())
        states.append(iterator.get_state())
    assert got == batches[1::3]
    for number, state in enumerate(states):
        again = iter(dataset)
        again.set_state(state)
        assert [batch.tolist() for batch in again] == got[number:]


def test_over_other_steps_it_counts_what_it_reads() -> None:
    filtered = Dataset.range(60).filter(lambda x: x % 2 == 0).plan
    plan = ShardBlocks(input=filtered, num_shards=2, index=0, block=3)
    iterator = start(plan, seed=1)
    found: list[int] = []
    while (chunk := iterator.next_chunk(2)) is not None:
        found += [int(row) for row in chunk.rows()]
    iterator.close()
    assert found == [x for x in range(0, 60, 2) if x // 2 // 3 % 2 == 0]
