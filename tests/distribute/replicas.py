"""Shared helpers: strategies of logical replicas, and lists of their values."""

from __future__ import annotations

from typing import Any

import headrace as hr
from headrace.distribute import (
    DistributedDataset,
    InputContext,
    InputOptions,
    MirroredStrategy,
    PerReplica,
)


def mirrored(replicas: int) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


def rows(value: Any) -> Any:
    """Return a value, or a list of the replicas' values, as lists."""
    if isinstance(value, PerReplica):
        return [each.tolist() for each in value.values]
    return value.tolist()


def steps_of(distributed: Any) -> list[Any]:
    return [rows(step) for step in distributed]


def split(dataset: hr.Dataset, replicas: int, options: InputOptions | None = None) -> list[Any]:
    return steps_of(mirrored(replicas).distribute_dataset(dataset, options))


def on_worker(
    dataset: hr.Dataset,
    worker: int,
    workers: int = 2,
    here: int = 1,
    options: InputOptions | None = None,
) -> list[Any]:
    context = InputContext(workers, worker, workers * here)
    return steps_of(DistributedDataset(dataset, context, options))


def with_policy(dataset: hr.Dataset, policy: str) -> hr.Dataset:
    options = hr.Options()
    options.auto_shard_policy = hr.distribute.AutoShardPolicy[policy]
    return dataset.with_options(options)


BALANCED = InputOptions(split="balanced")
