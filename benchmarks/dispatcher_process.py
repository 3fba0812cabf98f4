"""A Headrace dispatcher in a separate process, which benchmarks can kill or measure.

`python -m benchmarks.dispatcher_process [DIRECTORY PORT]` prints its address when it listens, and
serves until standard input closes. With a directory it writes a journal there.
"""
# ruff: noqa: PLC0415  (only the serving process loads Headrace)

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

__all__ = ["start_dispatcher", "start_worker"]

_HOUR_MS = 3_600_000


def start_dispatcher(
    stack: ExitStack, directory: Path | None = None, port: int = 0
) -> tuple[subprocess.Popen[str], str]:
    """Start a dispatcher and wait until it listens; return its process and address.

    Closing `stack` kills the process.
    """
    arguments = [] if directory is None else [str(directory), str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.dispatcher_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        raise RuntimeError("the dispatcher process ended before it printed its address")
    return process, address


def start_worker(stack: ExitStack, dispatcher: str, *options: str) -> subprocess.Popen[bytes]:
    """Start a worker process of a dispatcher; closing `stack` kills it."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "headrace", "worker", "--dispatcher", dispatcher, "--port", "0",
            *options,
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _serve(arguments: list[str]) -> None:
    from headrace.service import DispatcherConfig, DispatchServer

    # Simulated peers send no heartbeats between rounds.
    config = DispatcherConfig(worker_timeout_ms=_HOUR_MS, client_timeout_ms=_HOUR_MS)
    if arguments:
        directory, port = arguments
        config = replace(config, port=int(port), work_dir=directory, fault_tolerant_mode=True)
    with DispatchServer(config) as server:
        print(server.target.removeprefix("tcp://"), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1:])
