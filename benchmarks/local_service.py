"""A Headrace data service of worker processes on this host, shared by many benchmarks."""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.workload import Pipeline

__all__ = ["local_service"]


def local_service(
    dataset: Callable[[Path], Any], *, workers: int = 1, mode: str = "DYNAMIC", **options: Any
) -> Callable[[Path, ExitStack], Pipeline]:
    """Return the `build` function of a contender that reads a dataset through worker processes.

    Args:
        dataset: Returns the dataset, given the directory of input files.
        workers: Number of worker processes.
        mode: Name of the sharding policy.
        options: Further arguments of `distribute`.
    """

    def build(inputs: Path, stack: ExitStack) -> Pipeline:
        import headrace as hr

        cluster = stack.enter_context(hr.service.LocalCluster(num_workers=workers, processes=True))
        policy = hr.service.ShardingPolicy[mode]
        remote = dataset(inputs).apply(hr.service.distribute(policy, cluster.target, **options))
        return lambda: iter(remote)

    return build
