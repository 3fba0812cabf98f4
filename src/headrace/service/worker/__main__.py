"""A worker process, as `LocalCluster` starts it.

    python -m headrace.service.worker CONFIG LOG_TO LIFELINE

CONFIG is a JSON object of `WorkerConfig` arguments, LOG_TO the number of the descriptor that takes
over from standard output and error once the worker is ready, LIFELINE that of a pipe that closes
when whoever started it is gone (`process/parent_link.py`). SIGTERM lets it deliver what it has
first; a second one does not.
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


def main(text: str, log_to: int, lifeline: int) -> None:
    """Run a worker until the parent releases it."""
    die_with_parent(lifeline)
    config = WorkerConfig(**json.loads(text))
    for module in config.preload:
        try:
            preload(module)
        except ImportError as error:
            # One line, and not the import system's own frames.
            sys.exit(f"preload={module!r}: {error}; is its folder in sys.path, or PYTHONPATH?")
    ended = threading.Event()
    # Watched from the start: the parent may die while this waits for a dispatcher.
    set_when_stopped(ended, _STOP_SECONDS)
    server = WorkerServer(config)
    draining = threading.Event()

    def drain() -> None:
        server.drain()
        ended.set()

    def leave() -> None:
        if draining.is_set():
            ended.set()
        else:
            draining.set()
            threading.Thread(target=drain, name="headrace-drain", daemon=True).start()

    on_sigterm(leave)
    if config.hang_timeout:
        exit_when_hung(config.hang_timeout)
    # From here on what users' functions print goes where the parent's own words go.
    report_ready(server.address, log_to)
    ended.wait()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
