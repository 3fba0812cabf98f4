"""A tf.data service for the benchmarks: a dispatcher and a worker in a process of their own.

`python -m benchmarks.tfdata_server` prints its address and serves until standard input closes.
"""
# ruff: noqa: PLC0415  (only the serving process loads TensorFlow)

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

__all__ = ["start_tf_data_service"]


def start_tf_data_service(stack: ExitStack) -> str:
    """Start the service, to end with `stack`; returns its address, "grpc://host:port"."""
    # On leaving, its context manager closes standard input, upon which the server ends.
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tfdata_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        raise RuntimeError("the tf.data service did not start")
    return address


def _serve() -> None:
    import tensorflow as tf

    dispatcher = tf.data.experimental.service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(dispatcher_address=address)
    )
    print(dispatcher.target, flush=True)
    sys.stdin.read()
    # Its servers wait for clients that are gone; nothing here needs to be saved.
    del worker
    os._exit(0)


if __name__ == "__main__":
    _serve()
