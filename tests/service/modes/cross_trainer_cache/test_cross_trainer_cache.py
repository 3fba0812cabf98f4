"""Cross-trainer cache: each trainer reads all elements, which are computed once."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, InvalidArgumentError
from headrace.service import (
    CrossTrainerCache,
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    distribute,
    from_dataset_id,
    register_dataset,
)
from headrace.service import WorkerServer as Worker
from tests.service.reading import wait_until

pytestmark = pytest.mark.system

ENDLESS = hr.Dataset.range(10**7).repeat()


@contextlib.contextmanager
def service(
    workers: int = 1, cache: int | None = None, **options: Any
) -> Iterator[tuple[DispatchServer, list[Worker]]]:
    """Run a dispatcher and workers in this process."""
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(DispatchServer(DispatcherConfig(**options)))
        servers = [stack.enter_context(worker(dispatcher, cache)) for _ in range(workers)]
        yield dispatcher, servers


def worker(dispatcher: DispatchServer, cache: int | None = None, port: int = 0) -> Worker:
    return Worker(
        WorkerConfig(
            dispatcher.target.partition("://")[2],
            port=port,
            cross_trainer_cache_size_bytes=cache,
        )
    )


def shared(
    dispatcher: DispatchServer,
    trainer: str | None,
    dataset: hr.Dataset = ENDLESS,
    mode: ShardingPolicy = ShardingPolicy.OFF,
    **options: Any,
) -> hr.Dataset:
    cache = None if trainer is None else CrossTrainerCache(trainer)
    arguments = {"job_name": "job", **options}
    return dataset.apply(
        distribute(mode, dispatcher.target, cross_trainer_cache=cache, **arguments)
    )


def first(dataset: hr.Dataset, count: int) -> list[int]:
    with iter(dataset) as iterator:
        return take(iterator, count)


def take(iterator: Iterator[Any], count: int) -> list[int]:
    return [int(value) for value in itertools.islice(iterator, count)]


@pytest.mark.catalogue("CT1")
def test_each_trainer_reads_from_the_first_element() -> None:
    with service() as (dispatcher, _):
        assert first(shared(dispatcher, "one"), 10) == list(range(10))
        assert first(shared(dispatcher, "two"), 10) == list(range(10))


@pytest.mark.catalogue("CT2")
def test_trainers_read_a_dataset_by_id() -> None:
    with service() as (dispatcher, _):
        for trainer in ("one", "two"):
            name = register_dataset(dispatcher.target, ENDLESS, dataset_id="dataset_id")
            dataset = from_dataset_id(
                ShardingPolicy.OFF,
                dispatcher.target,
                name,
                job_name="job",
                cross_trainer_cache=CrossTrainerCache(trainer),
            )
            assert first(dataset, 10) == list(range(10))


@pytest.mark.catalogue("CT3")
def test_without_a_cache_clients_share_the_elements() -> None:
    with service() as (dispatcher, _), iter(shared(dispatcher, None)) as one:
        assert take(one, 10) == list(range(10))
        assert first(shared(dispatcher, None), 1)[0] >= 10


@pytest.mark.catalogue("CT4")
def test_parallel_trainers_read_the_same_elements_through_a_small_window() -> None:
    with service(cache=28 * 150) as (dispatcher, _), contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(
                iter(shared(dispatcher, f"trainer {n}", max_outstanding_requests=1))
            )
            for n in range(20)
        ]
        for step in range(50):
            assert [int(next(each)) for each in readers] == [step] * 20


@pytest.mark.catalogue("CT5")
def test_a_slow_trainer_skips_evicted_elements_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with service(cache=500) as (dispatcher, _):
        with iter(shared(dispatcher, "slow")) as slow:
            elements = take(slow, 1)
            assert first(shared(dispatcher, "fast"), 200) == list(range(200))
            wait_until(lambda: bool(elements.extend(take(slow, 5))) or "skipped" in caplog.text)
        assert elements == sorted(set(elements))
        assert "trainer 'slow' skipped " in caplog.text
        assert "cross_trainer_cache_size_bytes" in caplog.text
        assert first(shared(dispatcher, "late"), 200)[0] > 0


@pytest.mark.catalogue("CT6")
def test_sequential_trainers_read_through_a_small_window() -> None:
    with service(cache=500) as (dispatcher, _):
        for number in range(20):
            assert len(first(shared(dispatcher, f"trainer {number}"), 200)) == 200


@pytest.mark.catalogue("CT7")
def test_trainers_get_the_same_shuffle_order() -> None:
    with service() as (dispatcher, _):
        shuffled = ENDLESS.shuffle(100)
        assert first(shared(dispatcher, "one", shuffled), 10) == first(
            shared(dispatcher, "two", shuffled), 10
        )


@pytest.mark.catalogue("CT8")
def test_clients_of_one_trainer_share_its_elements() -> None:
    with service() as (dispatcher, _):
        assert first(shared(dispatcher, "same"), 10) == list(range(10))
        assert first(shared(dispatcher, "same"), 10)[0] >= 10


@pytest.mark.catalogue("CT9")
def test_jobs_with_different_names_share_no_elements() -> None:
    with service() as (dispatcher, _):
        assert first(shared(dispatcher, "one", job_name="job1"), 10) == list(range(10))
        assert first(shared(dispatcher, "one", job_name="job2"), 10) == list(range(10))


@pytest.mark.catalogue("CT10")
def test_dynamic_splits_are_computed_once_for_all_trainers() -> None:
    with service(workers=2) as (dispatcher, _):
        one = first(shared(dispatcher, "one", mode=ShardingPolicy.DYNAMIC), 100)
        two = first(shared(dispatcher, "two", mode=ShardingPolicy.DYNAMIC), 100)
        assert len(set(one)) == len(set(two)) == 100
        assert set(one) & set(two)


@pytest.mark.parametrize("protocol", ["local", "shm", "tcp"])
def test_changes_to_an_element_are_invisible_to_other_trainers(protocol: str) -> None:
    with service() as (dispatcher, _):
        batches = hr.Dataset.range(10**6).repeat().batch(100_000)
        for trainer in ("one", "two"):
            dataset = shared(dispatcher, trainer, batches, data_transfer_protocol=protocol)
            with iter(dataset) as iterator:
                batch = next(iterator)
                assert int(batch[5]) == 5
                batch[:] = -1


MADE: list[int] = []
"""What `_noted` was called with; it runs in this process."""


def _noted(number: int) -> int:
    MADE.append(int(number))
    return number


def test_an_element_is_computed_once_for_any_number_of_trainers() -> None:
    MADE.clear()
    with service() as (dispatcher, _):
        datasets = [shared(dispatcher, f"trainer {n}", ENDLESS.map(_noted)) for n in range(4)]
        elements: dict[int, list[int]] = {}

        def read(number: int) -> None:
            elements[number] = first(datasets[number], 500)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [elements[n] for n in range(4)] == [list(range(500))] * 4
    assert len(MADE) == len(set(MADE)) >= 500


@pytest.mark.catalogue("CT11")
def test_trainers_can_all_disable_compression() -> None:
    with service() as (dispatcher, _):
        for trainer in ("one", "two"):
            assert first(shared(dispatcher, trainer, compression=None), 10) == list(range(10))


@pytest.mark.catalogue("CT12", "CT18")
def test_clients_of_a_job_must_agree_on_compression_and_cache() -> None:
    with service() as (dispatcher, _), iter(shared(dispatcher, "one")) as one:
        next(one)
        with pytest.raises(AlreadyExistsError, match="compression: <AUTO>; got <None"):
            first(shared(dispatcher, "two", compression=None), 1)
        with pytest.raises(
            AlreadyExistsError,
            match="Existing cross-trainer cache: <enabled>; got <disabled>",
        ):
            first(shared(dispatcher, None), 1)


@pytest.mark.catalogue("CT14")
def test_a_finite_dataset_is_rejected() -> None:
    with service() as (dispatcher, _):
        with pytest.raises(
            InvalidArgumentError,
            match=r"requires the input dataset to be infinite\. Got input with "
            "cardinality 10",
        ):
            shared(dispatcher, "one", hr.Dataset.range(10))
        name = register_dataset(dispatcher.target, hr.Dataset.range(10))
        with pytest.raises(InvalidArgumentError, match="requires the input dataset to be infinite"):
            from_dataset_id(
                ShardingPolicy.OFF,
                dispatcher.target,
                name,
                job_name="job",
                cross_trainer_cache=CrossTrainerCache("one"),
            )


@pytest.mark.catalogue("CT15")
def test_the_third_iteration_over_one_dataset_is_rejected() -> None:
    with service() as (dispatcher, _):
        dataset = shared(dispatcher, "one")
        first(dataset, 10)
        first(dataset, 10)
        with pytest.raises(
            InvalidArgumentError,
            match="requires infinite datasets and disallows multiple repetitions of the same "
            r"dataset\. Got repetition 2",
        ):
            first(dataset, 10)


@pytest.mark.catalogue("CT19")
@pytest.mark.parametrize("trainer", ["", None])
def test_an_empty_trainer_id_is_rejected(trainer: Any) -> None:
    with pytest.raises(ValueError, match="requires a non-empty trainer ID"):
        CrossTrainerCache(trainer)


def test_other_types_for_cross_trainer_cache_are_rejected() -> None:
    with pytest.raises(TypeError, match="must be a CrossTrainerCache"):
        distribute("parallel_epochs", "a:1", job_name="j", cross_trainer_cache="t")  # type: ignore[arg-type]


@pytest.mark.catalogue("CX1")
def test_a_restarted_worker_starts_at_the_first_element() -> None:
    with service(workers=0, worker_timeout_ms=1000) as (dispatcher, _):
        server = worker(dispatcher)
        port = int(server.address.rpartition(":")[2])
        with iter(shared(dispatcher, "one")) as iterator:
            assert take(iterator, 100) == list(range(100))
            server.stop()
            with worker(dispatcher, port=port):
                assert any(int(x) == 0 for x in iterator)
                assert take(iterator, 100) == list(range(1, 101))


@pytest.mark.catalogue("CX2")
def test_trainers_are_unaffected_by_a_dispatcher_restart(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=tmp_path, fault_tolerant_mode=True)
    dispatcher = DispatchServer(config)
    port = int(dispatcher.target.rpartition(":")[2])
    with worker(dispatcher), iter(shared(dispatcher, "one")) as iterator:
        assert take(iterator, 100) == list(range(100))
        dispatcher.stop()
        resumed = DispatcherConfig(port=port, work_dir=tmp_path, fault_tolerant_mode=True)
        with DispatchServer(resumed) as dispatcher:
            assert take(iterator, 100) == list(range(100, 200))
            assert first(shared(dispatcher, "two"), 10) == list(range(10))


def test_trainers_continue_after_a_worker_process_is_replaced() -> None:
    with LocalCluster(num_workers=2, worker_timeout_ms=2000) as cluster:
        datasets = [
            ENDLESS.apply(
                distribute(
                    ShardingPolicy.OFF,
                    cluster.target,
                    job_name="job",
                    cross_trainer_cache=CrossTrainerCache(name),
                )
            )
            for name in ("one", "two")
        ]
        report = hr.service.delivery_report
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(iter(each)) for each in datasets]
            wait_until(
                lambda: (
                    all(take(each, 1000) for each in readers)
                    and all(len(report(each)) == 2 for each in datasets)
                )
            )
            cluster.kill_worker(0)
            assert all(len(take(each, 50_000)) == 50_000 for each in readers)
            cluster.add_worker()
            wait_until(
                lambda: (
                    all(take(each, 1000) for each in readers)
                    and all(len(report(each)) == 3 for each in datasets)
                )
            )


def test_an_unexpected_end_of_the_dataset_raises_at_each_trainer() -> None:
    with service() as (dispatcher, _):
        ends = ENDLESS.take_while(lambda x: x < 5)
        datasets = [shared(dispatcher, name, ends) for name in ("one", "two")]
        with contextlib.ExitStack() as stack:
            for iterator in [stack.enter_context(iter(each)) for each in datasets]:
                assert take(iterator, 5) == [0, 1, 2, 3, 4]
                with pytest.raises(InvalidArgumentError, match="reached the end of sequence"):
                    next(iterator)


def test_a_returning_trainer_resumes_at_its_position() -> None:
    with service() as (dispatcher, _):
        earlier = first(shared(dispatcher, "t", max_outstanding_requests=1), 30)
        first(shared(dispatcher, "other"), 100)
        later = first(shared(dispatcher, "t"), 10)
        assert earlier[-1] < later[0] < 100


def test_a_worker_that_joins_is_read_by_all_trainers() -> None:
    with service() as (dispatcher, (one,)), contextlib.ExitStack() as stack:
        datasets = [shared(dispatcher, name) for name in ("one", "two")]
        readers = [stack.enter_context(iter(each)) for each in datasets]
        for each in readers:
            next(each)
        with worker(dispatcher) as two:
            both = {one.address, two.address}
            wait_until(
                lambda: (
                    all(take(each, 1000) for each in readers)
                    and all(hr.service.delivery_report(each).keys() == both for each in datasets)
                )
            )


def test_trainers_continue_when_a_worker_leaves_and_another_joins() -> None:
    with service(workers=1) as (dispatcher, (one,)):
        draining = worker(dispatcher)
        dataset = shared(dispatcher, "one")
        with iter(dataset) as iterator:
            wait_until(
                lambda: (
                    bool(take(iterator, 1000))
                    and hr.service.delivery_report(dataset).keys()
                    == {one.address, draining.address}
                )
            )
            draining.drain(timeout=0.5)
            with worker(dispatcher) as late_worker:
                wait_until(
                    lambda: (
                        bool(take(iterator, 1000))
                        and late_worker.address in hr.service.delivery_report(dataset)
                    )
                )
