"""Replicas that read from the data service: their elements, and requests between clients."""

from __future__ import annotations

import pickle
import threading
import time

import cloudpickle
import numpy as np
import pytest

import headrace as hr
from headrace.distribute import DistributedDataset, InputContext, InputOptions
from headrace.errors import InvalidArgumentError
from headrace.service.client import reader
from tests.distribute.replicas import BALANCED, mirrored, on_worker, rows, split, with_policy

numbers = hr.Dataset.range


@pytest.fixture
def cluster():
    with hr.service.LocalCluster(num_workers=3, processes=False) as found:
        yield found


def shared(cluster, job_name=None, mode="distributed_epoch"):
    return hr.service.distribute(mode, cluster.target, job_name=job_name)


def as_in_another_process(data):
    return pickle.loads(cloudpickle.dumps(data))


def flat(steps):
    return [row for step in steps for part in step for row in part]


def slow(x):
    if np.min(x) % 8 == 0:
        time.sleep(1e-3)
    return x


@pytest.mark.catalogue("3.10.34")
def test_each_worker_reads_a_separate_copy(cluster):
    data = numbers(10).apply(shared(cluster, mode="parallel_epochs"))
    steps = mirrored(2).distribute_datasets_from_function(lambda context: data.batch(4))
    assert sorted(flat(map(rows, steps))) == sorted([*range(10)] * 3)


@pytest.mark.parametrize("options", [InputOptions(), BALANCED])
def test_elements_of_a_shared_job_are_not_sharded_again(cluster, options, request):
    """Each of two workers splits its batches for all replicas; together they get all rows."""
    data = numbers(40).batch(4).apply(shared(cluster, request.node.name))
    found = [on_worker(as_in_another_process(data), each, 2, 2, options) for each in range(2)]
    assert sorted(flat(found[0]) + flat(found[1])) == list(range(40))
    assert flat(found[0])


@pytest.mark.parametrize("policy", ["AUTO", "FILE", "DATA", "OFF"])
@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_a_named_job_is_shared_by_its_clients_with_any_policy(cluster, mode, policy, request):
    data = numbers(24).batch(4).apply(shared(cluster, request.node.name, mode))
    found = flat(
        on_worker(with_policy(data, policy), 0, 2) + on_worker(as_in_another_process(data), 1, 2)
    )
    assert sorted(found) == sorted([*range(24)] * (3 if mode == "parallel_epochs" else 1))


def test_a_dataset_from_its_id_is_not_sharded_again(cluster, request):
    name = hr.service.register_dataset(cluster.target, numbers(24).batch(4))
    data = hr.service.from_dataset_id(
        "distributed_epoch", cluster.target, name, job_name=request.node.name
    )
    other = as_in_another_process(data)
    assert sorted(flat(on_worker(data, 0) + on_worker(other, 1))) == list(range(24))


class FakeAgreement:
    """Agrees that another worker has data for `steps` steps (as `StepAgreement`)."""

    def __init__(self, steps):
        self.left = steps

    wants_spec, spec = True, None

    def any_has_data(self, here, spec=None):
        self.left -= 1
        return here or self.left >= 0


def test_a_worker_without_elements_of_a_job_gets_empty_steps(cluster, request):
    """The spec is known only from an element, and the job has no elements left."""
    looked = hr.Dataset.range(8).map(lambda x: {"x": x, "y": np.full((2, 3), x)})
    data = looked.batch(4).apply(shared(cluster, request.node.name))
    assert sorted(row for step in data for row in step["x"]) == list(range(8))
    late = as_in_another_process(data)
    late = DistributedDataset(late, InputContext(2, 1, 2), agreement=lambda: FakeAgreement(3))
    steps = [(step["x"].values[0].shape, step["y"].values[0].shape) for step in late]
    assert steps == [((0,), (0, 0, 0))] * 3


def test_the_spec_for_empty_steps_is_determined_once():
    looks = []

    def noted(x):
        looks.append(int(x))
        return np.full(2, x)

    data = numbers(2).map(noted).batch(2)
    distributed = DistributedDataset(
        data, InputContext(2, 1, 2), agreement=lambda: FakeAgreement(20), options=None
    )
    assert len(list(distributed)) == 20
    assert len(looks) == 2 + 1


def test_by_data_requires_ordered_reading_of_the_service(cluster):
    def of(**options):
        share = hr.service.distribute("distributed_epoch", cluster.target, **options)
        return with_policy(numbers(24).batch(4).apply(share), "DATA")

    ordered = of(ordered=True)
    assert [flat(on_worker(ordered, worker)) for worker in range(2)] == [
        [row for row in range(24) if row % 4 // 2 == worker] for worker in range(2)
    ]
    with pytest.raises(InvalidArgumentError, match=r"DATA cannot shard.*ordered=True"):
        on_worker(of(), 0)


def test_by_data_reads_in_order_even_if_deterministic_is_false():
    after = numbers(240).batch(4).map(slow, num_parallel_calls=4, deterministic=False)
    before = numbers(240).map(slow, num_parallel_calls=4, deterministic=False).batch(4)
    options = hr.Options()
    options.deterministic = False
    wished = numbers(240).batch(4).map(slow, num_parallel_calls=4).with_options(options)
    for data in (after, before, wished):
        assert [flat(on_worker(data, worker)) for worker in range(2)] == [
            [row for row in range(240) if row % 4 // 2 == worker] for worker in range(2)
        ]


def test_the_state_of_a_job_is_requested_only_by_the_user(cluster, monkeypatch, request):
    """One of two clients of a job reads alone: the other never reports its position."""
    asked = []
    ask = reader.gather_positions
    monkeypatch.setattr(
        reader, "gather_positions", lambda *a, **k: (asked.append(1), ask(*a, **k))[1]
    )
    data = numbers(60).batch(6).apply(shared(cluster, request.node.name))
    for options, here in ((BALANCED, 1), (InputOptions(), 1)):
        distributed = DistributedDataset(data, InputContext(2, 0, 2 * here), options)
        with iter(distributed) as first, iter(distributed) as second:
            for iterator in (second, first, first, first):
                next(iterator)
            assert asked == []


def states_of_all(iterators):
    """Return the states of iterators, requested concurrently."""
    states = [None] * len(iterators)

    def ask(index):
        states[index] = iterators[index].get_state()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(iterators))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return states


@pytest.mark.parametrize("options", [InputOptions(), BALANCED])
def test_workers_resume_from_a_state_between_batches(cluster, options, request):
    def opened(name):
        share = shared(cluster, request.node.name + name)
        data = [numbers(480).batch(6).apply(share) for _ in range(2)]
        contexts = [InputContext(2, worker, 2) for worker in range(2)]
        return [
            iter(DistributedDataset(*each, options)) for each in zip(data, contexts, strict=True)
        ]

    before, after = opened("before"), opened("after")
    seen = [row for _ in range(2) for each in before for row in flat([rows(next(each))])]
    states = states_of_all(before)
    places = [state["distributed"]["streams"][worker] for worker, state in enumerate(states)]
    assert places[0]["inputs"] == places[1]["inputs"]
    together = {**states[0], "distributed": {"streams": places}}
    for iterator in after:
        iterator.set_state(together)
    rest = flat([rows(step) for each in after for step in each])
    assert sorted(seen + rest) == list(range(480))
    for iterator in before:
        iterator.close()


def test_a_state_within_a_batch_of_an_unordered_job_raises(cluster):
    data = numbers(40).batch(5).map(lambda x: x[:3]).apply(shared(cluster))
    with iter(DistributedDataset(data, InputContext(2, 0, 2), BALANCED)) as iterator:
        iterator.get_state()
        next(iterator)
        with pytest.raises(
            hr.errors.FailedPreconditionError, match=r"in no fixed order.*ordered=True"
        ):
            iterator.get_state()


@pytest.mark.parametrize("options", [InputOptions(), BALANCED])
def test_a_state_within_a_batch_is_available_if_order_is_relaxed(options):
    data = numbers(60).map(slow, num_parallel_calls=4, deterministic=False).batch(6)
    data = with_policy(data.map(lambda x: x[:5]), "OFF")
    expected = flat(on_worker(data, 0, options=options))
    iterator = iter(DistributedDataset(data, InputContext(2, 0, 2), options))
    seen = [row for _ in range(3) for row in flat([rows(next(iterator))])]
    with iter(DistributedDataset(data, InputContext(2, 0, 2), options)) as other:
        other.set_state(iterator.get_state())
        assert seen + flat(map(rows, other)) == expected
    iterator.close()


def test_balanced_pieces_are_read_from_a_service_without_states(cluster):
    data = numbers(20).batch(5).apply(shared(cluster, mode="parallel_epochs"))
    assert sorted(flat(split(data, 2, BALANCED))) == sorted([*range(20)] * 3)
    with iter(mirrored(2).distribute_dataset(data, BALANCED)) as iterator:
        next(iterator)
        with pytest.raises(hr.errors.FailedPreconditionError, match="cannot save or restore"):
            iterator.get_state()
