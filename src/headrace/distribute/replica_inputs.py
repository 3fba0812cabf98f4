"""Devices and workers of a strategy, and the input of its replicas.

Multi-worker strategies override what describes the workers: `first_replica`,
`num_replicas_in_sync`, `_input_context`, and the agreement of workers (`_agreement`, `_seed_for`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from headrace.arguments import check_callable, check_instance
from headrace.cluster.resolver import ClusterResolver
from headrace.data.dataset import Dataset
from headrace.distribute.agreement import StepAgreement
from headrace.distribute.batch_inputs import global_batch_size
from headrace.distribute.dataset import (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    ReplicaDataset,
)
from headrace.distribute.execution_context import check_cross_replica
from headrace.distribute.input_context import InputContext, InputOptions, ValueContext
from headrace.distribute.iterator import (
    DevicePlacement,
    GlobalArrayPlacement,
    HostPlacement,
    StepPlacement,
)
from headrace.distribute.values import regroup
from headrace.frameworks.framework import Device, Framework
from headrace.frameworks.numpy import FRAMEWORK as NUMPY

__all__ = ["ReplicaInputs"]


class ReplicaInputs:
    """Base class of strategies that distributes datasets and values to replicas.

    Args:
        devices: Names of the devices of this process's replicas.
        framework: Framework of the devices and of the replicas' values.
    """

    def __init__(self, devices: Sequence[str], framework: Framework = NUMPY) -> None:
        self._devices = tuple(devices)
        #: Framework of the replicas' arrays.
        self.framework = framework
        #: The framework's objects for the devices.
        self.framework_devices: tuple[Device, ...] = tuple(map(framework.device, devices))

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of all workers."""
        return len(self._devices)

    @property
    def first_replica(self) -> int:
        """Index of this process's first replica among those of all workers."""
        return 0

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of this process's replicas."""
        return self._devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Resolver that provides the addresses of the workers; None with one worker."""
        return None

    def _input_context(self) -> InputContext:
        return InputContext(1, 0, self.num_replicas_in_sync)

    def _agreement(self, batch_size: int | None = None) -> Callable[[], StepAgreement] | None:
        """Return a factory of agreements, one per iterator over a dataset; None with one worker.

        Args:
            batch_size: Batch size of the dataset, the same on all workers; None if unknown.
        """
        return None

    def _seed_for(self, dataset: Dataset) -> int | None:
        """Return the seed for datasets without one; None lets each draw a seed."""
        return None

    def _check_options(self, options: InputOptions) -> None:
        """Raise NotImplementedError for options that this strategy does not support."""

    def mesh_devices(self) -> tuple[Device, ...]:
        """Return the devices of the replicas of all workers, in replica order."""
        return self.framework_devices

    def distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Divide each batch of a dataset among the replicas.

        >>> import headrace as hr
        >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> steps = strategy.distribute_dataset(hr.Dataset.range(6).batch(4))
        >>> [[value.tolist() for value in step.values] for step in steps]
        [[[0, 1], [2, 3]], [[4], [5]]]

        Args:
            dataset: A dataset of global batches. With one replica, elements of any kind.
            options: Options of the distribution.

        Raises:
            InvalidArgumentError: If its elements are not batches, or there are fewer files than
                workers.
        """
        check_cross_replica(self, "distribute_dataset")
        checked = _check_input_options(options)
        if not isinstance(dataset, Dataset):
            raise TypeError(_not_a_dataset_message(dataset))
        if checked.is_per_replica:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in "
                "distribute_datasets_from_function"
            )
        context = self._input_context()
        size = global_batch_size(dataset.plan)
        rows_per_replica = None if size is None else -(-size // context.num_replicas_in_sync)
        placement = self._step_placement(checked, rows_per_replica)
        seed = self._seed_for(dataset)
        agreement = self._agreement(size)
        return DistributedDataset(dataset, context, checked, agreement, seed, placement)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDatasetsFromFunction:
        """Distribute elements of the dataset that a function creates for this worker.

        The dataset is neither rebatched nor sharded: the function does both, as its argument says.

        Args:
            dataset_fn: Called once with an `InputContext`. With PER_REPLICA, it is called once for
                each replica, and each replica reads a separate dataset.
            options: Options of this call.
        """
        check_cross_replica(self, "distribute_datasets_from_function")
        check_callable("dataset_fn", dataset_fn)
        checked = _check_input_options(options)
        self._check_options(checked)
        context = self._input_context()
        if checked.experimental_place_dataset_on_device:
            if not checked.is_per_replica:
                raise ValueError(
                    "When `experimental_place_dataset_on_device` is set, you must also specify "
                    "`experimental_replication_mode=InputReplicationMode.PER_REPLICA`"
                )
            if checked.experimental_fetch_to_device is not False:
                raise ValueError(
                    "`experimental_place_dataset_on_device` can not be set to True when "
                    "`experimental_fetch_to_device` is True and the replication mode is PER_REPLICA"
                )
        if not checked.is_per_replica:
            return DistributedDatasetsFromFunction(
                [dataset_fn(context)], context, self._agreement(), self._step_placement(checked)
            )
        count = context.num_replicas_in_sync
        contexts = [InputContext(count, self.first_replica + i, count) for i in range(count)]
        datasets = [dataset_fn(each) for each in contexts]
        return DistributedDatasetsFromFunction(
            datasets, context, placement=self._step_placement(checked)
        )

    def _gather_row_counts(self, rows: list[int]) -> list[int]:
        """Return the row counts of all replicas in a step, given those of the local replicas."""
        return rows

    def _step_placement(self, options: InputOptions, size: int | None = None) -> StepPlacement:
        """Return the conversion and placement of the replicas' rows."""
        if options.global_arrays:
            return GlobalArrayPlacement(
                self.framework,
                self.mesh_devices(),
                options.remainder,
                self._gather_row_counts,
                size,
            )
        if self.framework.uses_host_memory or options.experimental_fetch_to_device is False:
            return HostPlacement()
        return DevicePlacement(self.framework, self.framework_devices)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Call a function once for each local replica, and return a `PerReplica` of the results.

        Args:
            value_fn: Called with a `ValueContext`, once per replica of this process.
        """
        check_cross_replica(self, "distribute_values_from_function")
        check_callable("value_fn", value_fn)
        count = self.num_replicas_in_sync
        replica_ids = range(self.first_replica, self.first_replica + len(self._devices))
        settings, values = self.framework.thread_settings(), []
        for replica_id, device in zip(replica_ids, self.framework_devices, strict=True):
            with self.framework.replica_context(device, settings) or nullcontext():
                values.append(value_fn(ValueContext(replica_id, count)))
        return regroup(values, always_wrap=self._wraps_single_values())

    def _wraps_single_values(self) -> bool:
        """Return whether values from a function become `PerReplica`s even with one replica."""
        return True

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function


def _check_input_options(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    check_instance("options", options, InputOptions)
    return options


def _not_a_dataset_message(value: Any) -> str:
    if isinstance(value, ReplicaDataset):
        return (
            f"Invalid dataset. {value!r} is already distributed: iterate over it, or pass the "
            "Dataset that was distributed"
        )
    if inspect.isfunction(value):
        return (
            "Invalid dataset. Expected a Dataset object but got a function: for a function that "
            "returns a Dataset use distribute_datasets_from_function"
        )
    return (
        f"Invalid dataset. Expected a Dataset object but got {type(value).__name__}: create one "
        "with Dataset.from_tensor_slices (arrays), Dataset.from_generator (a generator) or "
        "hr.torch.from_torch (a PyTorch dataset); for one value per replica use "
        "distribute_values_from_function"
    )
