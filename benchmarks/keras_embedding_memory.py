"""Memory of the coordinator and of the workers with a large embedding.

    python -m benchmarks.keras_embedding_memory [--rows 100000000] [--used 1000000]

Trains `keras.layers.Embedding(rows, 16)` under a `ParameterServerStrategy` of two workers and two
servers, all processes of this machine, on batches with `--used` distinct ids in total. The same
model with 1,000 rows is trained on batches of the same size. The figures are the peak resident
memory of the coordinator and of the larger worker, after `fit`, `evaluate`, `summary` and `save`.
"""
# ruff: noqa: PLC0415  (Keras is imported after its back end is set)

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
FEW_ROWS = 1_000


def memory(field: str) -> float:
    """Return the memory of this process in MiB: "VmHWM", the peak, or "VmRSS", the current."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) / 1024


def train(rows: int, used: int) -> dict[str, Any]:
    """Train a model in a local cluster; return the memory of the coordinator and of a worker."""
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
        created = sum(len(part) for part, _ in table.export()) if table is not None else rows
        peak = memory("VmHWM")
        strategy.close()
    return {"coordinator": peak, "worker": highest, "rows on servers": created}


def main(arguments: Sequence[str]) -> None:
    """Print the memory with both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--used", type=int, default=10**6)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.of is not None:
        print(json.dumps(train(options.of, options.used)))
        return
    found = {}
    for rows in (FEW_ROWS, options.rows):
        command = [sys.executable, "-m", "benchmarks.keras_embedding_memory", "--of", str(rows)]
        done = subprocess.run(
            [*command, "--used", str(options.used)], check=True, stdout=subprocess.PIPE, text=True
        )
        found[rows] = json.loads(done.stdout.splitlines()[-1])
        print(f"{rows:>11,} rows: {found[rows]}")
    for process in ("coordinator", "worker"):
        print(f"{process}: {found[options.rows][process] - found[FEW_ROWS][process]:+.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
