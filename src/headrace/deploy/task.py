"""Task of a local cluster in a separate process, started by `LocalCluster`.

    python -m headrace.deploy.task CLUSTER TYPE INDEX LOG_TO LIFELINE

CLUSTER is a JSON object of addresses by type. LOG_TO is the number of the descriptor that replaces
standard output and error once the task is ready. LIFELINE is the number of a pipe's descriptor,
which closes when the parent process ends (`process/parent_link.py`). SIGTERM ends the task.
"""

from __future__ import annotations

import gc
import json
import sys
import threading

from headrace.deploy.server import Server
from headrace.process.parent_link import (
    bind_forked_children,
    die_with_parent,
    on_sigterm,
    report_ready,
    set_when_stopped,
)

__all__ = ["main"]

_STOP_SECONDS = 3.0


def main(cluster: str, job_name: str, task_index: int, log_to: int, lifeline: int) -> None:
    """Run a task until the parent releases it."""
    die_with_parent(lifeline)
    with bind_forked_children():
        _run(cluster, job_name, task_index, log_to)


def _run(cluster: str, job_name: str, task_index: int, log_to: int) -> None:
    ended = threading.Event()
    set_when_stopped(ended, _STOP_SECONDS)
    try:
        server = Server(json.loads(cluster), job_name, task_index)
    except (OSError, ValueError) as error:
        # A single line: it becomes the parent's message.
        sys.exit(f"{job_name} {task_index}: {error}")

    on_sigterm(ended.set)
    # Objects created so far are permanent: the garbage collector need not scan them again.
    gc.collect()
    gc.freeze()
    # From here on output of users' functions goes where the parent's output goes.
    report_ready(server.address, log_to)
    ended.wait()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
