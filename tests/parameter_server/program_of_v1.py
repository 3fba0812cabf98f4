"""A worker program without a coordinator.

python -m tests.parameter_server.program_of_v1 SERVERS WORKERS TYPE ID

Prints the values after all programs have added to them.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import headrace as hr

REPLICAS = 2


def main(servers: str, num_workers: int, task_type: str, task_id: int) -> None:
    jobs = {"ps": servers.split(","), "chief": ["localhost:1"]}
    jobs["worker"] = [f"localhost:{number + 2}" for number in range(num_workers)]
    resolver = hr.distribute.SimpleClusterResolver(
        hr.distribute.ClusterSpec(jobs), task_type=task_type, task_id=task_id
    )
    strategy = hr.distribute.v1.ParameterServerStrategy(resolver, replicas=REPLICAS)
    with strategy.scope():
        # Only the chief's initial value is used.
        initial_value = 10.0 if strategy.is_chief else -1e6
        summed = hr.Variable(initial_value, name="summed", aggregation="SUM")
        first = hr.Variable(initial_value + 20.0, name="first", aggregation="ONLY_FIRST_REPLICA")
        ready = hr.Variable(0.0, name="ready")
        table = hr.EmbeddingTable(2, name="table", initializer="zeros")
    optimizer = hr.optimizers.SGD(1.0, name="table")
    strategy.run(lambda: (summed.assign_add(1.0), first.assign_add(1.0)))
    table.lookup([7])
    table.apply_gradients(optimizer, np.ones((1, 2), np.float32), [7])
    ready.assign_add(1.0)
    until = time.monotonic() + 60
    while ready.numpy() < num_workers + 1 and time.monotonic() < until:
        time.sleep(0.02)
    rows = table.gather([7])[0].tolist()
    print(float(summed.numpy()), float(first.numpy()), rows, optimizer.iterations, flush=True)
    ready.assign_add(1.0)
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
