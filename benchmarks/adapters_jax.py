"""Cost of placing batches on JAX devices.

A shuffled array is read in batches of 9.4 MB onto one CPU device, or as arrays sharded over eight;
the reader waits until each batch is on its devices. "By hand" calls `jax.device_put` for each batch
of the same dataset with a prefetch of two.
"""
# ruff: noqa: PLC0415  (a contender imports its own framework: see workload.py, rule 3)

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Contender, Elements, Pipeline, Target, Workload, expect

__all__ = ["WORKLOADS"]

ROWS, BATCH, SIDE = 1024, 256, 96


def _check(batches: Elements) -> None:
    import jax

    seen = []
    for batch in islice(batches, ROWS // BATCH):
        expect(isinstance(batch, jax.Array), f"a batch is a {type(batch).__name__}")
        expect(batch.shape == (BATCH, SIDE, SIDE), f"a batch has shape {batch.shape}")
        seen += np.asarray(batch[:, 0, 0]).tolist()
    expect(sorted(seen) == list(range(ROWS)), "the first epoch is not every row once")


def _rows(_: Any) -> int:
    return BATCH


def _build(devices: int, by_hand: bool) -> Callable[[Path, ExitStack], Pipeline]:
    def build(_: Path, __: ExitStack) -> Pipeline:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        import headrace as hr

        rows = np.empty((ROWS, SIDE, SIDE), np.float32)
        rows[:] = np.arange(ROWS)[:, None, None]
        dataset = hr.Dataset.from_tensor_slices(rows).shuffle(ROWS).batch(BATCH).repeat()
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

        def put() -> Iterator[Any]:
            with iter(dataset.prefetch(2)) as batches:
                for batch in batches:
                    yield jax.block_until_ready(jax.device_put(batch, sharding))

        def device_iterator() -> Iterator[Any]:
            with hr.jax.device_iterator(dataset, sharding) as batches:
                for batch in batches:
                    yield jax.block_until_ready(batch)

        return put if by_hand else device_iterator

    return build


def _workload(name: str, devices: int) -> Workload:
    return Workload(
        name=name,
        unit="rows",
        contenders=(
            Contender(
                name="headrace", build=_build(devices, False), needs=("jax",), role="headrace"
            ),
            Contender(name="by hand", build=_build(devices, True), needs=("jax",)),
        ),
        check=_check,
        consume=_rows,
        targets=(Target(of=("by hand",), at_least=0.95),),
        repeated=True,
        item_bytes=SIDE * SIDE * 4,
    )


WORKLOADS = (
    _workload("JAX, batches on one device", 1),
    _workload("JAX, batches on eight devices", 8),
)
