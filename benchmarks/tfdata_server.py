"""A tf.data service in separate processes: a dispatcher and workers.

`python -m benchmarks.tfdata_server` prints its address and serves until standard input closes. It
has one worker in the same process; with `--dispatcher`, none. With `--worker ADDRESS`, it is
another worker of that dispatcher.
"""
# ruff: noqa: PLC0415  (only the serving process loads TensorFlow)

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

__all__ = ["start_process", "start_tf_data_service"]

#: Milliseconds between heartbeats, without one after which a worker is lost, and between checks of
#: that. By default the dispatcher checks every ten minutes, for which clients would wait.
_HEARTBEAT_MS, _TIMEOUT_MS, _CHECK_MS = 100, 1000, 200


def start_tf_data_service(stack: ExitStack) -> str:
    """Start the service, which ends when `stack` closes; return its address, "grpc://host:port"."""
    return start_process(stack)[0]


def start_process(stack: ExitStack, *arguments: str) -> tuple[str, subprocess.Popen[str]]:
    """Start a process of a service, which ends when `stack` closes; return its address, and it."""
    # The context manager closes standard input on exit, which ends the server.
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tfdata_server", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        raise RuntimeError("the process of the tf.data service ended before it printed its address")
    return address, process


def _serve(arguments: list[str]) -> None:
    from tensorflow.data.experimental import service

    servers = []
    if arguments[:1] == ["--worker"]:
        target = arguments[1]
    else:
        alone = arguments == ["--dispatcher"]
        config = service.DispatcherConfig(
            worker_timeout_ms=_TIMEOUT_MS if alone else None,
            job_gc_check_interval_ms=_CHECK_MS if alone else None,
        )
        servers.append(service.DispatchServer(config))
        target = servers[0].target
    if arguments != ["--dispatcher"]:
        interval = _HEARTBEAT_MS if arguments else None
        servers.append(
            service.WorkerServer(
                service.WorkerConfig(
                    dispatcher_address=target.split("://")[1], heartbeat_interval_ms=interval
                )
            )
        )
    print(target, flush=True)
    sys.stdin.read()
    # The servers would wait for clients that have ended; there is no state to save.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1:])
