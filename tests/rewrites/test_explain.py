"""`explain` says what is arithmetic, what is dealt out, and where a wish is not followed."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.rewrites.explain import explain

Dataset = hr.Dataset


def keep(x):
    return x


def lines(dataset, text):
    return [line.strip() for line in explain(dataset.plan).splitlines() if text in line]


def test_the_index_part_is_marked_where_it_begins():
    (line,) = lines(Dataset.range(9).shuffle(4).map(keep).batch(3), "index part")
    assert line.startswith("Shuffle(")
    both = Dataset.zip(Dataset.range(9).map(keep), Dataset.range(3))
    assert [line[:7] for line in lines(both, "index part")] == ["Indices", "Indices"]


def test_a_wish_for_free_order_that_is_not_followed_is_marked():
    mapped = Dataset.range(9).map(keep, num_parallel_calls=2, deterministic=False)
    (line,) = lines(mapped.filter(keep).shuffle(3), "keeps its order")
    assert line.startswith("Map(")
    assert lines(mapped.batch(2), "keeps its order") == []
    kept = Dataset.range(9).map(keep, num_parallel_calls=2).filter(keep).shuffle(3)
    assert lines(kept, "keeps its order") == []
    free = kept.with_options(hr.Options(deterministic=False))
    assert len(lines(free, "keeps its order")) == 1


def test_of_two_steps_with_a_free_order_the_lower_one_says_which_step_keeps_it():
    def opened(x):
        return Dataset.range(3)

    def read(**how):
        files = Dataset.range(9).interleave(opened, cycle_length=2, num_parallel_calls=2)
        return files.map(keep, **how).with_options(hr.Options(deterministic=False))

    for how in ({"num_parallel_calls": 2}, {}):
        (line,) = lines(read(**how), "keeps its order")
        assert line.startswith("Interleave(")
        assert "the map above, whose order is free" in line
    assert lines(read(deterministic=True), "keeps its order") == []
    (line,) = lines(read(deterministic=True).shuffle(4), "keeps its order")
    assert "the shuffle above reads it again after a restore" in line


@pytest.mark.parametrize(
    ("dataset", "units"),
    [
        (Dataset.range(10).map(keep).batch(4), "3"),
        (Dataset.range(10).map(keep).repeat(), "without end"),
        (Dataset.zip(Dataset.range(3).filter(keep), Dataset.range(3)), "1, the whole plan"),
    ],
)
def test_the_units_are_counted(dataset, units):
    (line,) = lines(dataset, "units")
    assert line.startswith(f"units that a service would deal out: {units}")
    assert dataset.explain() == explain(dataset.plan)
