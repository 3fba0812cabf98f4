"""Epochs that a loader reads, over a plain or a distributed dataset."""

from __future__ import annotations

import logging
from typing import Any

from torch import distributed
from torch.utils.data import get_worker_info

from headrace.adapters.torch_device_transfer import DeviceTransfer, TransferToDevice, make_sender
from headrace.adapters.torch_epochs import WorkerEpochs, is_spawning, worker_epochs
from headrace.adapters.torch_iterator import OpenedEpoch
from headrace.adapters.torch_sharding import (
    WHOLE_DATASET,
    DataShard,
    draws_without_seed,
    find_repeated_step,
    is_read_ahead,
    is_sharded_manually,
    may_end_at_different_steps,
    reads_data_service,
    shard_plan,
)
from headrace.data.dataset import Dataset
from headrace.data.lookahead import LookaheadIterator
from headrace.data.saved_state import VERSION
from headrace.distribute.dataset import ReplicaDataset
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.execution.build import draw_seed
from headrace.execution.context import count_counters, next_iteration_number
from headrace.plan.buffering import Prefetch
from headrace.plan.determinism import collect_fixed_seeds
from headrace.plan.identity import identity
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy, Options, WithOptions
from headrace.plan.serialize import dump_plan, load_plan

__all__ = ["DatasetEpochs", "DistributedDatasetEpochs"]

_log = logging.getLogger(__name__)

_SEED_KEY = "headrace/loader/seed"


class DatasetEpochs:
    """Epochs of a dataset, restricted to the shard of this rank and worker process.

    Args:
        dataset: A dataset of this process, or over a data service.
        prefetch: Elements to read ahead.
        shard: Whether to shard by rank; or the shard to read.
        drop_remainder: Whether all ranks get the same number of elements.
    """

    def __init__(
        self, dataset: Dataset, prefetch: int, shard: bool | DataShard, drop_remainder: bool
    ) -> None:
        self._dataset = dataset
        self._prefetch = prefetch
        self._shard = shard
        self._drop_remainder = drop_remainder
        #: Epoch counters that worker processes of a DataLoader share, and the smallest number that
        #: the process which pickled this object had not used.
        self._epochs: list[WorkerEpochs] | None = None
        self._min_number = 0
        self._worker_epochs()
        #: Rank shard in the process that pickled this object; None to determine it here.
        self._pickled_rank_shard: DataShard | None = None
        self._job_seed: int | None = None
        self._was_warned = False
        #: Arguments and result of the latest call of `_make_plan`.
        self._latest_plan: tuple[tuple[Any, ...], Node] | None = None
        # As early as possible, because forked processes cannot communicate with other ranks.
        self._agree_on_seed(self._rank_shard())

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements."""
        return self._dataset.element_spec

    def __len__(self) -> int:
        return len(Dataset(self._shard_plan(self._rank_shard(), WHOLE_DATASET, 0)))

    def __repr__(self) -> str:
        return repr(self._dataset)

    def open(
        self, number: int, state: dict[str, Any] | None, transfer: DeviceTransfer | None
    ) -> OpenedEpoch:
        """Open an epoch.

        Args:
            number: Number of the epoch, unless there is a state.
            state: State to continue from; None starts at the beginning.
            transfer: Transfer of elements to a device ahead of their use, or None.
        """
        rank_shard, worker_shard = self._rank_shard(), _worker_shard()
        sharding = [rank_shard.count, rank_shard.index, worker_shard.count, worker_shard.index]
        start = num_taken = num_failed = 0
        if state is not None:
            number, start, num_taken = state["epoch"], state["start"], state["num_taken"]
            num_failed = state.get("num_failed", 0)
            if state["sharding"] != sharding:
                start, num_taken = _elements_read_by_all(state), 0
        plan = self._shard_plan(rank_shard, worker_shard, start)
        self._warn_once(plan, rank_shard, worker_shard)
        if state is None and get_worker_info() is not None:
            number = self._worker_epoch_number(number)
        plan = self._add_prefetch(plan, transfer)
        elements = LookaheadIterator(plan, number, for_training=True)
        if state is None:
            if worker_shard.count > 1 and rank_shard.count == 1 and self._needs_seed():
                info = get_worker_info()
                seed = info.seed - info.id
                elements.set_state(_initial_state(elements, plan, seed, number))
        elif state["sharding"] == sharding:
            elements.set_state(state["iterator"])
        else:
            seed, fixed = state["iterator"]["seed"], state["iterator"].get("fixed_seeds")
            elements.set_state(_initial_state(elements, plan, seed, number, fixed))
        return OpenedEpoch(elements, elements.epoch, sharding, start, num_taken, num_failed)

    def _worker_epochs(self) -> list[WorkerEpochs]:
        """Return the counters for iterations of shared jobs by worker processes.

        They are created before any worker process, so that workers inherit them.
        """
        counters = count_counters(self._dataset.plan)
        if self._epochs is None:
            self._epochs = [worker_epochs(each) for each in counters]
        for counter, epochs in zip(counters, self._epochs, strict=True):
            counter.peers = epochs
        return self._epochs

    def _worker_epoch_number(self, number: int) -> int:
        """Return the number of the epoch that this worker process of a DataLoader begins."""
        info = get_worker_info()
        minimum = next_iteration_number(self._dataset.plan, max(number, self._min_number))
        numbers = [
            each.begin(info.seed - info.id, info.id, minimum) for each in self._worker_epochs()
        ]
        return max(numbers, default=number)

    def _shard_plan(self, rank_shard: DataShard, worker_shard: DataShard, start: int) -> Node:
        """Return the plan to read: the same one in each epoch, to which a process pool belongs."""
        seed = self._agree_on_seed(rank_shard)
        arguments = (rank_shard, worker_shard, start, seed)
        if self._latest_plan is None or self._latest_plan[0] != arguments:
            self._latest_plan = arguments, self._make_plan(*arguments)
        return self._latest_plan[1]

    def _make_plan(
        self, rank_shard: DataShard, worker_shard: DataShard, start: int, seed: int | None
    ) -> Node:
        plan: Node = self._dataset.plan
        if seed is not None:
            plan = WithOptions(input=plan, options=Options(seed=seed))
        return shard_plan(
            plan, rank_shard, worker_shard, drop_remainder=self._drop_remainder, start=start
        )

    def _add_prefetch(self, plan: Node, transfer: DeviceTransfer | None) -> Node:
        if get_worker_info() is not None:
            return plan  # the DataLoader reads ahead itself
        if transfer is not None:
            plan = TransferToDevice(input=plan, send=make_sender(transfer))
        elif is_read_ahead(plan):
            return plan
        return Prefetch(input=plan, buffer_size=self._prefetch) if self._prefetch else plan

    # --- ranks --------------------------------------------------------------------------------

    def _rank_shard(self) -> DataShard:
        """Return this rank's shard of the dataset, by the current process group."""
        if self._pickled_rank_shard is not None:
            return self._pickled_rank_shard
        if isinstance(self._shard, DataShard):
            return self._shard
        if not self._shard or reads_data_service(self._dataset.plan) or not _has_process_group():
            return WHOLE_DATASET
        if self._dataset.options().auto_shard_policy is AutoShardPolicy.OFF:
            return WHOLE_DATASET
        rank_shard = DataShard(distributed.get_world_size(), distributed.get_rank())
        return (
            WHOLE_DATASET
            if rank_shard.count == 1 or is_sharded_manually(self._dataset.plan, rank_shard)
            else rank_shard
        )

    def _needs_seed(self) -> bool:
        return self._dataset.options().seed is None and not reads_data_service(self._dataset.plan)

    def _agree_on_seed(self, rank_shard: DataShard) -> int | None:
        """Return the seed that all ranks use; None for the dataset's own, or a single rank.

        The first rank that calls it draws the seed, so no rank waits for another.
        """
        if rank_shard.count == 1 or not self._needs_seed():
            return None
        if self._job_seed is None and _has_process_group() and get_worker_info() is None:
            store = distributed.distributed_c10d._get_default_store()
            self._job_seed = int(store.compare_set(_SEED_KEY, "", str(draw_seed())))
        if self._job_seed is None and draws_without_seed(self._dataset.plan):
            raise FailedPreconditionError(
                "all ranks must use the same random order for their shards of the dataset, but "
                "this process cannot get a common seed from the others: pass a seed to `shuffle`, "
                "or Options(seed=...) to the dataset; or make the loader after init_process_group"
            )
        return self._job_seed

    def _warn_once(self, plan: Node, rank_shard: DataShard, worker_shard: DataShard) -> None:
        """Log, once and on one rank, properties of the sharding that may surprise users."""
        if self._was_warned or rank_shard.index or worker_shard.index:
            return
        self._was_warned = True
        if may_end_at_different_steps(self._dataset.plan, rank_shard):
            _log.warning(
                "the dataset's options give each of the %s ranks its own files or shards, so ranks "
                "may end at different steps, and a rank that waits for an ended one waits forever: "
                "use repeat() and a fixed number of steps, or torch.distributed.algorithms.Join",
                rank_shard.count,
            )
        num_readers = rank_shard.count * worker_shard.count
        step = find_repeated_step(plan) if num_readers > 1 else ""
        if step:
            _log.warning(
                "%s runs for all elements in each of the %s processes that read shards of the "
                "dataset, because its output order is known only by reading: give each process "
                "its own files (AutoShardPolicy.FILE), call shard() before it, or read from a data "
                "service",
                step,
                num_readers,
            )

    def __getstate__(self) -> dict[str, Any]:
        rank_shard = self._rank_shard()
        self._agree_on_seed(rank_shard)
        # Without a process group, the process that unpickles this determines its rank.
        is_known = self._pickled_rank_shard or self._shard is not True or _has_process_group()
        return dict(
            self.__dict__,
            _dataset=dump_plan(self._dataset.plan),
            _latest_plan=None,
            _pickled_rank_shard=rank_shard if is_known else None,
            _epochs=self._worker_epochs() if is_spawning() else None,
            _min_number=next_iteration_number(self._dataset.plan) if is_spawning() else 0,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _dataset=Dataset(load_plan(state["_dataset"])))


class DistributedDatasetEpochs:
    """Epochs of a distributed dataset, which does its own sharding and prefetching."""

    def __init__(self, dataset: ReplicaDataset) -> None:
        self._dataset = dataset

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements."""
        return self._dataset.element_spec

    def __len__(self) -> int:
        return len(self._dataset)

    def __repr__(self) -> str:
        return repr(self._dataset)

    def open(
        self, number: int, state: dict[str, Any] | None, transfer: DeviceTransfer | None
    ) -> OpenedEpoch:
        """Open an epoch like `DatasetEpochs.open`; elements are transferred when they are used."""
        if get_worker_info() is not None:
            raise FailedPreconditionError(
                "a distributed dataset must be read in the process of its strategy: use "
                "num_workers=0, or iterate over the loader itself"
            )
        if state is not None:
            number = state["epoch"]
            if state["sharding"]:
                raise FailedPreconditionError(
                    "the state is of a dataset that was not distributed by a strategy, but this "
                    "loader reads a distributed dataset"
                )
        elements = self._dataset.open_epoch(number)
        if state is not None:
            elements.set_state(state["iterator"])
        saved = state or {}
        return OpenedEpoch(
            elements, number, [], 0, saved.get("num_taken", 0), saved.get("num_failed", 0)
        )


def _has_process_group() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def _worker_shard() -> DataShard:
    """Return the part of a rank's shard that this worker process of a DataLoader reads."""
    info = get_worker_info()
    return WHOLE_DATASET if info is None else DataShard(info.num_workers, info.id)


def _initial_state(
    elements: LookaheadIterator,
    plan: Node,
    seed: int,
    number: int,
    seeds_of_fixed_steps: list[int] | None = None,
) -> dict[str, Any]:
    """Return the state at the start of an epoch, with the seed of another process."""
    state = {"version": VERSION, "plan": identity(plan), "seed": seed, "epoch": number}
    state["position"] = elements.start_position
    seeds_of_fixed_steps = (
        collect_fixed_seeds(plan) if seeds_of_fixed_steps is None else seeds_of_fixed_steps
    )
    return state | {"fixed_seeds": seeds_of_fixed_steps} if seeds_of_fixed_steps else state


def _elements_read_by_all(state: dict[str, Any]) -> int:
    """Return how many elements all ranks had read when a state was taken with another sharding.

    Raises:
        FailedPreconditionError: If that is not known from the state.
    """
    if not state["sharding"]:
        raise FailedPreconditionError(
            "the state is of a dataset that was distributed by a strategy, but this loader reads "
            "a plain dataset"
        )
    count, rank, workers, worker = state["sharding"]
    if workers != 1:
        raise FailedPreconditionError(
            f"the state is of worker process {worker} of {workers} of a DataLoader on rank {rank} "
            f"of {count}, and only the same worker can continue from it: use {count} ranks and "
            f"{workers} workers"
        )
    if state.get("num_failed"):
        raise FailedPreconditionError(
            f"{state['num_failed']} elements failed on rank {rank} of {count} before the state "
            "was taken, so the position of all ranks together is unknown: use "
            f"{count} ranks, each with its own state; or start the epoch from the beginning"
        )
    return int(state["start"] + state["num_taken"] * count)
