"""Workers and parameter servers of tf.distribute for the benchmarks, each a process.

`python -m benchmarks.tf_cluster CLUSTER TYPE INDEX` serves until standard input closes.
"""
# ruff: noqa: PLC0415  (only a serving process loads TensorFlow)

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

__all__ = ["start_tf_cluster"]


def start_tf_cluster(stack: ExitStack, *, workers: int, servers: int) -> dict[str, list[str]]:
    """Start the tasks, to end with `stack`; returns their addresses by type."""
    with ExitStack() as open_ports:
        cluster = {
            kind: [_free_address(open_ports) for _ in range(number)]
            for kind, number in (("worker", workers), ("ps", servers))
        }
    for kind, addresses in cluster.items():
        for index in range(len(addresses)):
            # On leaving, its context manager closes standard input, upon which the task ends.
            command = (sys.executable, "-m", __name__, json.dumps(cluster), kind, str(index))
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert process.stdout is not None
            stack.callback(process.stdout.close)
    return cluster


def _free_address(open_ports: ExitStack) -> str:
    # All are held until all are chosen, so that none is chosen twice.
    held = open_ports.enter_context(socket.socket())
    held.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{held.getsockname()[1]}"


def _serve(cluster: str, kind: str, index: str) -> None:
    import tensorflow as tf

    server = tf.distribute.Server(
        json.loads(cluster), job_name=kind, task_index=int(index), protocol="grpc", start=True
    )
    sys.stdin.read()
    # It cannot be stopped, and nothing here needs to be saved.
    del server
    os._exit(0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
