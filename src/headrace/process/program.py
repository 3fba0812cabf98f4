"""A program of the user, run by a command such as `headrace up`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["Program"]


class Program:
    """A running program that shares the standard streams and the process group of this process.

    Args:
        arguments: The program and its arguments.
        environment: All its environment variables.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(list(arguments), env=dict(environment))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status as in a shell: 128 + n after signal n; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def kill(self) -> None:
        """Kill the program (SIGKILL), if it still runs, and wait for its end."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
