"""Supervision of child processes: commands are restarted when their processes exit.

Rule 1. A process that was asked to stop, by this process or by a signal, is not restarted, except
        after a signal if the owner of the process set says so (`restarts_signaled`).
Rule 2. A process that has been ready once is restarted however it ended. One that was never ready
        is restarted only if the owner of the process set accepts its exit code as temporary
        (`retries`).
Rule 3. The restart delay doubles with each consecutive exit, up to 30 s; a run of more than 60 s
        resets it.

A `ProcessSet` holds the commands and is polled by its owner; a `Supervisor` is a process set with a
thread that polls it. `stop_children` asks children to stop, waits, and kills those that do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.errors import CancelledError, UnavailableError
from headrace.process.child import ChildCommand, ChildProcess

__all__ = [
    "STOP_SECONDS",
    "ProcessEvent",
    "ProcessExited",
    "ProcessReady",
    "ProcessSet",
    "ProcessStartFailed",
    "SupervisedCommand",
    "Supervisor",
    "restart_delay",
    "stop_children",
]


_STOP_POLL_SECONDS = 1.0


def stop_children(
    children: Sequence[ChildProcess],
    seconds: float,
    *,
    hurry_seconds: float = 0.0,
    should_hurry: Callable[[float], bool] | None = None,
) -> list[ChildProcess]:
    """Ask children to stop, wait for all of them, and kill those that do not.

    Args:
        children: The processes; some may have ended already.
        seconds: Time for all of them to stop.
        hurry_seconds: Time to stop after `should_hurry` returned True.
        should_hurry: Waits up to the given number of seconds, or until a child ends. Returns
            whether the children should stop sooner; they then get SIGTERM.

    Returns:
        The children that were killed.
    """
    for child in children:
        child.request_stop()
    deadline = time.monotonic() + seconds
    running = list(children)
    has_hurried = False
    while (running := [child for child in running if child.is_running]) and (
        remaining := deadline - time.monotonic()
    ) > 0:
        if should_hurry is None:
            running[0].wait(deadline)
        elif should_hurry(min(remaining, _STOP_POLL_SECONDS)) and not has_hurried:
            has_hurried = True
            deadline = min(deadline, time.monotonic() + hurry_seconds)
            for child in running:
                child.terminate()
    for child in running:
        child.kill()
    for child in children:
        child.reap()
    return running


_MIN_RESTART_DELAY = 0.5
_MAX_RESTART_DELAY = 30.0
_STABLE_SECONDS = 60.0


def restart_delay(exits: int) -> float:
    """Return the seconds to wait before a restart after `exits` consecutive exits."""
    doublings = min(max(0, exits - 1), 10)
    return min(_MIN_RESTART_DELAY * float(2**doublings), _MAX_RESTART_DELAY)


@dataclass(eq=False)
class SupervisedCommand:
    """A supervised command and its current process.

    Attributes:
        command: The command.
        child: Current process; None if there is none.
        restart_at: Time of the next start; None if none is planned.
        started_at: Time of the last start.
        is_ready: Whether the current process reported that it is ready.
    """

    command: ChildCommand
    child: ChildProcess | None = None
    restart_at: float | None = None
    started_at: float = field(default=0.0, repr=False)
    is_ready: bool = field(default=False, repr=False)
    _consecutive_exits: int = field(default=0, repr=False)
    _was_ready: bool = field(default=False, repr=False)

    def start(self, now: float, spawn: Callable[[ChildCommand], ChildProcess]) -> None:
        """Start the process."""
        self.restart_at, self.is_ready = None, False
        self.child, self.started_at = spawn(self.command), now

    def check_ready(self) -> bool:
        """Return whether the process has become ready since the last call."""
        if self.child is None or self.child.ready_message is None or self.is_ready:
            return False
        self.is_ready = self._was_ready = True
        return True

    def record_exit(
        self, now: float, retries: Callable[[int], bool], *, restarts_signaled: bool = False
    ) -> float | None:
        """Record that the process has ended; return the delay before its restart, or None.

        Args:
            now: Current time.
            retries: Returns whether to restart after an exit code if the process was never ready.
            restarts_signaled: Whether to restart it if a signal asked it to stop.
        """
        child, self.child = self.child, None
        self.is_ready = False
        if child is not None:
            is_asked = child.stop_requested and not (restarts_signaled and child.stop_signaled)
            if is_asked or not (self._was_ready or retries(child.exit_code or 0)):
                return None
        self._consecutive_exits = (
            1 if now - self.started_at > _STABLE_SECONDS else self._consecutive_exits + 1
        )
        delay = restart_delay(self._consecutive_exits)
        self.restart_at = now + delay
        return delay


@dataclass(frozen=True)
class ProcessReady:
    """Event: a process reported that it is ready."""

    supervised: SupervisedCommand
    child: ChildProcess


@dataclass(frozen=True)
class ProcessExited:
    """Event: a process ended; `restart_in` is the restart delay in seconds, None without one."""

    supervised: SupervisedCommand
    child: ChildProcess
    restart_in: float | None


@dataclass(frozen=True)
class ProcessStartFailed:
    """Event: the operating system refused to start a process."""

    supervised: SupervisedCommand
    error: OSError
    restart_in: float


ProcessEvent: TypeAlias = ProcessReady | ProcessExited | ProcessStartFailed


class ProcessSet:
    """Supervised commands. The owner calls `poll` regularly, from one thread at a time.

    Args:
        restarts: Whether processes that exit on their own are restarted.
        restarts_signaled: Whether `restarts` includes those that a signal asked to stop.
        retries: Returns whether to restart after an exit code if the process was never ready.
        spawn: Starts a process.
    """

    def __init__(
        self,
        *,
        restarts: bool = True,
        restarts_signaled: bool = False,
        retries: Callable[[int], bool] = lambda code: False,
        spawn: Callable[[ChildCommand], ChildProcess] = ChildProcess,
    ) -> None:
        self._restarts = restarts
        self._restarts_signaled = restarts_signaled
        self._retries = retries
        self._spawn = spawn
        self._commands: list[SupervisedCommand] = []

    @property
    def children(self) -> list[ChildProcess]:
        """Current processes."""
        return [supervised.child for supervised in self._commands if supervised.child is not None]

    @property
    def active(self) -> list[SupervisedCommand]:
        """Commands whose processes run, start or restart: those not asked to stop.

        Those that are ready come first, the oldest before the newest.
        """
        return sorted(
            (
                supervised
                for supervised in self._commands
                if supervised.child is None or not supervised.child.stop_requested
            ),
            key=lambda supervised: (not supervised.is_ready, supervised.started_at),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no command is left."""
        return not self._commands

    def add(self, command: ChildCommand, now: float) -> SupervisedCommand:
        """Start and supervise a command; return its record.

        Raises:
            OSError: If the operating system refuses to start it.
        """
        supervised = SupervisedCommand(command)
        supervised.start(now, self._spawn)
        self._commands.append(supervised)
        return supervised

    def remove(self, supervised: SupervisedCommand) -> None:
        """Stop supervising a command."""
        if supervised in self._commands:
            self._commands.remove(supervised)

    def next_restart_at(self) -> float | None:
        """Return the time of the next planned restart, or None."""
        return min(
            (
                supervised.restart_at
                for supervised in self._commands
                if supervised.restart_at is not None
            ),
            default=None,
        )

    def poll(self, now: float) -> list[ProcessEvent]:
        """Start the processes that are due, and return the events since the last call."""
        events: list[ProcessEvent] = []
        for supervised in list(self._commands):
            if supervised.restart_at is not None and supervised.restart_at <= now:
                try:
                    supervised.start(now, self._spawn)
                except OSError as error:
                    events.append(
                        ProcessStartFailed(
                            supervised, error, self._record_exit(supervised, now) or 0.0
                        )
                    )
            child = supervised.child
            if child is None:
                continue
            is_running = child.is_running
            # Read after the check, so that messages sent before the exit are not missed.
            child.read_messages()
            if supervised.check_ready():
                events.append(ProcessReady(supervised, child))
            if not is_running:
                child.reap()
                restart_in = self._record_exit(supervised, now) if self._restarts else None
                if restart_in is None:
                    self._commands.remove(supervised)
                events.append(ProcessExited(supervised, child, restart_in))
        return events

    def _record_exit(self, supervised: SupervisedCommand, now: float) -> float | None:
        return supervised.record_exit(now, self._retries, restarts_signaled=self._restarts_signaled)


STOP_SECONDS = 4.0
"""Seconds for a child to stop; one that must return work does so within the first second."""

_POLL_SECONDS = 0.05
_START_TIMEOUT_SECONDS = 60.0


class Supervisor:
    """Starts child processes, waits until they are ready, and supervises them on a thread.

    Args:
        process_name: Kind of the children for messages, such as "worker process".
        on_event: Called with each event that `start` does not wait for: a child exited, or is ready
            after a restart. Called under the lock of this object, from its thread.
        restarts: Whether children that exit on their own are restarted.
        restarts_signaled: Whether `restarts` includes those that a signal asked to stop.
    """

    def __init__(
        self,
        process_name: str,
        on_event: Callable[[ProcessEvent], object],
        *,
        restarts: bool = True,
        restarts_signaled: bool = False,
    ) -> None:
        self._process_name = process_name
        self._on_event = on_event
        self._processes = ProcessSet(restarts=restarts, restarts_signaled=restarts_signaled)
        self._closing = threading.Event()
        #: Guards the process set and the attributes below.
        self._changed = threading.Condition()
        #: Outcome for each child that `start` waits for; None while it is unknown.
        self._starting: dict[SupervisedCommand, ChildProcess | UnavailableError | None] = {}
        self._watcher = threading.Thread(
            target=self._watch, name="headrace-cluster-watch", daemon=True
        )
        self._watcher.start()

    def start(
        self, commands: Sequence[ChildCommand]
    ) -> list[tuple[SupervisedCommand, ChildProcess]]:
        """Start children and wait until all are ready; if one fails, kill all of them.

        Returns:
            For each command its record and its ready process.

        Raises:
            UnavailableError: If a child did not start; the message includes its output.
            CancelledError: If the supervisor was closed while this method waited.
        """
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        supervised_commands: list[SupervisedCommand] = []
        with self._changed:
            try:
                for command in commands:
                    supervised_commands.append(self._processes.add(command, time.monotonic()))
                    self._starting[supervised_commands[-1]] = None
                return [
                    (supervised, self._wait_until_ready(supervised, deadline))
                    for supervised in supervised_commands
                ]
            except BaseException:
                for supervised in supervised_commands:
                    self._kill_and_remove(supervised)
                raise
            finally:
                for supervised in supervised_commands:
                    self._starting.pop(supervised, None)

    @property
    def num_active(self) -> int:
        """Number of children that run, start or wait for a restart, and were not asked to stop."""
        with self._changed:
            return len(self._processes.active)

    def start_soon(self, commands: Sequence[ChildCommand]) -> None:
        """Start children without waiting; events report which of them are ready, or ended.

        Raises:
            OSError: If the operating system refuses to start one; earlier ones run.
            CancelledError: If the supervisor is closed.
        """
        with self._changed:
            for command in commands:
                self._check_open()
                self._processes.add(command, time.monotonic())

    def stop_newest(self, count: int) -> None:
        """Ask `count` children to stop, the newest first; do not wait.

        A child that is ready gets SIGTERM. One that still starts has nothing to deliver and is
        asked over its link; one that waits for a restart is removed.
        """
        with self._changed:
            candidates = [each for each in self._processes.active if each not in self._starting]
            for supervised in candidates[len(candidates) - count :]:
                if supervised.child is None:
                    self._processes.remove(supervised)
                elif supervised.is_ready:
                    supervised.child.terminate()
                else:
                    supervised.child.request_stop()

    def kill(self, supervised: SupervisedCommand) -> None:
        """Kill a child (SIGKILL); it is not restarted."""
        with self._changed:
            self._kill_and_remove(supervised)

    def close(self) -> None:
        """Stop all children in parallel; kill those that do not end within `STOP_SECONDS`."""
        self._closing.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join()
        for child in self._processes.children:
            child.read_messages()
            if child.ready_message is None:
                # It has no work to return, and may still be importing modules.
                child.kill()
        stop_children(self._processes.children, STOP_SECONDS)

    def _kill_and_remove(self, supervised: SupervisedCommand) -> None:
        self._processes.remove(supervised)
        if supervised.child is not None:
            supervised.child.kill()

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            with self._changed:
                for event in self._processes.poll(time.monotonic()):
                    match event:
                        case ProcessReady(supervised, child) if supervised in self._starting:
                            self._starting[supervised] = child
                        case ProcessExited(supervised, child, _) if supervised in self._starting:
                            self._starting[supervised] = self._start_error(
                                child, child.exit_description
                            )
                        case _:
                            self._on_event(event)
                self._changed.notify_all()

    def _wait_until_ready(self, supervised: SupervisedCommand, deadline: float) -> ChildProcess:
        while True:
            match self._starting[supervised]:
                case ChildProcess() as child:
                    return child
                case UnavailableError() as error:
                    raise error
            self._check_open()
            if time.monotonic() > deadline and supervised.child is not None:
                raise self._start_error(
                    supervised.child, f"was not ready after {_START_TIMEOUT_SECONDS:.0f} s"
                )
            self._changed.wait(_POLL_SECONDS)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CancelledError("the cluster is closed")

    def _start_error(self, child: ChildProcess, reason: str) -> UnavailableError:
        return UnavailableError(
            f"{self._process_name} {child.pid} {reason}. Its output:\n"
            f"{child.read_startup_output() or '(none)'}"
        )
