"""Child processes of one command: started together, stopped together, each loss told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from headrace.cli.signals import STOP_SIGNALS, Signals

__all__ = ["run_children"]

_STOP_SECONDS = 15.0


def run_children(commands: Sequence[Sequence[str]]) -> int:
    """Run commands of `headrace` as child processes until all have ended.

    Ctrl-C or SIGTERM stops all of them. One that ends by itself is told of on stderr and not
    started again: restarting is the business of whatever places processes on machines. Should this
    process be killed, the children see their stdin close and stop.

    Returns:
        The exit code: 0, or 1 if a child failed.
    """
    children: list[subprocess.Popen[bytes]] = []
    with Signals(children=True) as signals:
        try:
            for command in commands:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "headrace.cli.main", *command],
                        stdin=subprocess.PIPE,
                    )
                )
            running, failed = list(children), False
            while running:
                if STOP_SIGNALS & signals.wait():
                    break
                for child in [child for child in running if child.poll() is not None]:
                    running.remove(child)
                    failed = failed or child.returncode != 0
                    print(
                        f"headrace: process {child.pid} {_ending(child.returncode)}; "
                        f"{len(running)} of {len(commands)} are left",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            killed = _stop(children)
    if killed:
        pids = ", ".join(str(child.pid) for child in killed)
        print(
            f"headrace: did not stop in {_STOP_SECONDS:.0f} s and was killed: process {pids}",
            file=sys.stderr,
        )
    return int(failed or bool(killed))


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    for child in children:
        # Closing stdin says the same as SIGTERM, and also to a child that is still starting.
        if child.stdin is not None:
            child.stdin.close()
    deadline = time.monotonic() + _STOP_SECONDS
    killed = []
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            killed.append(child)
    return killed


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
