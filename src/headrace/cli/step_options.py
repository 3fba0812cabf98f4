"""Options of `headrace up`, and the processes of a rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.run_server import OWN_EXIT_CODES, STOP_SIGNALS, Signals, report_event
from headrace.process.child import ChildCommand
from headrace.process.supervisor import ProcessSet, SupervisedCommand, stop_children

__all__ = ["STOP_SECONDS", "RankProcesses", "StepOptions", "warn"]

STOP_SECONDS = 5.0
"""Seconds for the servers to stop after the program has ended."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of `headrace up`.

    Attributes:
        directory: Directory in which the ranks find each other.
        host: Address of this node for the other nodes.
        work_dir: Directory of the dispatcher's journal; None: no journal.
        preload: Modules that workers import first.
        max_workers_per_rank: Maximum number of data workers of each worker rank.
        timeout: Seconds to wait for the other ranks, and for a sign of rank 0.
        grace: Seconds after SIGTERM until the program is killed and servers stop.
        program: The user's program and its arguments; empty: none.
    """

    directory: Path
    host: str
    work_dir: Path | None
    preload: tuple[str, ...]
    max_workers_per_rank: int
    timeout: float
    grace: float
    program: tuple[str, ...]


class RankProcesses:
    """Server processes of a rank, which are restarted when they crash.

    Slurm sends signals to every process of a step. The servers ignore them: this process decides
    when they stop.

    Args:
        signals: Signals of this process.
        restarts: Whether servers that crash are restarted; otherwise that is a failure.
    """

    def __init__(self, signals: Signals, *, restarts: bool = True) -> None:
        self._signals = signals
        self._processes = ProcessSet(
            restarts=restarts, retries=lambda code: code not in OWN_EXIT_CODES
        )
        self._commands: list[SupervisedCommand] = []
        #: Commands that `scale` started.
        self._additional: list[SupervisedCommand] = []
        self._can_add = True
        self.has_failed: bool = False

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a command of `headrace`.

        Raises:
            OSError: If the operating system refuses to start it.
        """
        self._commands.append(self._add(arguments, environment))

    def scale(self, count: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start or drain additional servers, so that `count` run; drain the newest first.

        After one that cannot start, no others are started: the rank continues with those it has.
        """
        running = [each for each in self._processes.active if each in self._additional]
        for supervised in running[count:]:
            self._additional.remove(supervised)
            if supervised.child is None:
                self._processes.remove(supervised)
            else:
                supervised.child.request_stop()
        for _ in range(count - len(running)):
            if self._can_add:
                try:
                    self._additional.append(self._add(arguments, environment))
                except OSError as error:
                    self._report_cannot_add(str(error))

    def _add(self, arguments: Sequence[str], environment: Mapping[str, str]) -> SupervisedCommand:
        command = ("-P", "-m", "headrace", *arguments, "--with-parent", "--ignore-signals")
        return self._processes.add(
            ChildCommand(arguments=command, environment=environment), time.monotonic()
        )

    def _report_cannot_add(self, reason: str) -> None:
        self._can_add = False
        warn(f"an additional worker did not start, this rank adds no more: {reason}")

    @property
    def are_ready(self) -> bool:
        """Whether all servers are ready."""
        return all(
            each.child is not None and each.child.ready_message is not None
            for each in self._commands
        )

    def poll(self) -> None:
        """Restart servers that crashed, and report what happened to them."""
        for event in self._processes.poll(time.monotonic()):
            count = len(self._commands) + len(self._additional)
            if not report_event(event, self._processes, count):
                continue
            if event.supervised in self._additional:
                self._additional.remove(event.supervised)
                self._report_cannot_add("its message is above")
            else:
                self.has_failed = True

    def stop(self, seconds: float) -> None:
        """Stop all servers; kill those that take longer, or after another signal."""
        stop_children(
            self._processes.children,
            seconds,
            hurry_seconds=1.0,
            should_hurry=lambda wait: bool(STOP_SIGNALS & self._signals.wait(wait)),
        )


def warn(text: str) -> None:
    """Print a warning on stderr, which srun shows with the number of the rank."""
    print(f"headrace: {text}", file=sys.stderr, flush=True)
