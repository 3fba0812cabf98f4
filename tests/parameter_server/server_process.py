"""A parameter server process that tests kill, pause and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE = "tests.parameter_server.served"


class Process:
    """One server, which keeps its address when it is started again."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._port = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._index), str(self._port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the server did not start"
        self._port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.resume()
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()

    def pause(self) -> None:
        """Pause the process (SIGSTOP)."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Resume the process (SIGCONT)."""
        os.kill(self.process.pid, signal.SIGCONT)
