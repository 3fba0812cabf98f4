"""Write the checkpoint of format 1 that all later versions must restore.

python -m tests.parameter_server.write_checkpoint DIRECTORY
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

import headrace as hr
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from tests.parameter_server.small_cluster import cluster

IDS = np.array([1, -7, 2**40, 12])


def model() -> dict[str, Any]:
    """Return the objects of the checkpoint; call it in a strategy scope."""
    return {
        "w": hr.Variable(np.zeros((5, 2), np.float32), name="w"),
        "half": hr.Variable(np.zeros(3, ml_dtypes.bfloat16), name="half"),
        "count": hr.Variable(np.zeros((), np.int64), name="count"),
        "users": hr.EmbeddingTable(2, name="users", initializer="zeros", admission=2),
        "adam": hr.optimizers.Adam(0.1, name="adam"),
        "array": np.zeros(2),
        "step": 0,
        "name": "",
    }


def train(objects: dict[str, Any], step: int) -> None:
    """Take a step."""
    objects["users"].lookup(IDS[: 2 + step])
    gradients = [
        (np.full((5, 2), step + 1, np.float32), objects["w"]),
        (hr.IndexedSlices(np.ones((2, 2), np.float32), IDS[:2]), objects["users"]),
    ]
    objects["adam"].apply_gradients(gradients)
    objects["half"].assign_add(np.full(3, 0.5, ml_dtypes.bfloat16))
    objects["count"].assign_add(1)


def contents(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of variables and tables."""
    return {
        "w": objects["w"].read().tolist(),
        "half": objects["half"].read().astype(float).tolist(),
        "count": int(objects["count"].read()),
        "users": objects["users"].gather(IDS).tolist(),
        "iterations": objects["adam"].iterations,
    }


if __name__ == "__main__":
    with cluster(2, FixedShardsPartitioner(2)) as strategy:
        with strategy.scope():
            objects = model()
        checkpoint = hr.Checkpoint(**objects)
        with hr.CheckpointManager(checkpoint, sys.argv[1]) as manager:
            for step in range(2):
                train(objects, step)
                checkpoint.step, checkpoint.name = step + 1, f"step {step + 1}"
                checkpoint.array[...] = [step, np.inf]
                manager.save_increment()
        train(objects, 2)
        print(contents(objects))
