"""What a loader reads: one pass after another over a dataset, plain or distributed."""

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
    """Passes over a dataset, of this rank's and this process's part.

    Args:
        dataset: Of this process, or over a data service.
        prefetch: Elements to read ahead.
        shard: Whether ranks share it; or which part to read.
        drop_remainder: Whether ranks get equally many elements.
    """

    def __init__(
        self, dataset: Dataset, prefetch: int, shard: bool | DataShard, drop_remainder: bool
    ) -> None:
        self._dataset = dataset
        self._prefetch = prefetch
        self._shard = shard
        self._drop_remainder = drop_remainder
        #: Where worker processes of a DataLoader count; and the number after those that the
        #: process which this was sent from had begun itself.
        self._epochs: list[WorkerEpochs] | None = None
        self._min_number = 0
        self._worker_epochs()
        #: What the process that this was sent from knew; None: this one knows it.
        self._pickled_rank_shard: DataShard | None = None
        self._job_seed: int | None = None
        self._was_warned = False
        # As early as it is known, for processes that are forked from this one do not meet others.
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
        """Return a pass.

        Args:
            number: Its number; that of a state wins.
            state: Where to begin; None: at the start.
            transfer: The way to the device, if elements are to be sent there ahead of their use.
        """
        ranks, processes = self._rank_shard(), _worker_shard()
        parts = [ranks.count, ranks.index, processes.count, processes.index]
        start = taken = failed = 0
        if state is not None:
            number, start, taken = state["pass"], state["start"], state["taken"]
            failed = state.get("failed", 0)
            if state["parts"] != parts:
                start, taken = _elements_read_by_all(state), 0
        plan = self._shard_plan(ranks, processes, start)
        self._warn_once(plan, ranks, processes)
        if state is None and get_worker_info() is not None:
            number = self._worker_epoch_number(number)
        plan = self._add_prefetch(plan, transfer)
        elements = LookaheadIterator(plan, number, for_training=True)
        if state is None:
            if processes.count > 1 and ranks.count == 1 and self._needs_seed():
                info = get_worker_info()
                elements.set_state(_initial_state(plan, info.seed - info.id, number))
        elif state["parts"] == parts:
            elements.set_state(state["place"])
        else:
            seed, fixed = state["place"]["seed"], state["place"].get("fixed_seeds")
            elements.set_state(_initial_state(plan, seed, number, fixed))
        return OpenedEpoch(elements, elements.epoch, parts, start, taken, failed)

    def _worker_epochs(self) -> list[WorkerEpochs]:
        """Return where worker processes count what they read of shared jobs.

        It is made before there are any, so that they inherit it.
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
        least = next_iteration_number(self._dataset.plan, max(number, self._min_number))
        begun = [each.begin(info.seed - info.id, info.id, least) for each in self._worker_epochs()]
        return max(begun, default=number)

    def _shard_plan(self, ranks: DataShard, processes: DataShard, start: int) -> Node:
        plan: Node = self._dataset.plan
        seed = self._agree_on_seed(ranks)
        if seed is not None:
            plan = WithOptions(input=plan, options=Options(seed=seed))
        return shard_plan(plan, ranks, processes, drop_remainder=self._drop_remainder, start=start)

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
        """Return which part of the dataset is this rank's, as things are now."""
        if self._pickled_rank_shard is not None:
            return self._pickled_rank_shard
        if isinstance(self._shard, DataShard):
            return self._shard
        if not self._shard or reads_data_service(self._dataset.plan) or not _has_process_group():
            return WHOLE_DATASET
        if self._dataset.options().auto_shard_policy is AutoShardPolicy.OFF:
            return WHOLE_DATASET
        here = DataShard(distributed.get_world_size(), distributed.get_rank())
        return (
            WHOLE_DATASET
            if here.count == 1 or is_sharded_manually(self._dataset.plan, here)
            else here
        )

    def _needs_seed(self) -> bool:
        return self._dataset.options().seed is None and not reads_data_service(self._dataset.plan)

    def _agree_on_seed(self, ranks: DataShard) -> int | None:
        """Return the seed that all ranks draw from; None: the dataset's own, or there is one rank.

        Whoever asks first draws it, so nobody waits for anybody.
        """
        if ranks.count == 1 or not self._needs_seed():
            return None
        if self._job_seed is None and _has_process_group() and get_worker_info() is None:
            store = distributed.distributed_c10d._get_default_store()
            self._job_seed = int(store.compare_set(_SEED_KEY, "", str(draw_seed())))
        if self._job_seed is None and draws_without_seed(self._dataset.plan):
            raise FailedPreconditionError(
                "parts of a dataset belong together only where all ranks draw the same order, and "
                "this process cannot ask the others for a seed: give `shuffle` a seed, or the "
                "dataset Options(seed=...); or make the loader after init_process_group"
            )
        return self._job_seed

    def _warn_once(self, plan: Node, ranks: DataShard, processes: DataShard) -> None:
        """Say once, on one rank, what of the sharing its user may not expect."""
        if self._was_warned or ranks.index or processes.index:
            return
        self._was_warned = True
        if may_end_at_different_steps(self._dataset.plan, ranks):
            _log.warning(
                "the options of the dataset give each of the %s ranks files or shards of its own, "
                "so they may end at different steps, and one that waits for another would wait for "
                "ever: use repeat() and a fixed number of steps, or "
                "torch.distributed.algorithms.Join",
                ranks.count,
            )
        step = find_repeated_step(plan) if ranks.count * processes.count > 1 else ""
        if step:
            _log.warning(
                "%s runs for all elements in each of the %s processes that share the dataset, for "
                "its place in the order is known only by reading: give each its own files "
                "(AutoShardPolicy.FILE), call shard() before it, or read from a data service",
                step,
                ranks.count * processes.count,
            )

    def __getstate__(self) -> dict[str, Any]:
        ranks = self._rank_shard()
        self._agree_on_seed(ranks)
        # Where no ranks are known yet, whoever gets it asks for them.
        settled = self._pickled_rank_shard or self._shard is not True or _has_process_group()
        return dict(
            self.__dict__,
            _dataset=dump_plan(self._dataset.plan),
            _pickled_rank_shard=ranks if settled else None,
            _epochs=self._worker_epochs() if is_spawning() else None,
            _min_number=next_iteration_number(self._dataset.plan) if is_spawning() else 0,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _dataset=Dataset(load_plan(state["_dataset"])))


class DistributedDatasetEpochs:
    """Passes over a distributed dataset, which shares and reads ahead by itself."""

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
        """Return a pass, as `DatasetEpochs.open`; elements are sent when their turn comes."""
        if get_worker_info() is not None:
            raise FailedPreconditionError(
                "a distributed dataset is read in the process of its strategy: use num_workers=0, "
                "or iterate over the loader itself"
            )
        if state is not None:
            number = state["pass"]
            if state["parts"]:
                raise FailedPreconditionError(
                    "the state was taken of a dataset that no strategy had distributed"
                )
        elements = self._dataset.open_epoch(number)
        if state is not None:
            elements.set_state(state["place"])
        known = state or {}
        return OpenedEpoch(elements, number, [], 0, known.get("taken", 0), known.get("failed", 0))


def _has_process_group() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def _worker_shard() -> DataShard:
    """Return which worker process of a DataLoader this is."""
    info = get_worker_info()
    return WHOLE_DATASET if info is None else DataShard(info.num_workers, info.id)


def _initial_state(
    plan: Node, seed: int, number: int, seeds_of_fixed_steps: list[int] | None = None
) -> dict[str, Any]:
    """Return the state in which an iterator begins a pass as one of another process does."""
    state = {"version": VERSION, "plan": identity(plan), "seed": seed, "epoch": number}
    state["position"] = {"stream": None}
    seeds_of_fixed_steps = (
        collect_fixed_seeds(plan) if seeds_of_fixed_steps is None else seeds_of_fixed_steps
    )
    return state | {"fixed_seeds": seeds_of_fixed_steps} if seeds_of_fixed_steps else state


def _elements_read_by_all(state: dict[str, Any]) -> int:
    """Return how many elements all ranks had read where a state was taken by others.

    Raises:
        FailedPreconditionError: The state does not say so.
    """
    if not state["parts"]:
        raise FailedPreconditionError(
            "the state was taken of a dataset that a strategy had distributed"
        )
    count, rank, workers, worker = state["parts"]
    if workers != 1:
        raise FailedPreconditionError(
            f"the state is that of worker process {worker} of {workers} of a DataLoader, on rank "
            f"{rank} of {count}, and only that process goes on from it: use as many ranks and "
            "workers"
        )
    if state.get("failed"):
        raise FailedPreconditionError(
            f"{state['failed']} elements failed on rank {rank} of {count} before the state was "
            "taken, so it does not say what the ranks had read together: use as many ranks, each "
            "from its own state; or begin the pass again"
        )
    return int(state["start"] + state["taken"] * count)
