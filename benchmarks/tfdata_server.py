"""A tf.data service, dispatcher and worker, in a separate process.

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
    """Start the service, which ends when `stack` closes; return its address, "grpc://host:port"."""
    # The context manager closes standard input on exit, which ends the server.
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
        raise RuntimeError("the process of the tf.data service ended before it printed its address")
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
    # The servers would wait for clients that have ended; there is no state to save.
    del worker
    os._exit(0)


if __name__ == "__main__":
    _serve()
