"""One worker's part of a dataset that several workers distribute; the other workers do not run."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.distribute import DistributedDataset, InputContext, InputOptions
from headrace.distribute.input_streams import merge_states
from headrace.errors import InvalidArgumentError, NotFoundError
from tests.distribute.replicas import BALANCED, on_worker, rows, with_policy

numbers = hr.Dataset.range


@pytest.fixture
def files(tmp_path):
    """Return a dataset of n files whose rows are numbered across files."""

    def made(sizes, batch):
        first = 0
        names = []
        for index, size in enumerate(sizes):
            path = tmp_path / f"{len(sizes)}-{index}.txt"
            path.write_text("".join(f"{row}\n" for row in range(first, first + size)))
            names.append(str(path))
            first += size
        return hr.TextLineDataset(names).map(int).batch(batch)

    return made


@pytest.mark.catalogue("2.3.1", "3.12.31", "3.12.32")
@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
def test_by_file_each_worker_reads_its_files_and_splits_batches_for_all(files, policy):
    dataset = with_policy(files([6, 6], 4), policy)
    assert on_worker(dataset, 0) == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert on_worker(dataset, 1) == [[[6, 7]], [[8, 9]], [[10]], [[11]]]


@pytest.mark.catalogue("2.3.5")
@pytest.mark.parametrize("policy", ["AUTO", "DATA"])
def test_by_data_each_worker_uses_its_part_of_each_batch(policy):
    dataset = with_policy(numbers(12).batch(4), policy)
    assert on_worker(dataset, 0) == [[[0, 1]], [[4, 5]], [[8, 9]]]
    assert on_worker(dataset, 1) == [[[2, 3]], [[6, 7]], [[10, 11]]]


def test_one_file_of_twelve_batches_by_data(files):
    dataset = with_policy(files([12], 4), "DATA")
    assert on_worker(dataset, 0) == [[[0, 1]], [[4, 5]], [[8, 9]]]
    assert on_worker(dataset, 1) == [[[2, 3]], [[6, 7]], [[10, 11]]]


@pytest.mark.catalogue("2.3.4", "2.3.10", "3.10.12", "3.10.13", "3.10.27")
@pytest.mark.parametrize(
    ("dataset", "here", "first", "second"),
    [
        (numbers(9).batch(2), 1, [[[0]], [[2]], [[4]], [[6]], [[8]]],
         [[[1]], [[3]], [[5]], [[7]], [[]]]),
        (numbers(9).batch(2, drop_remainder=True), 1, [[[0]], [[2]], [[4]], [[6]]],
         [[[1]], [[3]], [[5]], [[7]]]),
        (numbers(15).batch(4), 2, [[[0], [2]], [[4], [6]], [[8], [10]], [[12], [14]]],
         [[[1], [3]], [[5], [7]], [[9], [11]], [[13], []]]),
        (numbers(8).batch(3), 1, [[[0, 1]], [[3, 4]], [[6]]], [[[2]], [[5]], [[7]]]),
        (numbers(16).batch(8), 2, [[[0, 1], [4, 5]], [[8, 9], [12, 13]]],
         [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]),
        (numbers(14).batch(7), 2, [[[0, 1], [4, 5]], [[7, 8], [11, 12]]],
         [[[2, 3], [6]], [[9, 10], [13]]]),
    ],
)  # fmt: skip
def test_batch_parts_equal_the_documented_table(dataset, here, first, second):
    assert on_worker(dataset, 0, here=here) == first
    assert on_worker(dataset, 1, here=here) == second


@pytest.mark.catalogue("3.12.33")
def test_three_workers_by_data_leave_the_last_without_rows():
    parts = [on_worker(numbers(8).batch(4), worker, workers=3) for worker in range(3)]
    assert parts == [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]], [[[]], [[]]]]


@pytest.mark.catalogue("2.3.9", "3.12.23", "3.12.24")
def test_by_data_fewer_batches_than_workers_are_allowed():
    dataset = with_policy(numbers(3).batch(3), "DATA")
    assert [on_worker(dataset, worker, workers=4) for worker in range(4)] == [
        [[[0]]], [[[1]]], [[[2]]], [[[]]],
    ]  # fmt: skip


@pytest.mark.catalogue("2.3.7", "3.10.4", "3.10.25", "3.10.26", "3.12.17", "3.12.18")
def test_with_policy_off_each_worker_reads_all():
    dataset = with_policy(numbers(12).batch(8), "OFF")
    for worker in range(2):
        assert on_worker(dataset, worker) == [
            [[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]], [[10, 11]],
        ]  # fmt: skip
        assert on_worker(dataset, worker, options=BALANCED) == [
            [[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]],
        ]  # fmt: skip


@pytest.mark.catalogue("2.2.7")
def test_with_off_and_balanced_workers_alternate_the_larger_pieces():
    dataset = with_policy(numbers(14).batch(7), "OFF")
    assert on_worker(dataset, 0, here=2, options=BALANCED)[:2] == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert on_worker(dataset, 1, here=2, options=BALANCED)[:2] == [[[0, 1], [2]], [[3, 4], [5, 6]]]


def test_balanced_by_data_delivers_every_row_once():
    dataset = with_policy(numbers(23).batch(5), "DATA")
    parts = [on_worker(dataset, worker, 3, 2, BALANCED) for worker in range(3)]
    found = [row for part in parts for step in part for piece in step for row in piece]
    assert sorted(found) == list(range(23))
    assert len({len(part) for part in parts}) == 1


@pytest.mark.catalogue("2.3.6")
def test_a_hint_is_replaced_by_the_shard():
    hinted = numbers(8).shard(hr.service.SHARD_HINT, 0).batch(2)
    assert on_worker(with_policy(hinted, "HINT"), 1) == [[[1]], [[3]], [[5]], [[7]]]
    plain = with_policy(numbers(4).batch(2), "HINT")
    assert on_worker(plain, 0) == on_worker(plain, 1) == [[[0]], [[1]], [[2]], [[3]]]


@pytest.mark.catalogue("2.3.8", "3.12.20", "4.3.2")
@pytest.mark.parametrize("policy", ["AUTO", "FILE"])
@pytest.mark.parametrize("worker", range(4))
def test_too_few_files_raise_on_every_worker_with_both_numbers(files, policy, worker):
    dataset = with_policy(files([2, 2], 4), policy)
    with pytest.raises(
        InvalidArgumentError, match=f"{policy} .*2 files .*4 .*AutoShardPolicy.DATA"
    ):
        on_worker(dataset, worker, workers=4)


@pytest.mark.catalogue("2.3.3")
def test_sharding_by_file_requires_files():
    with pytest.raises(
        NotFoundError, match=r"AutoShardPolicy\.FILE cannot .*AutoShardPolicy\.DATA"
    ):
        on_worker(with_policy(numbers(8).batch(4), "FILE"), 0)
    # With one worker no sharding is needed.
    assert on_worker(with_policy(numbers(2).batch(2), "FILE"), 0, workers=1, here=2) == [[[0], [1]]]


def test_a_worker_without_data_gets_empty_steps_until_all_end():
    """The other worker has two more steps than the three of this one."""
    answers = iter([True, True, True, True, True, False])
    asked = []

    class Others:
        wants_spec, spec = False, None

        def any_has_data(self, here):
            asked.append(here)
            return next(answers)

    for dataset in (
        numbers(6).batch(4),
        hr.Dataset.from_tensor_slices([b"a", b"b", b"c"]).batch(2),
    ):
        asked.clear()
        answers = iter([True, True, True, True, True, False])
        plan = with_policy(dataset, "OFF")
        steps = list(DistributedDataset(plan, InputContext(2, 0, 2), InputOptions(), Others))
        assert len(steps) == 5
        assert all(step.values[0].shape == (0,) for step in steps[4:])
        assert asked[-1] is False


@pytest.mark.catalogue("2.4.8")
def test_with_several_workers_values_are_wrapped_and_lengths_unknown():
    dataset = DistributedDataset(numbers(8).batch(4, drop_remainder=True), InputContext(2, 0, 2))
    rest = hr.ArraySpec((None,), "int64")
    assert dataset.element_spec == hr.distribute.PerReplicaSpec(rest)
    assert rows(next(iter(dataset))) == [[0, 1]]
    assert dataset.cardinality() == 2


def test_workers_that_shuffle_with_one_seed_read_every_row_once():
    plan = numbers(40).shuffle(40).batch(8)
    parts = [
        [
            row
            for step in DistributedDataset(plan, InputContext(2, worker, 4), seed=11)
            for value in step.values
            for row in value.tolist()
        ]
        for worker in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == list(range(40))


def test_a_state_within_a_batch_can_be_restored():
    plan = with_policy(numbers(24).batch(8), "OFF")

    def made(workers=2):
        return iter(DistributedDataset(plan, InputContext(workers, 0, workers)))

    with made() as iterator, made() as other, made(4) as more:
        assert rows(next(iterator)) == [[0, 1, 2, 3]]
        state = iterator.get_state()
        other.set_state(state)
        assert rows(next(other)) == rows(next(iterator)) == [[4, 5, 6, 7]]
        more.set_state(state)
        assert rows(next(more)) == [[4, 5]]


@pytest.mark.parametrize("resumed_on", [1, 2])
def test_fewer_workers_resume_with_the_cached_rows_of_each_file(files, resumed_on):
    sizes = [3, 4, 5]

    def opened(workers):
        dataset = with_policy(files(sizes, 6), "FILE").unbatch().cache().batch(3)
        return [
            iter(DistributedDataset(dataset, InputContext(workers, worker, workers)))
            for worker in range(workers)
        ]

    saved_on, read = opened(len(sizes)), []
    for iterator in saved_on:
        read += [row for part in rows(next(iterator)) for row in part]
    state = {
        "version": 1,
        "distributed": merge_states([i._step_input.get_state() for i in saved_on]),
    }
    for iterator in opened(resumed_on):
        iterator.set_state(state)
        for step in iterator:
            parts = rows(step) if resumed_on > 1 else [rows(step)]
            read += [row for part in parts for row in part]
    assert sorted(read) == list(range(sum(sizes)))


@pytest.mark.catalogue("1.3.7")
def test_the_policy_option_also_has_the_name_of_tf_data():
    options = hr.Options()
    options.experimental_distribute.auto_shard_policy = hr.distribute.AutoShardPolicy.OFF
    assert options.auto_shard_policy is hr.distribute.AutoShardPolicy.OFF
    with pytest.raises(TypeError, match=r"must be a hr\.distribute\.AutoShardPolicy, but got"):
        options.auto_shard_policy = "DATA"
    dataset = numbers(4).with_options(options)
    assert dataset.options().auto_shard_policy is hr.distribute.AutoShardPolicy.OFF
    assert iter(numbers(4)).get_state()["plan"] == iter(dataset).get_state()["plan"]
