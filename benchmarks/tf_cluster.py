"""Workers and parameter servers of tf.distribute, each in its own process.

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
    """Start the tasks, which end when `stack` closes; return their addresses by task type."""
    with ExitStack() as open_ports:
        cluster = {
            kind: [_free_address(open_ports) for _ in range(number)]
            for kind, number in (("worker", workers), ("ps", servers))
        }
    for kind, addresses in cluster.items():
        for index in range(len(addresses)):
            # The context manager closes standard input on exit, which ends the task.
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
    # Ports stay open until all are chosen, so that none is chosen twice.
    port = open_ports.enter_context(socket.socket())
    port.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{port.getsockname()[1]}"


def _serve(cluster: str, kind: str, index: str) -> None:
    import tensorflow as tf

    server = tf.distribute.Server(
        json.loads(cluster), job_name=kind, task_index=int(index), protocol="grpc", start=True
    )
    sys.stdin.read()
    # The server cannot be stopped, and there is no state to save.
    del server
    os._exit(0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
