"""The life of a coordinator's shell: until it is closed, or nobody holds the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from headrace.coordinator.shell import Shell
from headrace.serving.life_cycle import LifeCycle

__all__ = ["RunningShell"]


class RunningShell(LifeCycle):
    """The coordinator's threads; they end when nobody holds it."""

    def __init__(self, shell: Shell) -> None:
        super().__init__()
        self._shell = shell

    def _open(self) -> None:
        self._keep(self._shell.close)
        self._shell.open()

    def keep(self, close: Callable[[], object]) -> None:
        """Have `close` called at the end."""
        self._keep(close)
