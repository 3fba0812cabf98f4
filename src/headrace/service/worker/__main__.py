"""Worker process, as started by `LocalCluster`.

    python -m headrace.service.worker CONFIG DRAIN_SECONDS LOG_TO LIFELINE

CONFIG is a JSON object of `WorkerConfig` arguments. DRAIN_SECONDS limits the delivery of output
after SIGTERM; "inf" is no limit. LOG_TO is the number of the file descriptor
that replaces standard output and error once the worker is ready. LIFELINE is that of a pipe that
closes when the parent process ends (`process/parent_link.py`). The first SIGTERM drains the worker;
a second one stops it at once.
"""

from __future__ import annotations

import json
import sys
import threading

from headrace.process.parent_link import (
    die_with_parent,
    exit_when_hung,
    on_sigterm,
    report_ready,
    set_when_stopped,
)
from headrace.service.config import WorkerConfig
from headrace.service.worker.preloading import preload
from headrace.service.worker.server import WorkerServer

__all__ = ["main"]

_STOP_SECONDS = 5.0


def main(config_json: str, drain_seconds: float, log_to: int, lifeline: int) -> None:
    """Run a worker until the parent releases it."""
    die_with_parent(lifeline)
    config = WorkerConfig(**json.loads(config_json))
    for module in config.preload:
        try:
            preload(module)
        except ImportError as error:
            # One line, without the frames of the import system.
            sys.exit(f"preload={module!r}: {error}; is its folder in sys.path or PYTHONPATH?")
    ended = threading.Event()
    # Watched from the start, because the parent may die while the worker waits for a dispatcher.
    set_when_stopped(ended, _STOP_SECONDS)
    server = WorkerServer(config)
    draining = threading.Event()

    def drain() -> None:
        server.drain(drain_seconds)
        ended.set()

    def handle_sigterm() -> None:
        if draining.is_set():
            ended.set()
        else:
            draining.set()
            threading.Thread(target=drain, name="headrace-drain", daemon=True).start()

    on_sigterm(handle_sigterm)
    if config.hang_timeout:
        exit_when_hung(config.hang_timeout)
    # From here on, output of user functions goes to the parent's standard output and error.
    report_ready(server.address, log_to)
    ended.wait()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
