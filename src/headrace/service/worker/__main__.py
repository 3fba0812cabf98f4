"""A worker process, as `LocalCluster` starts it: `python -m headrace.service.worker CONFIG`.

CONFIG is a JSON object of `WorkerConfig` arguments, and "log_to": the descriptor that takes over
from standard output and error once the worker is ready. One line on standard output says so, with
the address. The process ends when its standard input does: with whoever started it. SIGTERM lets it
deliver what it has first; a second one does not. After SIGTERM it ends with code `LEFT_CODE`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from types import FrameType

from headrace.service.config import WorkerConfig
from headrace.service.worker.server import LEFT_CODE, WorkerServer

__all__ = ["main"]

_STOP_SECONDS = 5.0


def main(text: str) -> None:
    """Run a worker until standard input ends."""
    options = json.loads(text)
    log_to = options.pop("log_to")
    config = WorkerConfig(**options)
    for module in config.preload:
        importlib.import_module(module)
    ended = threading.Event()
    # Watched from the start: the parent may die while this waits for a dispatcher.
    threading.Thread(target=_watch, args=(ended,), daemon=True).start()
    server = WorkerServer(config)
    draining = threading.Event()

    def drain() -> None:
        server.drain()
        ended.set()

    def leave(number: int, frame: FrameType | None) -> None:
        if draining.is_set():
            ended.set()
        else:
            draining.set()
            threading.Thread(target=drain, name="headrace-drain", daemon=True).start()

    signal.signal(signal.SIGTERM, leave)
    sys.stdout.write(json.dumps({"address": server.address}) + "\n")
    sys.stdout.flush()
    # From here on what users' functions print goes where the parent's own words go.
    os.dup2(log_to, 1)
    os.dup2(log_to, 2)
    os.close(log_to)
    ended.wait()
    server.stop()
    if draining.is_set():
        sys.exit(LEFT_CODE)


def _watch(ended: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ended.set()
    # A user's function that does not return must not keep the process.
    threading.Event().wait(_STOP_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
