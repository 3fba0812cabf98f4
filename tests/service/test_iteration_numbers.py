"""Iterations over a shared job: how they are numbered and called, and who comes too late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import (
    LocalCluster,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from headrace.service.epochs import format_epoch
from tests.service.reading import numbers

TEN = list(range(10))


@pytest.fixture(name="target")
def _target() -> Iterator[str]:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        yield cluster.target


@pytest.fixture(name="job")
def _job(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def ten(target: str, job: str, **options: Any) -> hr.Dataset:
    return hr.Dataset.range(10).apply(
        distribute(ShardingPolicy.DYNAMIC, target, job_name=job, **options)
    )


DERIVED: dict[str, Callable[[hr.Dataset], Any]] = {
    "map": lambda ds: ds.map(lambda x: x),
    "prefetch": lambda ds: ds.prefetch(2),
    "take": lambda ds: ds.take(10),
    "cache": lambda ds: ds.cache(),
    "distribute_dataset": lambda ds: hr.distribute.get_strategy().distribute_dataset(ds),
    "loader": lambda ds: hr.torch.loader(ds),
}


@pytest.mark.parametrize("ordered", [False, True])
def test_datasets_derived_in_each_epoch_read_further_iterations(
    target: str, job: str, ordered: bool
) -> None:
    for name, derived in DERIVED.items():
        dataset = ten(target, f"{job} {name}", ordered=ordered)
        for _ in range(3):
            assert sorted(numbers(derived(dataset))) == TEN, name
        assert sorted(numbers(dataset)) == TEN, name


def test_a_dataset_by_id_counts_over_what_is_derived_from_it(target: str, job: str) -> None:
    dataset_id = register_dataset(target, hr.Dataset.range(10))
    dataset = from_dataset_id(ShardingPolicy.DYNAMIC, target, dataset_id, job_name=job)
    for _ in range(3):
        assert sorted(numbers(dataset.map(lambda x: x))) == TEN


def test_results_of_distribute_share_an_iteration_wherever_they_are_opened(
    target: str, job: str
) -> None:
    both = [ten(target, job), ten(target, job)]
    for _ in range(2):
        iterators = [iter(both[0].map(lambda x: x)), iter(both[1])]
        assert sorted(numbers(iterators[0]) + numbers(iterators[1])) == TEN


@pytest.mark.parametrize("threads", [None, 2])
def test_readers_in_one_interleave_share_an_iteration(
    target: str, job: str, threads: int | None
) -> None:
    def both(job: str) -> hr.Dataset:
        return hr.Dataset.range(2).interleave(
            lambda _: ten(target, job), cycle_length=2, num_parallel_calls=threads
        )

    dataset = both(job)
    for _ in range(2):
        assert sorted(numbers(dataset)) == TEN
    assert sorted(numbers(both(f"{job}, repeated").repeat(2))) == sorted(2 * TEN)


def test_readers_that_are_chosen_from_share_an_iteration(target: str, job: str) -> None:
    both = [ten(target, job), ten(target, job)]
    assert sorted(numbers(hr.Dataset.sample_from_datasets(both, seed=1))) == TEN
    pairs = hr.Dataset.zip(*both)
    assert len(list(pairs)) <= 5


def test_readers_of_one_job_that_repeat_and_that_do_not_are_refused(target: str, job: str) -> None:
    with iter(ten(target, job)) as iterator:
        next(iterator)
        with pytest.raises(FailedPreconditionError, match=r"iteration 0 .*`repeat`"):
            list(ten(target, job).repeat(2))


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("mode", [ShardingPolicy.DYNAMIC, ShardingPolicy.OFF])
def test_consumers_in_one_interleave_meet(
    target: str, job: str, mode: ShardingPolicy, threads: int | None
) -> None:
    def consumer(index: int) -> hr.Dataset:
        share = distribute(mode, target, job_name=job, consumer_index=int(index), num_consumers=2)
        return hr.Dataset.range(10).apply(share)

    dataset = hr.Dataset.range(2).interleave(consumer, cycle_length=2, num_parallel_calls=threads)
    for _ in range(2):
        assert sorted(numbers(dataset)) == TEN
    with pytest.raises(FailedPreconditionError, match="reads 2 consumers of job"):
        next(iter(hr.Dataset.zip(consumer(0), consumer(1))))


def test_one_dataset_that_is_opened_several_times_reads_as_many_iterations(
    target: str, job: str
) -> None:
    dataset = ten(target, job)
    assert sorted(numbers(hr.Dataset.range(2).interleave(lambda _: dataset))) == sorted(2 * TEN)
    pairs = [(int(a), int(b)) for a, b in hr.Dataset.zip(dataset, dataset)]
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == TEN
    assert sorted(numbers(dataset)) == TEN


@pytest.mark.parametrize("ordered", [False, True])
def test_a_restored_iterator_stays_in_its_iteration(target: str, job: str, ordered: bool) -> None:
    dataset = ten(target, job, ordered=ordered)
    for _ in range(2):
        assert sorted(numbers(dataset.map(lambda x: x))) == TEN
    first = iter(dataset)
    taken = numbers(next(first) for _ in range(4))
    state = first.get_state()
    first.close()
    assert state["epoch"] == 2
    # As after a restart: another process counts from 0, and another job is not begun yet.
    again = ten(target, f"{job}, again", ordered=ordered)
    second = iter(again)
    second.set_state(state)
    assert sorted(taken + numbers(second)) == TEN
    assert second.epoch == 2
    assert iter(again.map(lambda x: x)).epoch == 3


def test_an_iterator_restored_within_a_nested_dataset_stays_in_its_iteration(
    target: str, job: str
) -> None:
    def nested() -> hr.Dataset:
        dataset = ten(target, job, ordered=True)
        return hr.Dataset.range(3).flat_map(lambda _: dataset)

    first = iter(nested())
    assert numbers(next(first) for _ in range(14)) == TEN + TEN[:4]
    state = first.get_state()
    first.close()
    second = iter(nested())
    second.set_state(state)
    assert numbers(second) == TEN[4:] + TEN


@pytest.mark.parametrize("ordered", [False, True])
def test_a_cache_over_a_job_is_filled_by_the_iteration_that_it_is_opened_for(
    target: str, job: str, ordered: bool
) -> None:
    dataset = ten(target, job, ordered=ordered)
    assert len(list(dataset.take(3))) == 3
    cached = dataset.cache()
    assert [sorted(numbers(cached)) for _ in range(3)] == [TEN] * 3
    whole_stream = ten(target, f"{job} steps", ordered=ordered).filter(lambda x: x >= 0)
    for _ in range(2):
        assert sorted(numbers(whole_stream.take(10).cache())) == TEN


def test_a_state_within_a_cache_that_is_gone_is_refused_over_a_job(target: str, job: str) -> None:
    cached = ten(target, job, ordered=True).cache()
    assert len(list(cached)) == 10
    with iter(cached) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(ten(target, job, ordered=True).cache()) as restored:
        restored.set_state(state)
        with pytest.raises(FailedPreconditionError, match="put `cache` before `distribute`"):
            next(restored)


def test_a_state_at_the_start_of_an_epoch_that_was_begun_is_refused(target: str, job: str) -> None:
    dataset = ten(target, job)
    assert len(list(dataset)) == 10
    with iter(dataset) as iterator:
        state = iterator.get_state()
        for _ in range(3):
            next(iterator)
    with iter(ten(target, job)) as restored:
        restored.set_state(state)
        with pytest.raises(
            FailedPreconditionError, match=r"start of epoch 1 of job .* another job"
        ):
            next(restored)
    with iter(ten(target, f"{job} again")) as restored:
        restored.set_state(state)
        assert len(list(restored)) == 10


# --- how a pass is called, and what a client hears that comes too late for one --------------------


@pytest.mark.parametrize(
    ("number", "words"), [((), "pass 0"), ((3,), "pass 3"), ((0, 2), "pass 0.2")]
)
def test_a_pass_is_called_by_its_numbers(number: tuple[int, ...], words: str) -> None:
    assert format_epoch(number) == words


@pytest.mark.catalogue("LW17")
@pytest.mark.system
def test_who_comes_too_late_for_a_pass_hears_which_and_who_read_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        data = hr.Dataset.range(3)
        for expected in ([0, 1, 2], []):
            share = distribute("distributed_epoch", cluster.target, job_name="a")
            assert sorted(int(each) for each in data.apply(share)) == expected
    (said,) = [each for each in caplog.records if "no elements" in each.getMessage()]
    words = said.getMessage()
    assert "job 'a' has no elements left for epoch 0: it was read by client " in words
    assert "Use another job_name to read the data again" in words
    assert said.levelno == logging.ERROR


USES: dict[str, Callable[[hr.Dataset], Any]] = {
    "loader": hr.torch.loader,
    "distributed dataset": hr.distribute.get_strategy().distribute_dataset,
}


@pytest.mark.system
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("use", USES)
def test_training_on_a_job_that_is_used_up_is_an_error(use: str, ordered: bool) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        share = distribute("distributed_epoch", cluster.target, job_name="a", ordered=ordered)
        data = hr.Dataset.range(3)
        assert len(list(data.apply(share))) == 3
        training = USES[use](data.apply(share))
        with pytest.raises(FailedPreconditionError, match=r"job 'a' .* epoch 0: .*job_name"):
            list(training)


@pytest.mark.system
def test_a_reader_that_comes_too_late_for_an_epoch_that_others_read_has_an_empty_one() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        share = distribute("distributed_epoch", cluster.target, job_name="a")
        one, other, third = (hr.Dataset.range(3).apply(share) for _ in range(3))
        had_elements = hr.torch.loader(one)
        assert len(list(had_elements)) == 3
        assert [len(list(other)) for _ in range(2)] == [0, 3]
        assert list(had_elements) == []
        with iter(other) as reading:
            next(reading)
            assert list(hr.torch.loader(third)) == []
