"""Dynamic sharding with real servers: each element is delivered by one worker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute
from tests.service.reading import numbers

pytestmark = pytest.mark.system

Range = hr.Dataset.range


def dynamic(cluster: LocalCluster, dataset: hr.Dataset, **options: Any) -> hr.Dataset:
    return dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, **options))


def single(value: Any) -> hr.Dataset:
    return hr.Dataset.from_tensors(value)


@pytest.mark.catalogue("DS1-6", "DS8", "DS12", "DS23")
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (lambda: Range(100), list(range(100))),
        (lambda: hr.Dataset.from_tensor_slices([5, 1, 2, 4]), [1, 2, 4, 5]),
        (lambda: hr.Dataset.from_tensor_slices([1, 5, 0]).interleave(single), [0, 1, 5]),
        (
            lambda: hr.Dataset.from_tensor_slices([1, 5, 0]).interleave(
                single, num_parallel_calls=2
            ),
            [0, 1, 5],
        ),
        (lambda: hr.Dataset.from_tensor_slices([1, 5, 0]).flat_map(single), [0, 1, 5]),
        (lambda: Range(20).repeat(5), sorted(list(range(20)) * 5)),
        (lambda: Range(20).shuffle(20).repeat(5), sorted(list(range(20)) * 5)),
        (lambda: Range(100).concatenate(Range(100, 200)), list(range(200))),
        (lambda: Range(0), []),
    ],
)
@pytest.mark.parametrize("job_name", [None, "job_name"])
def test_two_workers_deliver_each_element_once(
    cluster: LocalCluster,
    plan: Callable[[], hr.Dataset],
    expected: list[int],
    job_name: str | None,
) -> None:
    cluster.add_worker()
    assert sorted(numbers(dynamic(cluster, plan(), job_name=job_name))) == expected


@pytest.mark.catalogue("DS26")
def test_the_old_policy_name_is_an_alias(cluster: LocalCluster) -> None:
    cluster.add_worker()
    dataset = Range(100).apply(distribute("distributed_epoch", cluster.target))
    assert sorted(numbers(dataset)) == list(range(100))


@pytest.mark.catalogue("DS9")
def test_repeat_after_distribute_assigns_all_splits_again(cluster: LocalCluster) -> None:
    cluster.add_worker()
    dataset = dynamic(cluster, Range(20)).repeat(5)
    assert sorted(numbers(dataset)) == sorted(list(range(20)) * 5)


@pytest.mark.catalogue("DS10")
def test_an_infinite_dataset_is_read_evenly_from_workers(cluster: LocalCluster) -> None:
    cluster.add_worker()
    with iter(dynamic(cluster, Range(20).repeat())) as reader:
        seen = Counter(int(next(reader)) for _ in range(1000))
    assert min(seen.values()) > 25
    assert len(seen) == 20


@pytest.mark.catalogue("DS11")
def test_workers_without_splits_in_a_repetition_continue_with_the_next(
    cluster: LocalCluster,
) -> None:
    for _ in range(4):
        cluster.add_worker()
    with iter(dynamic(cluster, Range(1).repeat())) as reader:
        assert {int(next(reader)) for _ in range(20)} == {0}
        for index in range(4):
            cluster.stop_worker(index)
        assert {int(next(reader)) for _ in range(20)} == {0}


@pytest.mark.catalogue("DS13")
def test_zipped_sources_are_assigned_to_one_worker_in_step(cluster: LocalCluster) -> None:
    pairs = list(dynamic(cluster, hr.Dataset.zip(Range(10), Range(10))))
    assert [(int(a), int(b)) for a, b in pairs] == [(i, i) for i in range(10)]


@pytest.mark.catalogue("DS14")
def test_a_nested_zip_is_assigned_in_step(cluster: LocalCluster) -> None:
    a = Range(10)
    rows = list(dynamic(cluster, hr.Dataset.zip(a, a, hr.Dataset.zip(a, a), a)))
    flattened = [(int(p), int(q), int(r), int(s), int(t)) for p, q, (r, s), t in rows]
    assert flattened == [(i,) * 5 for i in range(10)]


@pytest.mark.catalogue("DS15", "DS16")
@pytest.mark.parametrize("times", [1, 3])
def test_the_rest_of_the_longer_input_is_dropped_in_each_repetition(
    cluster: LocalCluster, times: int
) -> None:
    plan = hr.Dataset.zip(Range(200), Range(1000)).repeat(times)
    pairs = [(int(a), int(b)) for a, b in dynamic(cluster, plan)]
    assert pairs == [(i, i) for i in range(200)] * times


@pytest.mark.catalogue("DS17")
def test_three_workers_zip_as_many_elements_as_the_shorter_input_has(cluster: LocalCluster) -> None:
    cluster.add_worker()
    cluster.add_worker()
    pairs = list(dynamic(cluster, hr.Dataset.zip(Range(200), Range(1000))))
    assert len(pairs) == 200


def test_one_worker_keeps_the_order_of_concatenated_datasets(cluster: LocalCluster) -> None:
    plan = Range(100).concatenate(Range(100, 200))
    assert numbers(dynamic(cluster, plan)) == list(range(200))


@pytest.mark.catalogue("DS27")
def test_a_dataset_inside_a_function_is_not_split(cluster: LocalCluster) -> None:
    cluster.add_worker()
    cluster.add_worker()
    plan = Range(5).flat_map(lambda _: hr.Dataset.from_tensor_slices(["a", "b", "c"]).repeat(10))
    assert Counter(map(str, dynamic(cluster, plan))) == {"a": 50, "b": 50, "c": 50}


@pytest.mark.catalogue("DS25")
def test_a_dataset_without_splits_is_rejected_with_the_fix(cluster: LocalCluster) -> None:
    # Rejected by `distribute`, because workers could not split the inner service.
    with pytest.raises(hr.errors.FailedPreconditionError, match="apply `distribute` only once"):
        dynamic(cluster, dynamic(cluster, Range(3)))


def test_a_generator_runs_on_one_worker(cluster: LocalCluster) -> None:
    cluster.add_worker()
    generated = hr.Dataset.from_generator(lambda: iter(range(30)))
    assert numbers(dynamic(cluster, generated)) == list(range(30))


@pytest.mark.catalogue("DS7")
def test_windows_are_built_per_worker_and_their_datasets_are_complete(
    cluster: LocalCluster,
) -> None:
    cluster.add_worker()

    def numbered(key: Any, window: hr.Dataset) -> hr.Dataset:
        return hr.Dataset.zip(window, Range(100)).map(lambda x, number: x * 10 + number)

    dataset = Range(60).group_by_window(lambda x: x % 3, numbered, window_size=4)
    got = numbers(dynamic(cluster, dataset))
    assert sorted(x // 10 for x in got) == list(range(60))
    assert {x % 10 for x in got} == {0, 1, 2, 3}


def test_zipped_random_numbers_equal_those_of_a_single_process(cluster: LocalCluster) -> None:
    cluster.add_worker()
    pairs = hr.Dataset.zip(Range(50), hr.Dataset.random(seed=3)).map(lambda x, r: x * 2**32 + r)
    assert sorted(numbers(dynamic(cluster, pairs))) == numbers(pairs)


def test_padded_batches_equal_those_of_a_single_process(cluster: LocalCluster) -> None:
    cluster.add_worker()
    batches = Range(30).map(lambda n: [n] * (int(n) % 5 + 1)).padded_batch(4)
    got = sorted(batch.tolist() for batch in dynamic(cluster, batches))
    assert got == sorted(batch.tolist() for batch in batches)


def test_workers_drop_no_remainders_of_padded_batches(cluster: LocalCluster) -> None:
    cluster.add_worker()
    kept = Range(55).filter(lambda n: int(n) % 7 != 3)
    batches = kept.map(lambda n: [n] * (int(n) % 5 + 1)).padded_batch(4, drop_remainder=True)
    assert len(list(dynamic(cluster, batches))) == len(list(batches)) == 11
    assert "client   padded_batch" in dynamic(cluster, batches).explain()


@pytest.mark.catalogue("DS20", "DS21")
def test_sampled_datasets_are_read_by_one_worker_in_order(cluster: LocalCluster) -> None:
    cluster.add_worker()
    sampled = hr.Dataset.sample_from_datasets([Range(20), Range(100, 130)], [0.3, 0.7], seed=5)
    assert numbers(dynamic(cluster, sampled)) == numbers(sampled)


@pytest.mark.catalogue("DS18", "DS19")
@pytest.mark.parametrize(
    ("plan", "count"),
    [
        (lambda: hr.Dataset.zip(Range(100), Range(100).filter(lambda x: x % 10 == 0)), 10),
        (lambda: hr.Dataset.zip(Range(50), Range(10).repeat(10)), 50),
    ],
)
def test_sources_of_different_rates_are_zipped_as_in_a_single_process(
    cluster: LocalCluster, plan: Callable[[], hr.Dataset], count: int
) -> None:
    cluster.add_worker()
    cluster.add_worker()
    expected = sorted((int(a), int(b)) for a, b in plan())
    assert len(expected) == count
    assert sorted((int(a), int(b)) for a, b in dynamic(cluster, plan())) == expected


@pytest.mark.catalogue("DS22")
def test_enumerate_numbers_equal_those_of_a_single_process(cluster: LocalCluster) -> None:
    cluster.add_worker()
    plan = hr.Dataset.from_tensor_slices(["a", "b", "c"]).repeat(10).enumerate()
    found = sorted((int(number), str(letter)) for number, letter in dynamic(cluster, plan))
    assert found == [(number, "abc"[number % 3]) for number in range(30)]


def late_if_even(x: int) -> int:
    time.sleep(0.01 * (x % 2 == 0))
    return x * 2


def test_enumerate_after_map_numbers_as_in_a_single_process(cluster: LocalCluster) -> None:
    cluster.add_worker()
    plan = hr.Dataset.range(60).shuffle(60, seed=1).map(late_if_even)
    elements = distribute(ShardingPolicy.DYNAMIC, cluster.target)
    for dataset in (plan.enumerate(), plan.batch(4).enumerate(start=7), plan.enumerate().batch(9)):
        assert sorted(map(str, dataset.apply(elements))) == sorted(map(str, dataset))
    elements = distribute(ShardingPolicy.DYNAMIC, cluster.target, visitation="at_most_once")
    with pytest.raises(
        FailedPreconditionError, match=r"enumerate .* requires the order of a single"
    ):
        list(plan.enumerate().apply(elements))


def test_whole_stream_steps_require_at_most_once(cluster: LocalCluster) -> None:
    cluster.add_worker()
    elements = distribute(ShardingPolicy.DYNAMIC, cluster.target, visitation="at_most_once")
    dataset = hr.Dataset.range(100).filter(lambda x: x % 2 == 0)
    assert len(list(dataset.take(10).apply(elements))) == 10
    assert len(list(dataset.skip(10).apply(elements))) == 40
    assert sorted(int(number) for number, _ in dataset.enumerate().apply(elements)) == list(
        range(50)
    )
    batches = dataset.batch(4, drop_remainder=True).apply(elements)
    assert sum(len(batch) for batch in batches) == 48


@pytest.mark.catalogue("DS28")
def test_shuffled_files_are_assigned_once(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.add_worker()
    for number in range(5):
        lines = "".join(f"{number} {record}\n" for record in range(5))
        (tmp_path / f"{number}.txt").write_text(lines)
    files = hr.Dataset.list_files(str(tmp_path / "*.txt"), shuffle=True)
    read = dynamic(cluster, files.flat_map(hr.TextLineDataset))
    found = sorted(line.decode() for line in read)
    assert found == sorted(f"{file} {record}" for file in range(5) for record in range(5))
