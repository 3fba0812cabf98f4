"""How much memory does a large embedding take in the coordinator and in the workers?

    python -m benchmarks.keras_embedding_memory [--rows 100000000] [--used 1000000]

Trains `keras.layers.Embedding(rows, 16)` under a `ParameterServerStrategy` of two workers and two
servers, all of them processes of this machine, on batches that use so many distinct ids in all.
The same model with 1,000 rows is trained on batches of the same size. The figures are the highest
resident memory of the coordinator and of the larger worker, after `fit`, `evaluate`, `summary` and
`save`.
"""
# ruff: noqa: PLC0415  (Keras is imported where its back end is known)

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["main"]

DIM, BATCH, IDS = 16, 4096, 8
FEW = 1_000


def memory(what: str) -> float:
    """Return the memory of this process in MB: VmHWM, the highest, or VmRSS, that of now."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(what))
    return int(line.split()[1]) / 1024


def train(rows: int, used: int) -> dict[str, Any]:
    """Train a model in this process and its workers; return the memory of each kind of process."""
    import keras

    import headrace as hr

    distinct = np.random.default_rng(0).permutation(min(used, rows)) * (rows // min(used, rows))
    ids = np.resize(distinct, (-(-used // IDS), IDS)).astype(np.int32)
    labels = (ids.sum(1, keepdims=True) / rows).astype(np.float32)
    data = hr.Dataset.from_tensor_slices((ids, labels)).batch(BATCH, drop_remainder=True)
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((IDS,), dtype="int32"),
                    keras.layers.Embedding(rows, DIM),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.Adagrad(0.1), "mse")
        model.fit(data, epochs=1, verbose=0)
        model.evaluate(data.take(4), verbose=0)
        model.summary(print_fn=lambda *_, **__: None)
        with tempfile.TemporaryDirectory() as folder:
            model.save(os.path.join(folder, "model.keras"))
        with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
            workers = coordinator.create_per_worker_values(lambda: memory("VmHWM"))
            highest = max(
                coordinator.fetch(
                    [coordinator.schedule(lambda value: value, (workers,)) for _ in range(8)]
                )
            )
        table = getattr(model.layers[0].embeddings, "table", None)
        made = sum(len(part) for part, _ in table.export()) if table is not None else rows
        own = memory("VmHWM")
        strategy.close()
    return {"coordinator": own, "worker": highest, "rows on servers": made}


def main(arguments: Sequence[str]) -> None:
    """Print the memory of both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--used", type=int, default=10**6)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.of is not None:
        print(json.dumps(train(given.of, given.used)))
        return
    found = {}
    for rows in (FEW, given.rows):
        command = [sys.executable, "-m", "benchmarks.keras_embedding_memory", "--of", str(rows)]
        done = subprocess.run(
            [*command, "--used", str(given.used)], check=True, stdout=subprocess.PIPE, text=True
        )
        found[rows] = json.loads(done.stdout.splitlines()[-1])
        print(f"{rows:>11,} rows: {found[rows]}")
    for process in ("coordinator", "worker"):
        print(f"{process}: {found[given.rows][process] - found[FEW][process]:+.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
