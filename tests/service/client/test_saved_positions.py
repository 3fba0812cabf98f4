"""Remaining splits at a saved position of the client stage."""

from __future__ import annotations

import random
from typing import Any

import pytest

import headrace as hr
from headrace.execution.build import InProcessSplitSource, build_client_stage, build_iterator
from headrace.execution.delivered_elements import END_ORDINAL
from headrace.rewrites.partition import PlanPartition, partition_plan
from headrace.service.client.saved_positions import (
    find_read_splits,
    position_digest,
    resume_iteration,
)
from headrace.service.messages import JobOptions, OpenIteration
from headrace.service.ranges import subtract


def opened(number: int) -> hr.Dataset:
    # One of them is still read long after others are done.
    return hr.Dataset.range(40 if number == 1 else number % 3 + 1)


PLANS: dict[str, Any] = {
    "in turn": lambda: hr.Dataset.range(20).interleave(opened, cycle_length=3),
    "in turn, batched": lambda: hr.Dataset.range(20).interleave(opened, cycle_length=3).batch(2),
    "in turn, repeated": lambda: hr.Dataset.range(9).interleave(opened, cycle_length=2).repeat(3),
    "in turn, shuffled": lambda: (
        hr.Dataset.range(20).interleave(opened, cycle_length=3).shuffle(4, seed=1)
    ),
    "one after the other": lambda: hr.Dataset.range(20).flat_map(opened),
    "rows": lambda: hr.Dataset.range(20).map(lambda x: x),
}


class Noting:
    """Computes splits in this process, and records which."""

    def __init__(self, plan: Any, made: PlanPartition) -> None:
        self.opened: set[int] = set()
        self._splits = InProcessSplitSource(
            lambda splits: build_iterator(
                plan, seed=7, next_splits=splits, with_element_ids=True, mode=made.mode
            )  # type: ignore[arg-type, return-value]
        )

    def open(self, split: int, first: int) -> Any:
        self.opened.add(split)
        return self._splits.open(split, first)


@pytest.mark.parametrize("name", PLANS)
def test_remaining_splits_are_those_that_a_resumed_reader_opens(name: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    plan = PLANS[name]().plan
    made = partition_plan(plan, ordered=True, max_shuffle_bytes=0)
    iterator = build_client_stage(made, Noting(plan, made), seed=7)
    while (chunk := iterator.next_chunk(chance.randint(1, 9))) is not None:
        state = chunk.state_at(chance.randint(0, chunk.size))
        first, read = find_read_splits(made, state)
        assert all(first < start < stop <= made.num_splits for start, stop in read)
        left = subtract(((first, made.num_splits),), read)
        splits = Noting(plan, made)
        rest = build_client_stage(made, splits, seed=7)
        rest.set_state(state)
        while rest.next_chunk(16) is not None:
            pass
        rest.close()
        assert splits.opened == {split for begin, end in left for split in range(begin, end)}
    iterator.close()


def test_an_interleave_with_one_long_dataset_excludes_finished_splits() -> None:
    plan = hr.Dataset.range(60).interleave(opened, cycle_length=2).plan
    made = partition_plan(plan, ordered=True)
    state = {
        "slots": [{"outer": 5, "place": 3}, {"outer": 41, "place": 0}],
        "input": 42,
    }
    assert find_read_splits(made, state) == (5, ((6, 41),))
    assert find_read_splits(made, {**state, "slots": [None, None]}) == (42, ())
    assert find_read_splits(made, None) == (0, ())


OPENING = OpenIteration(
    client_id="c",
    dataset_id="1000",
    job_name="job",
    epoch=(0,),
    seed=1,
    options=JobOptions(processing_mode=2),
)


def test_a_resumed_reading_requests_the_remaining_splits() -> None:
    position = {
        "positions": {
            "watermark": 3,
            "delivered": [[5, 7]],
            "partial_splits": [[8, 1, [[0, 2], [4, None]]]],
        },
        "seed": 9,
    }
    opening, base = resume_iteration(OPENING, position)
    assert (opening.seed, opening.first_split) == (9, 3)
    assert opening.delivered == ((5, 7),)
    assert opening.partial_splits == ((8, ((0, 2), (4, END_ORDINAL))),)
    assert base.to_json() == position["positions"]
    assert opening.start_position_id


def test_different_positions_have_different_digests() -> None:
    place = {"watermark": 3, "delivered": [[5, 7]]}
    names = {
        resume_iteration(OPENING, {"positions": each, "seed": seed})[0].start_position_id
        for each in (place, {"watermark": 3}, {"watermark": 4})
        for seed in (1, 2)
    }
    assert len(names) == 6
    assert position_digest([1, {"a": 2, "b": 3}]) == position_digest([1, {"b": 3, "a": 2}])
