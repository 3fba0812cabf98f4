"""Whether reading ahead is free is looked at before each read: steps learn it as they go on."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.execution.build import start
from headrace.execution.intake import Intake

from .contract import ListIterator

Dataset = hr.Dataset

STEPS = {
    "batch": lambda ds: ds.batch(2),
    "batch and unbatch": lambda ds: ds.batch(2).unbatch(),
    "shuffle": lambda ds: ds.shuffle(3),
    "repeat": lambda ds: ds.repeat(2),
    "take": lambda ds: ds.take(50),
    "skip": lambda ds: ds.skip(1),
    "shard": lambda ds: ds.shard(2, 0),
    "enumerate": lambda ds: ds.enumerate(),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(90)),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(3)),
    "prefetch": lambda ds: ds.prefetch(2),
    "cache": lambda ds: ds.cache(),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_over_open_datasets_reads_ahead_as_freely_as_they_do(name):
    opened = []

    def free(x):
        opened.append(int(x))
        return Dataset.range(50)

    def costly(x):
        return Dataset.range(50).map(lambda y: y if y >= 0 else -y)

    for function, is_free in ((free, True), (costly, False)):
        iterator = start(STEPS[name](Dataset.range(8).interleave(function, 4)).plan, seed=1)
        assert not iterator.reads_ahead_freely
        iterator.next_chunk(1)
        if name == "flat_map":
            is_free = True  # in the datasets that it opens itself
        assert iterator.reads_ahead_freely is is_free
        iterator.close()


def test_an_intake_asks_for_no_more_than_it_needs_from_the_moment_when_that_costs_calls():
    input_ = ListIterator([np.int64(n) for n in range(5000)])
    intake = Intake(input_)
    for _ in range(900):
        intake.look_ahead(1)
        intake.use(1)
    assert input_.most_asked > 50
    while intake.in_hand:
        intake.use(1)
    input_.most_asked, input_.reads_ahead_freely = 0, False
    assert intake.look_ahead(2).size == 2
    assert input_.most_asked == 2


def test_a_new_pass_is_asked_for_no_more_than_is_needed_until_it_is_known_to_be_free():
    calls = []

    def counted(x):
        calls.append(int(x))
        return x

    passes = []

    def opened(x):
        passes.append(int(x))
        inner = Dataset.range(200)
        return inner if len(passes) == 1 else inner.map(counted)

    iterator = iter(Dataset.range(1).flat_map(opened).repeat(2))
    for _ in range(200):
        next(iterator)
    assert calls == []
    next(iterator)
    assert calls == [0]
    iterator.close()
