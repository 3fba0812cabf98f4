"""Loaders on ranks of torch.distributed and in worker processes of a DataLoader."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - a backend without peers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import headrace as hr
from headrace.distribute import AutoShardPolicy
from headrace.errors import FailedPreconditionError

# The warning appears on a machine with one core.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 23
OnRank = Callable[[int, int], None]


def dataset(seed: int | None = None) -> hr.Dataset:
    return hr.Dataset.range(N).shuffle(N, seed=seed).map(lambda x: x + 0).batch(2)


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def rows(batches: list[list[int]]) -> list[int]:
    return sorted(x for batch in batches for x in batch)


@pytest.fixture
def on_rank() -> Iterator[OnRank]:
    """Make this process one of several ranks that share a store."""
    store = distributed.HashStore()

    def begin(rank: int, count: int) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group("fake", rank=rank, world_size=count, store=store)

    yield begin
    if distributed.is_initialized():
        distributed.destroy_process_group()


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 5])
def test_ranks_read_disjoint_shards_of_one_order_and_end_together(
    on_rank: OnRank, seed: int | None
):
    found: list[list[list[int]]] = []
    for rank in range(4):
        loader = hr.torch.loader(dataset(seed))  # made before the process group
        on_rank(rank, 4)
        assert len(loader) == 3
        found.append(numbers(loader) + numbers(loader))
    assert [len(batches) for batches in found] == [6] * 4
    for epoch in (slice(0, 3), slice(3, 6)):
        seen = rows([batch for batches in found for batch in batches[epoch]])
        assert len(seen) == len(set(seen)) >= N - 1  # twelve batches, the last has one row
    assert found[0][:3] != found[0][3:]


def test_a_fixed_order_without_a_seed_is_the_same_on_all_ranks(on_rank: OnRank):
    seen: list[list[int]] = []
    for rank in range(2):
        on_rank(rank, 2)
        # Without a common seed.
        fixed = hr.Dataset.range(20).shuffle(20, reshuffle_each_iteration=False)
        seen.append([int(x) for x in hr.torch.loader(fixed)])
    assert sorted(seen[0] + seen[1]) == list(range(20))


def test_options_and_arguments_disable_sharding_by_rank(on_rank: OnRank):
    on_rank(1, 2)
    off = hr.Options()
    off.auto_shard_policy = AutoShardPolicy.OFF
    plain = hr.Dataset.range(8)
    assert len(hr.torch.loader(plain)) == 4
    assert len(hr.torch.loader(plain, shard=False)) == 8
    assert len(hr.torch.loader(plain.with_options(off))) == 8
    assert [int(x) for x in hr.torch.loader(plain, shard=(4, 3))] == [3, 7]
    assert [int(x) for x in hr.torch.loader(plain.shard(2, 1))] == [1, 3, 5, 7]
    assert len(hr.torch.loader(hr.Dataset.range(9), drop_remainder=False)) == 4


def test_surprising_sharding_warns_once(on_rank: OnRank, caplog: Any, tmp_path: Any):
    names = [str(tmp_path / f"{n}") for n in range(2)]
    for name in names:
        (tmp_path / name).write_text("1\n2\n")
    on_rank(0, 2)
    for policy, message in [(AutoShardPolicy.FILE, "end at different"), (None, "runs for all")]:
        options = hr.Options(auto_shard_policy=policy)
        lines = hr.Dataset.from_tensor_slices(names).interleave(hr.TextLineDataset)
        loader = hr.torch.loader(lines.with_options(options))
        assert [list(loader) for _ in range(2)] == [[b"1", b"2"]] * 2
        assert [message in record.message for record in caplog.records] == [True]
        caplog.clear()


def test_a_state_resumes_on_another_number_of_ranks(on_rank: OnRank):
    source = dataset(seed=7)
    whole = numbers(iter(source))
    read: list[list[int]] = []
    for rank in range(3):
        on_rank(rank, 3)
        loader = hr.torch.loader(source)
        iterator = iter(loader)
        read += [next(iterator).tolist() for _ in range(2)]
    state = json.loads(json.dumps(loader.state_dict()))
    for rank in range(2):
        on_rank(rank, 2)
        loader = hr.torch.loader(source)
        loader.load_state_dict(state)
        iterator = iter(loader)
        read += [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    distributed.destroy_process_group()
    loader = hr.torch.loader(source)
    loader.load_state_dict(state)
    read += numbers(loader)
    assert sorted(read) == sorted(whole)
    assert rows(numbers(loader)) == list(range(N))


def test_shards_without_a_common_seed_are_rejected():
    with pytest.raises(FailedPreconditionError, match="pass a seed to `shuffle`"):
        hr.torch.loader(dataset(), shard=(2, 0))
    assert len(hr.torch.loader(dataset(seed=1), shard=(2, 0))) == 6


def test_a_pickled_loader_keeps_its_shard(on_rank: OnRank):
    on_rank(1, 2)
    unpickled = pickle.loads(pickle.dumps(hr.torch.loader(dataset())))
    expected = numbers(hr.torch.loader(dataset()))
    distributed.destroy_process_group()
    assert numbers(pickle.loads(pickle.dumps(unpickled))) == numbers(unpickled) == expected
    alone = pickle.dumps(hr.torch.loader(hr.Dataset.range(8)))
    on_rank(1, 2)
    # It was pickled without a process group, so it is sharded where it is unpickled.
    assert len(pickle.loads(alone)) == 4


# --- processes of a DataLoader ------------------------------------------------------------------


def test_worker_processes_read_every_element_once_in_order():
    loader = hr.torch.loader(dataset(seed=3))
    plain = [numbers(loader) for _ in range(2)]
    workers = DataLoader(
        loader, batch_size=None, num_workers=2, persistent_workers=True, **_forked()
    )
    loader.set_epoch(0)
    assert len(workers) == len(plain[0]) == 12
    assert [numbers(workers) for _ in range(2)] == plain
    loader.set_epoch(1)
    assert numbers(DataLoader(loader, batch_size=None, num_workers=3, **_forked())) == plain[1]


def test_an_order_without_a_seed_is_the_same_in_all_worker_processes():
    workers = DataLoader(hr.torch.loader(dataset()), batch_size=None, num_workers=2, **_forked())
    passes = [numbers(workers) for _ in range(2)]
    assert [rows(batches) for batches in passes] == [list(range(N))] * 2
    assert passes[0] != passes[1]


def test_worker_processes_of_ranks_keep_the_order(on_rank: OnRank):
    for rank in range(2):
        on_rank(rank, 2)
        loader = hr.torch.loader(dataset())
        plain = numbers(loader)
        loader.set_epoch(0)
        workers = DataLoader(loader, batch_size=None, num_workers=2, **_forked())
        assert numbers(workers) == plain


def test_earlier_states_and_epochs_apply_in_each_worker_process():
    source = dataset(seed=3)
    loader = hr.torch.loader(source)
    loader.state_dict()
    loader.set_epoch(0)
    loader.state_dict()  # creates an iterator over the whole dataset
    loader.set_epoch(0)
    whole = numbers(hr.torch.loader(source))
    assert numbers(DataLoader(loader, batch_size=None, num_workers=2, **_forked())) == whole
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    restored = hr.torch.loader(source)
    restored.load_state_dict(loader.state_dict())
    workers = DataLoader(restored, batch_size=None, num_workers=2, **_forked())
    assert numbers(workers) == whole[5:]


def test_a_dataloader_can_batch_and_collate_elements_of_a_loader():
    source = hr.Dataset.range(6).map(lambda x: {"x": x, "name": f"n{x}"})
    (batch,) = DataLoader(hr.torch.loader(source), batch_size=6)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["name"] == [f"n{k}" for k in range(6)]


def test_input_that_a_worker_process_cannot_read_is_rejected(monkeypatch: pytest.MonkeyPatch):
    info = SimpleNamespace(id=1, num_workers=2, seed=8)
    for module in ("torch_loader_epochs", "torch_loader"):
        monkeypatch.setattr(f"headrace.adapters.{module}.get_worker_info", lambda: info)
    strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    steps = strategy.distribute_dataset(hr.Dataset.range(8).batch(4))
    with pytest.raises(FailedPreconditionError, match="num_workers=0"):
        iter(hr.torch.loader(steps))
    with pytest.raises(FailedPreconditionError, match="pin_memory=True"):
        iter(hr.torch.loader(hr.Dataset.range(8), "cuda:0"))


def _forked() -> Any:
    return {"multiprocessing_context": "fork"}


SPAWNED = """
import headrace as hr
from torch.utils.data import DataLoader

if __name__ == "__main__":
    loader = hr.torch.loader(hr.Dataset.range(9).shuffle(9, seed=1).map(lambda x: x + 0))
    workers = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [int(x) for x in workers] == [int(x) for x in loader]
"""


@pytest.mark.heavy
def test_worker_processes_can_be_spawned(tmp_path: Any):
    program = tmp_path / "spawned.py"
    program.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# --- the data service ---------------------------------------------------------------------------


def test_a_service_dataset_has_states_and_is_read_by_several_processes():
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        alone = dataset().apply(hr.service.distribute("distributed_epoch", cluster.target))
        for device in (None, "meta"):
            loader = hr.torch.loader(alone, device)
            with iter(loader) as iterator:
                for _ in range(5):
                    next(iterator)
                state = json.loads(json.dumps(iterator.state_dict()))
            for source in (alone, dataset()):
                rest = hr.torch.loader(source)
                rest.load_state_dict(state)
                assert len(list(rest)) == 7
        named = dataset().apply(
            hr.service.distribute("distributed_epoch", cluster.target, job_name="trainers")
        )
        workers = DataLoader(hr.torch.loader(named), batch_size=None, num_workers=2, **_forked())
        assert rows(numbers(workers)) == list(range(N))


def _distributed(target: str, job: str) -> hr.Dataset:
    return dataset().apply(hr.service.distribute("distributed_epoch", target, job_name=job))


def test_worker_processes_that_end_with_each_epoch_read_further_epochs_of_a_job():
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        named = _distributed(cluster.target, "trainers")
        one_loader = DataLoader(hr.torch.loader(named), batch_size=None, num_workers=2, **_forked())
        for _ in range(3):
            assert rows(numbers(one_loader)) == list(range(N))
            new_loader = hr.torch.loader(named.map(lambda x: x))
            workers = DataLoader(new_loader, batch_size=None, num_workers=1, **_forked())
            assert rows(numbers(workers)) == list(range(N))
            # The epochs of this process follow those of its workers.
            assert rows(numbers(hr.torch.loader(named))) == list(range(N))


class EpochNumbers(IterableDataset[int]):
    """Yields the number of the epoch that a loader begins in a worker process."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[int]:
        with iter(self._loader) as iterator:
            yield iterator.state_dict()["epoch"]


def test_worker_processes_of_forked_trainers_agree_on_epoch_numbers():
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        loader = EpochNumbers(hr.torch.loader(_distributed(cluster.target, "trainers")))
        forks = multiprocessing.get_context("fork")
        results = forks.SimpleQueue()

        def train() -> None:
            workers = DataLoader(loader, batch_size=None, num_workers=2, **_forked())
            results.put([list(workers) for _ in range(3)])

        trainers = [forks.Process(target=train) for _ in range(2)]
        for trainer in trainers:
            trainer.start()
        found = [results.get() for _ in trainers]
        for trainer in trainers:
            trainer.join(60)
            trainer.close()
        results.close()
    assert found == [[[0, 0], [1, 1], [2, 2]]] * 2


NUMBERED = """
import headrace as hr
from torch.utils.data import DataLoader

if __name__ == "__main__":
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        share = hr.service.distribute("distributed_epoch", cluster.target, job_name="trainers")
        named = hr.Dataset.range(9).apply(share)
        assert len(list(named)) == 9
        for _ in range(2):
            loader = hr.torch.loader(named)
            workers = DataLoader(
                loader, batch_size=None, num_workers=1, multiprocessing_context="spawn"
            )
            assert sorted(int(x) for x in workers) == list(range(9))
"""


@pytest.mark.slow
@pytest.mark.heavy
def test_spawned_worker_processes_read_further_epochs_of_a_job(tmp_path: Any):
    program = tmp_path / "numbered.py"
    program.write_text(NUMBERED)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_worker_processes_without_a_shared_job_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
):
    info = SimpleNamespace(id=1, num_workers=2, seed=8)
    monkeypatch.setattr("headrace.adapters.torch_loader_epochs.get_worker_info", lambda: info)
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        alone = dataset().apply(hr.service.distribute("distributed_epoch", cluster.target))
        with pytest.raises(FailedPreconditionError, match="pass a job_name to `distribute`"):
            iter(hr.torch.loader(alone))


def test_service_datasets_are_not_sharded_by_rank(on_rank: OnRank):
    with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
        alone = dataset().apply(hr.service.distribute("distributed_epoch", cluster.target))
        on_rank(1, 2)
        assert rows(numbers(hr.torch.loader(alone))) == list(range(N))


# --- the protocol of torchdata's StatefulDataLoader ----------------------------------------------


class Stateful(IterableDataset[Any]):
    """Reads a dataset in a worker process like a StatefulDataLoader.

    It restores the dataset, makes and restores an iterator, and yields the states of both with each
    element.
    """

    def __init__(self, source: Any, states: dict[int, Any]) -> None:
        self._source = source
        self._states = states

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info().id
        state = self._states.get(worker)
        if state is not None:
            self._source.load_state_dict(state["dataset"])
        iterator = iter(self._source)
        if state is not None:
            iterator.load_state_dict(state["iterator"])
        for element in iterator:
            now = {"dataset": self._source.state_dict(), "iterator": iterator.state_dict()}
            yield element, worker, json.dumps(now)


def test_stateful_loader_restores_states_of_worker_processes():
    source = dataset()
    first = iter(
        DataLoader(
            Stateful(hr.torch.loader(source), {}), batch_size=None, num_workers=2, **_forked()
        )
    )
    read, states = [], {}
    for _ in range(6):
        batch, worker, state = next(first)
        read.append(batch.tolist())
        states[worker] = json.loads(state)
    rest = [batch.tolist() for batch, _, _ in first]
    again = DataLoader(
        Stateful(hr.torch.loader(source), states), batch_size=None, num_workers=2, **_forked()
    )
    assert [batch.tolist() for batch, _, _ in again] == rest
    assert rows(read + rest) == list(range(N))
    other = hr.torch.loader(source)
    other.load_state_dict(states[1]["dataset"])
    with pytest.raises(FailedPreconditionError, match="worker process 1 of 2"):
        next(iter(other))


def test_stateful_loader_restores_states_in_the_training_process():
    loader = hr.torch.loader(dataset())
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    saved = copy.deepcopy({"dataset": loader.state_dict(), "iterator": iterator.state_dict()})
    rest = numbers(iterator)
    again = hr.torch.loader(dataset())
    again.load_state_dict(saved["dataset"])
    iterator = iter(again)
    iterator.load_state_dict(saved["iterator"])
    assert numbers(iterator) == rest
    assert again.state_dict()["ended"]
    assert isinstance(next(iter(again)), torch.Tensor)
