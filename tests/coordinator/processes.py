"""Workers and parameter servers in separate processes, for tests that kill them.

Each has a supervisor, a small process that starts and kills it on request, so that a test leaves no
process behind.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]

_SUPERVISOR = """
import os, signal, subprocess, sys
child = None
for line in sys.stdin:
    if line == "start\\n":
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
    elif line == "kill\\n":
        child.kill()
        child.wait()
        print("killed", flush=True)
    else:
        child.send_signal(getattr(signal, line.strip()))
        while line == "SIGSTOP\\n" and not os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1]):
            pass
        print("sent", flush=True)
if child is not None:
    child.kill()
    child.wait()
"""
_SERVER = """
import sys
kind, index, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if kind == "worker":
    from headrace.coordinator import ClosureWorker as Server
else:
    from headrace.parameter_server.server import ParameterServer as Server
with Server(index, port=port) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Task:
    """One worker or parameter server; it always ends with this process."""

    def __init__(self, kind: str, index: int) -> None:
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        command = [sys.executable, "-W", "error", "-c", _SERVER, kind, str(index), str(port)]
        self._supervisor = subprocess.Popen(
            [sys.executable, "-S", "-c", _SUPERVISOR, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        self.begin()

    def _send(self, word: str) -> None:
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(word + "\n")
        self._supervisor.stdin.flush()

    def _receive(self) -> str:
        assert self._supervisor.stdout is not None
        return self._supervisor.stdout.readline().strip()

    def start(self) -> None:
        """Start it, at its address, and wait until it is ready."""
        self.begin()
        self.wait_until_ready()

    def begin(self) -> None:
        """Start it, at its address; see `wait_until_ready`."""
        self._send("start")

    def wait_until_ready(self) -> None:
        assert self._receive() == self.address

    def pause(self) -> None:
        """Stop it (SIGSTOP), once it is ready, and wait until it has stopped."""
        self._send("SIGSTOP")
        assert self._receive() == "sent"

    def resume(self) -> None:
        """Continue it (SIGCONT)."""
        self._send("SIGCONT")
        assert self._receive() == "sent"

    def kill(self) -> None:
        """Kill it (SIGKILL), once it is ready, and wait for its end."""
        self._send("kill")
        assert self._receive() == "killed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._supervisor.communicate()
