"""Arguments of input functions, and options of distributed datasets: plain records."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.arguments import check_flag, check_int
from headrace.frameworks.batch_shards import check_remainder

__all__ = [
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "ValueContext",
]


@dataclass(frozen=True)
class InputContext:
    """Index of an input pipeline, number of pipelines, and number of replicas.

    >>> context = hr.distribute.InputContext(2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16
    >>> dataset = hr.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)
    >>> [int(x) for x in dataset]
    [1, 3, 5]

    Attributes:
        num_input_pipelines: Number of input pipelines, one per worker.
        input_pipeline_id: From 0 to `num_input_pipelines - 1`.
        num_replicas_in_sync: Number of replicas of all workers.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        check_int("num_input_pipelines", self.num_input_pipelines, minimum=1)
        last = self.num_input_pipelines - 1
        check_int("input_pipeline_id", self.input_pipeline_id, minimum=0, maximum=last)
        check_int("num_replicas_in_sync", self.num_replicas_in_sync, minimum=1)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Raises:
            ValueError: If the global batch size is not a multiple of the number of replicas.
        """
        size = check_int("global_batch_size", global_batch_size, minimum=1)
        if size % self.num_replicas_in_sync:
            raise ValueError(
                f"The global_batch_size {size} is not divisible by num_replicas_in_sync "
                f"{self.num_replicas_in_sync}; choose a multiple of it"
            )
        return size // self.num_replicas_in_sync

    @property
    def num_replicas_per_pipeline(self) -> int:
        """Number of replicas that one pipeline feeds.

        Raises:
            ValueError: If workers would have different numbers of them.
        """
        count, remainder = divmod(self.num_replicas_in_sync, self.num_input_pipelines)
        if remainder:
            raise ValueError(
                "every worker must have the same number of replicas, but num_replicas_in_sync "
                f"({self.num_replicas_in_sync}) is not a multiple of num_workers "
                f"({self.num_input_pipelines})"
            )
        return count

    def __str__(self) -> str:
        return (
            f"hr.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@dataclass(frozen=True)
class ValueContext:
    """Index of the replica that a value is for, and number of replicas.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> value = strategy.distribute_values_from_function(
    ...     lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    ... )
    >>> [replica.values for replica in value]
    [(0, 1), (2, 2)]
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"hr.distribute.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


class InputReplicationMode(enum.Enum):
    """Number of calls of an input function.

    >>> mode = hr.distribute.InputReplicationMode.PER_REPLICA
    >>> options = hr.distribute.InputOptions(experimental_replication_mode=mode)
    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_datasets_from_function(
    ...     lambda context: hr.Dataset.range(4).batch(2), options
    ... )
    >>> [rows.tolist() for rows in next(iter(dataset)).values]
    [[0, 1], [0, 1]]
    """

    PER_WORKER = "PER_WORKER"
    """Once per worker; its replicas receive elements in turn."""
    PER_REPLICA = "PER_REPLICA"
    """Once per replica; each replica reads a separate dataset."""


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options for distributing a dataset; they apply only to the call that receives them.

    >>> options = hr.distribute.InputOptions(experimental_per_replica_buffer_size=4)
    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset(hr.Dataset.range(8).batch(4), options)
    >>> len(list(dataset))
    2

    Attributes:
        experimental_fetch_to_device: Whether values are put on the replicas' devices; None is
            True. Has no effect on the CPU.
        experimental_replication_mode: Once per worker or per replica; only for
            `distribute_datasets_from_function`.
        experimental_place_dataset_on_device: Accepted with PER_REPLICA, as in tf.distribute.
        experimental_per_replica_buffer_size: Batches read ahead for each replica; 0 disables
            it.
        global_arrays: Whether a step returns JAX arrays over the strategy's mesh, split by
            rows, instead of a `PerReplica` for each leaf. For a strategy with
            `framework="jax"`.
        remainder: Handling of steps in which replicas have different numbers of rows, which a
            global array cannot hold: "error"; "pad", which appends rows of zeros and adds a leaf
            `mask` that is True for rows of data; or "drop", which skips the step.
        split: "ceil" splits each batch into pieces of ceil(rows / replicas): the last replicas
            get fewer rows, possibly none. "balanced" joins remaining rows to the next batch, so
            that pieces differ by at most one row, and every replica gets rows over time.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    split: str = "ceil"
    global_arrays: bool = False
    remainder: str = "error"

    def __post_init__(self) -> None:
        check_flag("experimental_fetch_to_device", self.experimental_fetch_to_device)
        place_on_device = self.experimental_place_dataset_on_device
        check_flag("experimental_place_dataset_on_device", place_on_device, or_none=False)
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise TypeError(
                "`experimental_replication_mode` must be an InputReplicationMode, but got "
                f"{self.experimental_replication_mode!r}"
            )
        check_int(
            "experimental_per_replica_buffer_size",
            self.experimental_per_replica_buffer_size,
            minimum=0,
        )
        if self.split not in ("ceil", "balanced"):
            raise ValueError(f'`split` must be "ceil" or "balanced", but got {self.split!r}')
        check_flag("global_arrays", self.global_arrays, or_none=False)
        check_remainder(self.remainder)
        if self.global_arrays and self.experimental_fetch_to_device is False:
            raise ValueError(
                "`global_arrays=True` puts arrays on devices, but `experimental_fetch_to_device` "
                "is False"
            )
        if self.remainder != "error" and not self.global_arrays:
            raise ValueError(
                f"`remainder={self.remainder!r}` requires `global_arrays=True`; a PerReplica may "
                "hold different numbers of rows"
            )

    @property
    def is_per_replica(self) -> bool:
        """Whether each replica reads a separate dataset."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
