"""What the readers of a service get: copies, repetitions, shared jobs, registered datasets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.service import (
    SHARD_HINT,
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
from tests.service.reading import numbers

pytestmark = pytest.mark.system


def off(cluster: LocalCluster, dataset: hr.Dataset, **options: Any) -> hr.Dataset:
    return dataset.apply(distribute("parallel_epochs", cluster.target, **options))


@pytest.mark.catalogue("OP1", "OP63", "OP66")
@pytest.mark.parametrize("kind", ["in memory", "work_dir", "fault tolerant"])
@pytest.mark.parametrize("protocol", [None, "local", "shm", "tcp"])
def test_one_worker_delivers_a_dataset_in_order(
    kind: str, protocol: str | None, tmp_path: Path
) -> None:
    config = DispatcherConfig(
        work_dir=None if kind == "in memory" else tmp_path,
        fault_tolerant_mode=kind == "fault tolerant",
    )
    with (
        DispatchServer(config) as dispatcher,
        Worker(WorkerConfig(dispatcher.target.partition("://")[2])),
    ):
        dataset = hr.Dataset.range(10).apply(
            distribute(
                hr.service.ShardingPolicy.OFF, dispatcher.target, data_transfer_protocol=protocol
            )
        )
        assert numbers(dataset) == list(range(10))


@pytest.mark.catalogue("OP7")
def test_shuffles_of_two_workers_agree_when_seeded_and_differ_when_not(
    cluster: LocalCluster,
) -> None:
    cluster.add_worker()

    def copies(seed: int | None) -> tuple[list[int], list[int]]:
        got = numbers(off(cluster, hr.Dataset.range(100).shuffle(100, seed=seed)))
        seen: set[int] = set()
        first, second = [], []
        for value in got:
            (second if value in seen else first).append(value)
            seen.add(value)
        assert sorted(first) == sorted(second) == list(range(100))
        return first, second

    assert copies(10)[0] == copies(10)[1]
    unseeded = copies(None)
    assert unseeded[0] != unseeded[1]


@pytest.mark.catalogue("OP8")
def test_each_iteration_is_a_whole_epoch(cluster: LocalCluster) -> None:
    dataset = off(cluster, hr.Dataset.range(3))
    assert [numbers(dataset) for _ in range(10)] == [[0, 1, 2]] * 10


@pytest.mark.catalogue("OP9")
def test_repeat_after_distribute_reads_epochs_in_order(cluster: LocalCluster) -> None:
    assert numbers(off(cluster, hr.Dataset.range(10)).repeat(5)) == list(range(10)) * 5


@pytest.mark.catalogue("OP10")
def test_iterations_may_overlap(cluster: LocalCluster) -> None:
    readers = [iter(off(cluster, hr.Dataset.range(10))) for _ in range(3)]
    got = [[int(next(reader)) for reader in readers] for _ in range(10)]
    assert got == [[value] * 3 for value in range(10)]
    assert [next(reader, None) for reader in readers] == [None] * 3


@pytest.mark.catalogue("SL16", "OP11")
@pytest.mark.parametrize("credit", [None, 1])
def test_every_worker_delivers_a_copy(cluster: LocalCluster, credit: int | None) -> None:
    cluster.add_worker()
    cluster.add_worker()
    dataset = off(cluster, hr.Dataset.range(10), max_outstanding_requests=credit)
    assert sorted(numbers(dataset)) == sorted(list(range(10)) * 3)


def test_the_delivery_report_counts_elements_by_worker(cluster: LocalCluster) -> None:
    cluster.add_worker()
    dataset = off(cluster, hr.Dataset.range(10))
    list(dataset)
    addresses = [worker.address for worker in cluster.workers]
    assert hr.service.delivery_report(dataset.batch(2)) == dict.fromkeys(addresses, 10)


@pytest.mark.catalogue("OP12")
def test_a_generator_is_run_by_the_worker(cluster: LocalCluster) -> None:
    dataset = off(cluster, hr.Dataset.from_generator(lambda: iter(range(10))))
    assert numbers(dataset) == list(range(10))


@pytest.mark.catalogue("OP19")
def test_two_readers_of_a_job_share_its_elements(cluster: LocalCluster) -> None:
    plan = hr.Dataset.range(1000).shuffle(1000)
    first, second = (iter(off(cluster, plan, job_name="job")) for _ in range(2))
    got = []
    for _ in range(200):  # how many of them one gets while the other waits is not said
        got += [int(row) for reader in (first, second) for row in itertools.islice(reader, 1)]
    got += numbers(first) + numbers(second)
    assert sorted(got) == list(range(1000))


@pytest.mark.catalogue("OP20")
def test_jobs_of_different_names_are_independent(cluster: LocalCluster) -> None:
    datasets = [off(cluster, hr.Dataset.range(10), job_name=name) for name in ("a", "b")]
    assert [numbers(dataset) for dataset in datasets] == [list(range(10))] * 2


@pytest.mark.catalogue("OP21")
def test_readers_share_a_job_epoch_by_epoch(cluster: LocalCluster) -> None:
    first, second = (off(cluster, hr.Dataset.range(10), job_name="job") for _ in range(2))
    assert numbers(first) == list(range(10))
    assert numbers(second) == []
    assert numbers(second) == list(range(10))
    assert numbers(first) == []


@pytest.mark.catalogue("OP22")
def test_shared_epochs_are_delivered_once_each(cluster: LocalCluster) -> None:
    first, second = (
        iter(off(cluster, hr.Dataset.range(100), job_name="job").repeat(3)) for _ in range(2)
    )
    got = [int(next(first)) for _ in range(60)] + [int(next(second)) for _ in range(60)]
    got += numbers(first) + numbers(second)
    assert sorted(got) == sorted(list(range(100)) * 3)


@pytest.mark.catalogue("OP24")
def test_a_named_job_alone_has_whole_epochs(cluster: LocalCluster) -> None:
    dataset = off(cluster, hr.Dataset.range(10), job_name="job")
    assert [numbers(dataset) for _ in range(5)] == [list(range(10))] * 5


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("parallel_epochs", {}),
    ("distributed_epoch", {}),
    ("distributed_epoch", {"ordered": True}),
    ("parallel_epochs", {"num_consumers": 1, "consumer_index": 0}),
    ("distributed_epoch", {"num_consumers": 1, "consumer_index": 0, "ordered": True}),
]


@pytest.mark.parametrize(("mode", "options"), WAYS)
def test_inspecting_the_spec_takes_no_element_of_a_named_job(
    cluster: LocalCluster, mode: str, options: dict[str, Any]
) -> None:
    """Only reading an element can tell; this uses a separate iteration."""
    read = distribute(mode, cluster.target, job_name="job", **options)
    dataset = hr.Dataset.range(30).map(lambda x: np.full(2, x)).apply(read)
    spec = hr.ArraySpec((None,), np.int64)
    assert dataset.element_spec == spec
    with iter(dataset) as elements:
        found = [int(next(elements)[0]) for _ in range(7)]
        assert dataset.element_spec == spec
        found += [int(element[0]) for element in elements]
    assert found == list(range(30))
    assert sum(hr.service.delivery_report(dataset).values()) in (0, 30)
    assert dataset.element_spec == spec


def test_inspecting_a_nested_dataset_takes_no_element_of_a_job(
    cluster: LocalCluster,
) -> None:
    def opened(number: Any) -> hr.Dataset:
        rows = hr.Dataset.range(20).map(lambda x: x + 1 if x >= 0 else x)
        return rows.apply(distribute("distributed_epoch", cluster.target, job_name=f"job {number}"))

    dataset = hr.Dataset.range(2).flat_map(opened)
    assert dataset.element_spec == hr.ArraySpec((), np.int64)
    assert sorted(dataset) == sorted([*range(1, 21)] * 2)


@pytest.mark.catalogue("OP25", "OP26", "OP44")
def test_a_registered_dataset_is_read_by_its_id(cluster: LocalCluster) -> None:
    dataset_id = register_dataset(cluster.target, hr.Dataset.range(10))
    dataset = from_dataset_id("parallel_epochs", cluster.target, dataset_id)
    assert dataset.element_spec == hr.ArraySpec((), np.int64)
    assert numbers(dataset) == list(range(10))


@pytest.mark.catalogue("OP45")
def test_job_names_are_scoped_by_dataset_id(cluster: LocalCluster) -> None:
    cluster.add_worker()
    plans = (hr.Dataset.range(20), hr.Dataset.range(20, 40))
    ids = [register_dataset(cluster.target, plan) for plan in plans]
    readers = [
        iter(
            from_dataset_id("distributed_epoch", cluster.target, dataset_id, job_name="shared_job")
        )
        for dataset_id in ids * 2
    ]
    rounds = itertools.zip_longest(*readers)
    got = [int(value) for values in rounds for value in values if value is not None]
    assert sorted(got) == list(range(40))


@pytest.mark.catalogue("OP49")
def test_an_unregistered_id_is_rejected_at_the_call(cluster: LocalCluster) -> None:
    with pytest.raises(hr.errors.NotFoundError, match=r"Dataset id UnregisteredID not found\."):
        from_dataset_id("parallel_epochs", cluster.target, "UnregisteredID")


@pytest.mark.catalogue("OP51")
def test_different_datasets_get_different_ids(cluster: LocalCluster) -> None:
    one = register_dataset(cluster.target, hr.Dataset.range(10))
    assert one != register_dataset(cluster.target, hr.Dataset.range(20))


@pytest.mark.catalogue("OP52", "OP53")
def test_a_dataset_is_found_under_the_id_it_was_given(cluster: LocalCluster) -> None:
    given = register_dataset(cluster.target, hr.Dataset.range(10), dataset_id="dataset_id")
    assert given == "dataset_id"
    for _ in range(2):
        dataset = from_dataset_id("parallel_epochs", cluster.target, "dataset_id")
        assert numbers(dataset) == list(range(10))


@pytest.mark.catalogue("OP54")
def test_the_same_dataset_registered_twice_under_an_id_is_one(cluster: LocalCluster) -> None:
    ids = [
        register_dataset(cluster.target, hr.Dataset.range(10), dataset_id="dataset_id")
        for _ in range(2)
    ]
    first, second = (
        from_dataset_id("parallel_epochs", cluster.target, dataset_id, job_name="job_name")
        for dataset_id in ids
    )
    assert numbers(first) == list(range(10))
    assert numbers(second) == []


@pytest.mark.catalogue("OP55")
@pytest.mark.parametrize("other", [None, "another_dataset_id"])
def test_the_same_dataset_under_two_ids_is_two(cluster: LocalCluster, other: str | None) -> None:
    ids = [
        register_dataset(cluster.target, hr.Dataset.range(10), dataset_id=dataset_id)
        for dataset_id in ("dataset_id", other)
    ]
    for dataset_id in ids:
        dataset = from_dataset_id(
            "parallel_epochs", cluster.target, dataset_id, job_name="job_name"
        )
        assert numbers(dataset) == list(range(10))


@pytest.mark.catalogue("OP56")
def test_a_dataset_of_another_structure_cannot_take_an_id(cluster: LocalCluster) -> None:
    register_dataset(cluster.target, hr.Dataset.range(10), dataset_id="dataset_id")
    words = hr.Dataset.from_tensor_slices(["a", "b"])
    with pytest.raises(
        hr.errors.AlreadyExistsError,
        match="Datasets with the same ID should have the same structure",
    ):
        register_dataset(cluster.target, words, dataset_id="dataset_id")


@pytest.mark.catalogue("OP57")
def test_a_worker_may_be_a_client_of_its_own_service(cluster: LocalCluster) -> None:
    assert numbers(off(cluster, off(cluster, hr.Dataset.range(10)))) == list(range(10))


@pytest.mark.catalogue("OP60")
def test_a_dataset_without_elements_ends(cluster: LocalCluster) -> None:
    cluster.add_worker()
    plan = hr.Dataset.range(10).batch(1000, drop_remainder=True)
    assert list(off(cluster, plan)) == []


@pytest.mark.catalogue("OP61")
def test_each_worker_delivers_its_last_partial_batch(cluster: LocalCluster) -> None:
    cluster.add_worker()
    batches = list(off(cluster, hr.Dataset.range(10).batch(1000)))
    assert [batch.tolist() for batch in batches] == [list(range(10))] * 2


@pytest.mark.catalogue("CR6", "ME1", "ME2")
@pytest.mark.parametrize(
    ("plan", "mode", "expected"),
    [
        (hr.Dataset.range(10), "parallel_epochs", hr.UNKNOWN_CARDINALITY),
        (hr.Dataset.range(10), "distributed_epoch", hr.UNKNOWN_CARDINALITY),
        (hr.Dataset.range(0), "parallel_epochs", 0),
        (hr.Dataset.range(0), "distributed_epoch", 0),
        (hr.Dataset.range(10).repeat(), "parallel_epochs", hr.INFINITE_CARDINALITY),
        (hr.Dataset.range(10).repeat(), "distributed_epoch", hr.INFINITE_CARDINALITY),
        (hr.Dataset.range(10).repeat(), ShardingPolicy.DATA, hr.INFINITE_CARDINALITY),
        (hr.Dataset.range(0), ShardingPolicy.DATA, 0),
        (hr.Dataset.range(0), ShardingPolicy.FILE_OR_DATA, 0),
        (hr.Dataset.range(10).repeat(), ShardingPolicy.FILE_OR_DATA, hr.UNKNOWN_CARDINALITY),
        (hr.Dataset.range(0).shard(SHARD_HINT, 0), ShardingPolicy.HINT, hr.UNKNOWN_CARDINALITY),
        (
            hr.Dataset.range(10).repeat().shard(SHARD_HINT, 0),
            ShardingPolicy.HINT,
            hr.UNKNOWN_CARDINALITY,
        ),
    ],
)
def test_cardinality_is_known_if_independent_of_workers(
    cluster: LocalCluster, plan: hr.Dataset, mode: str, expected: int
) -> None:
    dataset_id = register_dataset(cluster.target, plan)
    assert plan.apply(distribute(mode, cluster.target)).cardinality() == expected
    assert from_dataset_id(mode, cluster.target, dataset_id).cardinality() == expected


@pytest.mark.catalogue("LW1")
def test_local_readers_read_the_workers_of_their_process(cluster: LocalCluster) -> None:
    dataset = off(cluster, hr.Dataset.range(10), target_workers="local")
    assert numbers(dataset) == list(range(10))


@pytest.mark.parametrize("taken", [0, 40])
def test_get_state_of_a_remote_iterator_is_rejected(cluster: LocalCluster, taken: int) -> None:
    dataset = off(cluster, hr.Dataset.range(100)).map(lambda x: x + 1).batch(2)
    with iter(dataset) as iterator:
        for _ in range(taken):
            next(iterator)
        for ask in (iterator.get_state, iterator.state_dict):
            with pytest.raises(
                hr.errors.FailedPreconditionError, match="can be restored within an epoch only"
            ) as caught:
                ask()
    # It says what would do.
    assert "or save the state of an iterator without `distribute`" in str(caught.value)


@pytest.mark.catalogue("OP23")
def test_a_reader_skips_epochs_that_another_has_read(cluster: LocalCluster) -> None:
    fast, slow = (off(cluster, hr.Dataset.range(10), job_name="job").repeat() for _ in range(2))
    with iter(fast) as ahead, iter(slow) as behind:
        assert [int(next(ahead)) for _ in range(30)] == list(range(10)) * 3
        assert len([next(behind) for _ in range(30)]) == 30


@pytest.mark.catalogue("OP48")
def test_a_spec_that_does_not_fit_the_dataset_is_refused(cluster: LocalCluster) -> None:
    dataset_id = register_dataset(cluster.target, hr.Dataset.range(10).batch(2))
    wider = hr.ArraySpec((None,), "int64")
    known = from_dataset_id("parallel_epochs", cluster.target, dataset_id, element_spec=wider)
    assert known.element_spec == wider
    for wrong in (hr.ArraySpec((None,), "float32"), hr.ArraySpec((3,), "int64"), (wider, wider)):
        with pytest.raises(ValueError, match="was registered with"):
            from_dataset_id("parallel_epochs", cluster.target, dataset_id, element_spec=wrong)
