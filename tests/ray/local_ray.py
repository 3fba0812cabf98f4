"""Runs test cases on one local Ray cluster, in a network with loopback only.

Starting Ray takes seconds, and it listens at every address. So a file of cases runs in a process of
its own, started by one test. This module is also the pytest plugin of that process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.alone import HOST, on_loopback_alone

ROOT = Path(__file__).parents[2]
_WAIT_SECONDS = 60.0
_CASES_SECONDS = 500.0


def run_cases(name: str, *options: str) -> str:
    """Run the cases of a file of this directory; return what pytest printed.

    Args:
        name: Name of the file.
        *options: Further options of pytest.
    """
    return on_loopback_alone(
        [
            *("-m", "pytest", "-q", "-x", "-c", os.devnull, "--rootdir", str(ROOT)),
            *("--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", __name__),
            *("--timeout", "350", "--durations", "10"),
            *options,
            str(Path(__file__).parent / name),
        ],
        seconds=_CASES_SECONDS,
    )


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The package `ray`, connected to a new local cluster."""
    # By default, other programs of this machine have precedence over Ray's actors.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name in Ray
    import ray  # noqa: PLC0415 - slow, and needed by the cases only

    ray.init(
        address="local",
        _node_ip_address=_node_host(),
        include_dashboard=False,
        num_cpus=8,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


def _node_host() -> str:
    """Return an address of this machine that is not loopback, if the network was made for it."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, 0))
        except OSError:
            return "127.0.0.1"
    return HOST


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; fail after a minute."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {_WAIT_SECONDS:g} s: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def _started(timer: threading.Timer) -> Iterator[None]:
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_driver(program: str, *, kills: bool = False, seconds: float = _WAIT_SECONDS) -> str:
    """Run another driver on the cluster of this process; return what it printed.

    Args:
        program: Text of the program. A driver that is to be killed prints "ready" first.
        kills: Whether to kill it (SIGKILL) when it is ready.
        seconds: Seconds after which it is killed in any case.
    """
    import ray  # noqa: PLC0415 - slow, and needed by the cases only

    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )
    timer = threading.Timer(seconds, process.kill)
    with process, _started(timer):
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if kills and line.strip() == "ready":
                process.send_signal(signal.SIGKILL)
    assert process.returncode == (-signal.SIGKILL if kills else 0), printed
    return printed
