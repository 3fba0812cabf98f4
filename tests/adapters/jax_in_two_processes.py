"""One of two processes of a JAX program on loopback; `test_jax.py` starts both.

    python jax_in_two_processes.py PROCESS PORT FOLDER PORT_OF_WORKERS

Prints a JSON value for each scenario. Each process has 4 devices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import headrace as hr

PROCESS, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
PORT_OF_WORKERS = sys.argv[4]


def over(*shape: int, across: bool = False) -> NamedSharding:
    devices = np.array(jax.devices())
    # With `across`, each row of the mesh has devices of both processes (tensor parallelism).
    devices = devices.reshape(2, 4).T.reshape(shape) if across else devices.reshape(shape)
    return NamedSharding(Mesh(devices, ("data", "model")[: len(shape)]), P("data"))


def files() -> hr.Dataset:
    """Return a dataset of two files with 12 and 20 lines."""
    names = [str(FOLDER / name) for name in ("a.txt", "b.txt")]
    lines = hr.Dataset.from_tensor_slices(names).interleave(hr.TextLineDataset, cycle_length=1)
    return lines.map(lambda line: np.int32(int(line)))


def local_rows(array: jax.Array) -> list[Any]:
    """Return the local rows of an array, with their row numbers in the whole array."""
    found = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        found[start] = np.asarray(shard.data).tolist()
    return sorted(found.items())


def attempt(read: Any) -> Any:
    try:
        return read()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read_all(dataset: hr.Dataset, sharding: NamedSharding, **options: str) -> list[Any]:
    iterator = hr.jax.device_iterator(dataset, sharding, **options)
    return [[leaf.shape, *map(local_rows, jax.tree.leaves(leaf))] for leaf in iterator]


def whole_rows(dataset: hr.Dataset, sharding: NamedSharding) -> list[Any]:
    """Return whole arrays, gathered by a program over both processes."""
    everywhere = NamedSharding(sharding.mesh, P())
    gather = jax.jit(lambda x: x, out_shardings=everywhere)
    iterator = hr.jax.device_iterator(dataset, sharding)
    return [np.asarray(gather(batch)).tolist() for batch in iterator]


def padded_files() -> list[Any]:
    iterator = hr.jax.device_iterator(files().batch(8), over(8), remainder="pad")
    return [[x.shape, local_rows(x), local_rows(mask)] for x, mask in iterator]


def refuse_14(x: np.ndarray) -> np.ndarray:
    if 14 in x and PROCESS == 1:
        raise ValueError("fourteen")
    return x


def closed_by_one() -> Any:
    iterator = hr.jax.device_iterator(files().batch(8), over(8), 0)
    if PROCESS == 1:
        next(iterator)
        iterator.close()
        return "closed"
    return attempt(lambda: len(list(iterator)))


def read_separately() -> Any:
    """Read a dataset on devices of this process only; the other process reads another one."""
    mine = NamedSharding(Mesh(np.array(jax.local_devices()), ("data",)), P("data"))
    return [len(list(hr.jax.device_iterator(hr.Dataset.range(8 * (PROCESS + 1)).batch(8), mine)))]


def resumed() -> list[Any]:
    dataset = hr.Dataset.range(64).shuffle(64).batch(16)
    first = hr.jax.device_iterator(dataset, over(8))
    seen = [local_rows(next(first)), local_rows(next(first))]
    state = first.get_state()
    rest = [local_rows(each) for each in first]
    second = hr.jax.device_iterator(dataset, over(8))
    second.set_state(state)
    return [seen, rest, [local_rows(each) for each in second]]


def real_rows(iterator: Any) -> list[int]:
    """Return the rows of this process without padding."""
    pairs = (zip(flat_local_rows(x), flat_local_rows(mask), strict=True) for x, mask in iterator)
    return [row for step in pairs for row, is_real in step if is_real]


def resharded() -> list[Any]:
    """Save a state of two file-reading processes and resume it in one, and vice versa."""
    mine = NamedSharding(Mesh(np.array(jax.local_devices()), ("data",)), P("data"))

    def iterator(sharding: NamedSharding) -> Any:
        return hr.jax.device_iterator(files().batch(8), sharding, remainder="pad")

    both, local = iterator(over(8)), iterator(mine)
    next(both)
    next(local)
    state, local_state = both.get_state(), local.get_state()
    assert state == both.get_state()
    rest, after, again = iterator(mine), iterator(over(8)), iterator(over(8))
    rest.set_state(state)
    after.set_state(local_state)
    first = real_rows([next(after)])
    again.set_state(after.get_state())
    return [state, real_rows(rest), first, real_rows(after), real_rows(again)]


def flat_local_rows(array: jax.Array) -> list[Any]:
    return [row for _, part in local_rows(array) for row in part]


def unordered_step() -> Any:
    unordered = hr.Dataset.range(16).map(abs, num_parallel_calls=2, deterministic=False).batch(8)
    return attempt(lambda: hr.jax.device_iterator(unordered, over(4, 2, across=True)))


def ragged() -> Any:
    lines = files().batch(8).map(lambda x: np.zeros((8, 1 + x[0] // 12)))
    return attempt(lambda: read_all(lines, over(8)))


def strategy_of_both() -> list[Any]:
    """Use a strategy whose first worker is the second JAX process."""
    addresses = [f"127.0.0.1:{PORT_OF_WORKERS}", "127.0.0.1:1"]
    resolver = hr.distribute.SimpleClusterResolver(
        hr.distribute.ClusterSpec({"worker": addresses}), task_type="worker", task_id=1 - PROCESS
    )
    devices = [f"cpu:{number}" for number in range(4)]
    strategy = hr.distribute.MultiWorkerMirroredStrategy(resolver, "jax", devices=devices)
    replica = hr.distribute.get_replica_context
    ids = strategy.compile(lambda: replica().replica_id_in_sync_group)()
    options = hr.distribute.InputOptions(global_arrays=True)
    (batch,) = strategy.distribute_dataset(hr.Dataset.range(8).batch(8), options)
    total = strategy.reduce("SUM", strategy.run(lambda: jax.numpy.ones(1 << 18)))
    found = [[int(each) for each in ids.values], local_rows(batch), float(total[-1])]
    return [*found, len(total.devices()), strategy._direct_allreduce._all_reduce is not None]


SCENARIOS = {
    "strategy over both processes": strategy_of_both,
    "array sharded by DATA": lambda: whole_rows(hr.Dataset.range(24).batch(8), over(8)),
    "over a 2-D mesh": lambda: read_all(hr.Dataset.range(16).batch(8), over(4, 2)),
    "tensor parallel over processes": lambda: read_all(
        hr.Dataset.range(16).shuffle(16).batch(8), over(4, 2, across=True)
    ),
    "shuffled without a seed": lambda: whole_rows(
        hr.Dataset.range(16).shuffle(16).batch(8), over(8)
    ),
    "partial batch": lambda: attempt(lambda: read_all(hr.Dataset.range(12).batch(8), over(8))),
    "files": lambda: read_all(files().take(24).batch(8), over(8), remainder="drop"),
    "files in worker processes": lambda: read_all(
        files().take(24).in_processes(1).batch(8), over(8), remainder="drop"
    ),
    "shuffled in worker processes": lambda: whole_rows(
        hr.Dataset.range(16).shuffle(16).map(np.negative).batch(8).in_processes(1), over(8)
    ),
    "files of unequal length": lambda: attempt(lambda: read_all(files().batch(8), over(8))),
    "files of unequal length, dropped": lambda: read_all(
        files().batch(8), over(8), remainder="drop"
    ),
    "files of unequal length, padded": padded_files,
    "too few files": lambda: attempt(
        lambda: read_all(hr.TextLineDataset(str(FOLDER / "a.txt")).map(int).batch(8), over(8))
    ),
    "one fails": lambda: attempt(lambda: read_all(files().batch(8).map(refuse_14), over(8))),
    "one closes": closed_by_one,
    "separate shardings": read_separately,
    "resumed": resumed,
    "resumed with other processes": resharded,
    "unordered step": unordered_step,
    "unequal lengths of the second axis": ragged,
}


def main() -> None:
    bind = {"coordinator_bind_address": f"127.0.0.1:{PORT}"} if PROCESS == 0 else {}
    jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, PROCESS, **bind)
    for name, scenario in SCENARIOS.items():
        print("scenario", json.dumps([name, scenario()]), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
