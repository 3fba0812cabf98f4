"""Partitions of plans: worker stage, client stage, and the text of `explain`."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.plan.node import Node
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.source import INFINITE
from headrace.plan.traverse import walk
from headrace.rewrites.explain import explain, explain_partition
from headrace.rewrites.partition import partition_plan
from headrace.rewrites.split_space import compute_split_space

Dataset = hr.Dataset


def chain(plan: Node) -> str:
    """Return the kinds of a plan's steps, inputs first."""
    return " ".join(node.kind for node in walk(plan))


def both_stages(dataset: Dataset, ordered: bool = True, **arguments: object) -> tuple[str, str]:
    made = partition_plan(dataset.plan, ordered=ordered, **arguments)
    assert compute_split_space(made.worker_stage).size == made.num_splits
    return chain(made.worker_stage), chain(made.client_stage)


def keep(x):
    return x if x >= 0 else -x  # by rows


def odd(x):
    return bool(x % 2)


def opened(x):
    return Dataset.range(3)


FILES = Dataset.range(8)
READ = FILES.interleave(opened, cycle_length=4, block_length=2)

IN_ORDER = {
    "one-to-one steps": (
        FILES.shuffle(8).map(keep).batch(2),
        "indices shuffle gather map batch boundary",
        "read_splits",
    ),
    "a batch of the index part": (FILES.batch(2), "indices batch gather boundary", "read_splits"),
    "a filter": (FILES.filter(odd), "indices gather filter boundary", "read_splits"),
    "a batch over a filter": (
        FILES.filter(odd).batch(2),
        "indices gather filter boundary",
        "read_splits batch",
    ),
    "a flat_map": (
        FILES.flat_map(opened).map(keep),
        "indices gather interleave map boundary",
        "read_splits",
    ),
    "an interleave": (READ, "indices gather interleave boundary", "read_splits"),
    "steps over an interleave": (
        READ.map(keep).filter(odd).batch(2),
        "indices gather interleave boundary map filter",
        "read_splits batch",
    ),
    "an interleave of what a filter left": (
        FILES.filter(odd).interleave(opened, cycle_length=2),
        "indices gather filter boundary",
        "read_splits interleave",
    ),
    "steps over a shuffle": (
        READ.shuffle(9).map(keep).batch(2),
        "indices gather interleave boundary map",
        "read_splits shuffle raise_deferred_errors batch",
    ),
    "a filter over a shuffle": (
        READ.shuffle(9).filter(odd).map(keep),
        "indices gather interleave boundary",
        "read_splits shuffle filter map",
    ),
    "steps over the whole stream": (
        FILES.filter(odd).take(3).map(keep).enumerate(),
        "indices gather filter boundary map",
        "read_splits take raise_deferred_errors enumerate",
    ),
    "repeat of a filter": (
        FILES.filter(odd).repeat(3).batch(2),
        "indices gather filter repeat boundary",
        "read_splits batch",
    ),
    "repeat of an interleave": (
        READ.repeat(3).map(keep),
        "indices gather interleave boundary map repeat",
        "read_splits repeat raise_deferred_errors",
    ),
    "repeat of a shuffle, with others": (
        READ.shuffle(3).concatenate(FILES.filter(odd).take(2)).repeat().map(keep),
        "indices gather interleave boundary map indices gather filter boundary map "
        "concatenate repeat",
        "read_splits shuffle read_splits take concatenate repeat raise_deferred_errors",
    ),
    "streams side by side": (
        Dataset.zip(FILES.filter(odd), FILES.map(keep)),
        "indices gather filter indices gather map zip",
        "read_splits",
    ),
    "windows": (
        FILES.map(keep).group_by_window(lambda x: 0, lambda key, w: w.batch(2), 2),
        "indices gather map boundary",
        "read_splits group_by_window",
    ),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_plan_is_partitioned_so_that_its_order_is_kept(name):
    dataset, below, above = IN_ORDER[name]
    assert both_stages(dataset, element_bytes=lambda node: 8) == (below, above)


IN_ANY_ORDER = {
    "a batch over a filter": (
        FILES.filter(odd).batch(2).map(keep),
        "indices gather filter boundary batch map",
        "read_splits",
    ),
    "an interleave of what a filter left": (
        FILES.filter(odd).interleave(opened, cycle_length=2).shuffle(9).map(keep).batch(4),
        "indices gather filter interleave boundary shuffle map batch",
        "read_splits",
    ),
    "a batch that drops its remainder": (
        FILES.filter(odd).batch(2, drop_remainder=True).map(keep),
        "indices gather filter boundary batch",
        "read_splits unbatch batch map",
    ),
    "what takes batches apart": (
        FILES.filter(odd).batch(2).map(keep).unbatch().map(keep),
        "indices gather filter boundary batch map",
        "read_splits unbatch map",
    ),
    "steps over the whole stream": (
        FILES.filter(odd).shuffle(3).take(3).map(keep),
        "indices gather filter shuffle boundary",
        "read_splits take map",
    ),
    "buckets": (
        FILES.flat_map(opened).bucket_by_sequence_length(int, [2], [2, 2], no_padding=True),
        "indices gather interleave boundary bucket_by_sequence_length",
        "read_splits",
    ),
    "steps above a large shuffle": (
        FILES.flat_map(opened).shuffle(4).flat_map(opened),
        "indices gather interleave boundary shuffle",
        "read_splits interleave",
    ),
}


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_in_unordered_mode_id_propagating_steps_run_on_workers(name):
    dataset, below, above = IN_ANY_ORDER[name]
    assert both_stages(dataset, ordered=False) == (below, above)
    assert not partition_plan(dataset.plan, ordered=False).is_ordered


def test_a_plan_with_several_streams_uses_an_ordered_mode():
    dataset = FILES.filter(odd).take(2).repeat(3)
    made = partition_plan(dataset.plan, ordered=False)
    assert (made.mode, chain(made.client_stage)) == (
        "ordered + pushed down",
        "read_splits take repeat",
    )


def test_a_step_with_elements_of_unknown_size_stays_above_a_shuffle():
    assert both_stages(READ.shuffle(9).map(keep)) == (
        "indices gather interleave boundary",
        "read_splits shuffle map",
    )


def test_steps_are_pushed_below_a_shuffle_if_its_buffer_fits_the_limit():
    images = READ.map(lambda x: x + 1).shuffle(100).map(lambda x: (x, x * 2))
    below = "indices gather interleave boundary map map"
    assert both_stages(images, element_bytes=lambda node: 1000, max_shuffle_bytes=100_000) == (
        below,
        "read_splits shuffle raise_deferred_errors",
    )
    kept = partition_plan(
        images.plan, ordered=True, element_bytes=lambda node: 1000, max_shuffle_bytes=99_999
    )
    assert kept.mode == "ordered"
    assert kept.client_shuffle_bytes == 100_000
    assert chain(kept.client_stage) == "read_splits shuffle map map"
    why = [placed.reason for placed in kept.placements if placed.runs_on == "client"]
    assert any("would exceed the memory limit" in reason for reason in why)


def test_errors_below_a_shuffle_differ_from_errors_of_pushed_down_steps():
    failing = READ.filter(odd).shuffle(9).map(keep)
    assert both_stages(failing, element_bytes=lambda node: 8) == (
        "indices gather interleave boundary filter tag_upstream_errors map",
        "read_splits shuffle raise_deferred_errors",
    )


def test_errors_of_pushed_down_steps_are_raised_in_one_place():
    over_both = READ.shuffle(9).map(keep).concatenate(READ.take(4).map(keep)).map(keep)
    _, above = both_stages(over_both, element_bytes=lambda node: 8)
    assert (
        above == "read_splits shuffle raise_deferred_errors read_splits take raise_deferred_errors "
        "concatenate"
    )
    _, above = both_stages(over_both.take(5).map(keep), element_bytes=lambda node: 8)
    assert above.endswith("concatenate take map map")
    one_only = READ.shuffle(9).map(keep).concatenate(READ).map(keep)
    _, above = both_stages(one_only, element_bytes=lambda node: 8)
    assert above == "read_splits shuffle raise_deferred_errors read_splits concatenate map"


def test_split_indices_are_known_in_every_epoch():
    one, two = FILES.filter(odd).take(9), Dataset.range(5).filter(odd).take(9)
    three = Dataset.range(3).filter(odd).take(9).repeat(2).concatenate(two)
    made = partition_plan(one.concatenate(three.repeat(4)).plan, ordered=True)
    first, second, third = [
        node for node in walk(made.client_stage) if isinstance(node, ReadSplits)
    ]
    assert made.num_splits == 8 + 4 * (3 * 2 + 5)
    assert (first.num_splits, second.num_splits, third.num_splits) == (8, 3, 5)
    assert first.split_at((), 7) == 7
    assert second.split_at((0, 0), 0) == 8
    assert second.split_at((2, 1), 2) == 8 + 2 * 11 + 3 + 2
    assert third.split_at((3,), 4) == 8 + 3 * 11 + 6 + 4 == made.num_splits - 1


def test_an_infinite_plan_has_infinitely_many_splits():
    made = partition_plan(FILES.filter(odd).shuffle(3).repeat().plan, ordered=True)
    assert made.num_splits == INFINITE


def test_explain_shows_where_each_step_runs_and_why():
    made = partition_plan(READ.filter(odd).shuffle(4).enumerate().plan, ordered=True)
    placed = {placed.step.split()[0]: (placed.runs_on, placed.reason) for placed in made.placements}
    assert placed["interleave"][0] == "both"
    assert placed["filter"][0] == "workers"
    assert placed["shuffle"] == ("client", "needs the elements of several splits in order")


def test_the_client_needs_element_numbers_if_it_opens_datasets():
    assert partition_plan(READ.shuffle(4).flat_map(opened).plan, ordered=True).wants_element_numbers
    assert not partition_plan(READ.shuffle(4).plan, ordered=True).wants_element_numbers


def test_an_indivisible_plan_cannot_be_partitioned():
    class Whole(hr.Source):
        size = 1
        splittable = False

        def open(self, start, stop, position=None, *, pass_number=()):
            raise NotImplementedError

    with pytest.raises(FailedPreconditionError, match="cannot be divided"):
        partition_plan(Dataset.from_source(Whole()).plan, ordered=True)


def test_both_sides_partition_identically():
    dataset = Dataset.from_tensor_slices(np.arange(8)).interleave(opened).shuffle(5).map(keep)
    one, other = (
        partition_plan(dataset.plan, ordered=True),
        partition_plan(dataset.plan, ordered=True),
    )
    assert (one.mode, chain(one.worker_stage), chain(one.client_stage)) == (
        other.mode,
        chain(other.worker_stage),
        chain(other.client_stage),
    )


def test_explain_describes_both_stages():
    text = explain_partition(
        partition_plan(READ.filter(odd).shuffle(4).map(keep).plan, ordered=True)
    )
    assert "order: as in a single process" in text
    assert "workers  filter" in text
    assert "client   shuffle" in text
    assert "elements of unknown size" in text
    any_order = explain_partition(partition_plan(FILES.filter(odd).batch(2).plan, ordered=False))
    assert "order: as workers finish" in any_order
    assert "bytes" not in any_order


# --- `explain`: index plans, numbers of splits, and steps that stay ordered -----------------------


def keep_all(x):
    return x


def lines(dataset, text):
    return [line.strip() for line in explain(dataset.plan).splitlines() if text in line]


def test_explain_marks_the_top_of_the_index_plan():
    (line,) = lines(Dataset.range(9).shuffle(4).map(keep_all).batch(3), "index plan")
    assert line.startswith("Shuffle(")
    both = Dataset.zip(Dataset.range(9).map(keep_all), Dataset.range(3))
    assert [line[:7] for line in lines(both, "index plan")] == ["Indices", "Indices"]


def test_explain_marks_steps_that_stay_ordered_despite_the_request():
    mapped = Dataset.range(9).map(keep_all, num_parallel_calls=2, deterministic=False)
    (line,) = lines(mapped.filter(keep_all).shuffle(3), "ordered despite")
    assert line.startswith("Map(")
    assert lines(mapped.batch(2), "ordered despite") == []
    kept = Dataset.range(9).map(keep_all, num_parallel_calls=2).filter(keep_all).shuffle(3)
    assert lines(kept, "ordered despite") == []
    free = kept.with_options(hr.Options(deterministic=False))
    assert len(lines(free, "ordered despite")) == 1


def test_explain_names_the_step_that_keeps_a_lower_step_ordered():
    def opened(x):
        return Dataset.range(3)

    def read(**how):
        files = Dataset.range(9).interleave(opened, cycle_length=2, num_parallel_calls=2)
        return files.map(keep_all, **how).with_options(hr.Options(deterministic=False))

    for how in ({"num_parallel_calls": 2}, {}):
        (line,) = lines(read(**how), "ordered despite")
        assert line.startswith("Interleave(")
        assert "the unordered map above" in line
    assert lines(read(deterministic=True), "ordered despite") == []
    (line,) = lines(read(deterministic=True).shuffle(4), "ordered despite")
    assert "the shuffle above reads its input again after a restore" in line


@pytest.mark.parametrize(
    ("dataset", "splits"),
    [
        (Dataset.range(10).map(keep_all).batch(4), "3"),
        (Dataset.range(10).map(keep_all).repeat(), "infinite"),
        (Dataset.zip(Dataset.range(3).filter(keep_all), Dataset.range(3)), "1, the whole plan"),
    ],
)
def test_explain_shows_the_number_of_splits(dataset, splits):
    (line,) = lines(dataset, "number of splits")
    assert line.startswith(f"number of splits: {splits}")
    assert dataset.explain() == explain(dataset.plan)
