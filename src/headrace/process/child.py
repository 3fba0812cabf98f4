"""A child process, as its parent sees it: its link, its messages, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from headrace.forks import register_fork_sensitive
from headrace.open_files import check_available
from headrace.process.parent_link import READY, STOPPING

__all__ = ["NO_ACCELERATORS", "ChildCommand", "ChildProcess", "build_command", "clean_environment"]


_READ_BYTES = 4096
_MAX_FILES = 10
"""Largest number of descriptors opened to start a process."""
#: Variables that make an interpreter do more than run its command.
_INTERPRETER_VARIABLES = ("PYTHONINSPECT", "PYTHONSTARTUP")


def clean_environment(
    variables: Mapping[str, str], *overrides: Mapping[str, str], paths: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        variables: Environment of this process; variables meant for its interpreter alone are
            removed.
        *overrides: Further variables; later mappings take precedence.
        paths: Module search path of the child, before any other.
    """
    environment = {
        name: text for name, text in variables.items() if name not in _INTERPRETER_VARIABLES
    }
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in paths)
    for override in overrides:
        environment.update(override)
    return environment


@dataclass(frozen=True, kw_only=True)
class ChildCommand:
    """Command line and environment of a child.

    Attributes:
        arguments: Arguments of the interpreter: `("-m", "package.module", ...)`.
        environment: All environment variables.
        dies_with_parent: Whether the kernel kills the child when its parent ends. The child's
            output is then captured until it is ready, for error messages, and two descriptor
            numbers are appended to its arguments: the one that replaces standard output and error
            when it is ready, and its lifeline (`process/parent_link.py`).
        output: Descriptor for its standard output and error if they are not captured; None inherits
            those of this process.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    dies_with_parent: bool = False
    output: int | None = None


class ChildProcess:
    """One process, from its start to its end.

    It has a separate process group: Ctrl-C reaches only the parent, which stops its children.
    """

    def __init__(self, command: ChildCommand) -> None:
        check_available(_MAX_FILES)
        self._link, child_end = socket.socketpair()
        self._link.setblocking(False)
        self._unread = b""
        # An unnamed file, which disappears even if all processes are killed.
        self._startup_output: IO[bytes] | None = None
        self._lifeline: int | None = None
        if command.dies_with_parent:
            self._startup_output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is ready
        self._final_output = ""
        #: Whether it was asked to stop, by this process or by a signal.
        self.stop_requested: bool = False
        #: Whether a signal asked it to stop, which this process did not send.
        self.stop_signaled: bool = False
        #: Text of its ready message; None before that.
        self.ready_message: str | None = None
        with contextlib.ExitStack() as stack:
            cleanup = stack.enter_context(contextlib.ExitStack())
            cleanup.callback(self._close_descriptors)
            stack.enter_context(child_end)
            inherited: list[int] = []
            if command.dies_with_parent:
                inherited.append(_duplicate_stderr())
                stack.callback(os.close, inherited[0])
                read_end, self._lifeline = os.pipe()
                inherited.append(read_end)
                stack.callback(os.close, read_end)
            self._process = subprocess.Popen(
                [sys.executable, *command.arguments, *map(str, inherited)],
                stdin=child_end.fileno(),
                stdout=self._startup_output or command.output,
                stderr=self._startup_output or command.output,
                pass_fds=inherited,
                env=dict(command.environment),
                process_group=0,
            )
            cleanup.pop_all()
        register_fork_sensitive(self)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process is running."""
        return self._process.poll()

    @property
    def exit_description(self) -> str:
        """How the process ended, for messages."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
        return f"ended by signal {-code}"

    def read_messages(self) -> None:
        """Read the messages sent so far."""
        with contextlib.suppress(OSError):
            while piece := self._link.recv(_READ_BYTES):
                self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            kind, _, text = line.decode(errors="replace").partition(" ")
            if kind == READY:
                self.ready_message = text
                self._close_startup_output()
            elif kind == STOPPING:
                self.stop_signaled = not self.stop_requested
                self.stop_requested = True

    def read_startup_output(self) -> str:
        """Return the output from before the process was ready, if it was captured."""
        if self._startup_output is not None:
            self._startup_output.seek(0)
            self._final_output = self._startup_output.read().decode(errors="replace").strip()
        return self._final_output

    def request_stop(self) -> None:
        """Ask the process to stop, by closing the link; do not wait."""
        self.read_messages()
        self.stop_requested = True
        self._link.close()

    def terminate(self) -> None:
        """Send SIGTERM; a process that was already asked to stop then exits at once."""
        self.stop_requested = True
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process (SIGKILL), and wait for its end."""
        self.stop_requested = True
        self._process.kill()
        self._process.wait()
        self.reap()

    def wait(self, deadline: float) -> bool:
        """Wait until a time of the monotonic clock; return whether the process has ended."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self.reap()
        return True

    def reap(self) -> None:
        """Read the last messages of an ended process, and close its descriptors."""
        self.read_messages()
        self.read_startup_output()
        self._close_descriptors()

    def after_fork_in_child(self) -> None:
        """Close the copies of all descriptors in a forked child; they would keep the link open."""
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._link.close()
        self._close_startup_output()
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)

    def _close_startup_output(self) -> None:
        output, self._startup_output = self._startup_output, None
        if output is not None:
            output.close()


def _duplicate_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


NO_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""Variables that hide accelerators from children, which would otherwise allocate memory on the
devices of the training process.
"""


def build_command(module: str, *arguments: str, environment: Mapping[str, str]) -> ChildCommand:
    """Return the command of a child that runs a module of this package and ends with this process.

    Args:
        module: Module to run as a program, with two more arguments (see
            `ChildCommand.dies_with_parent`).
        *arguments: Arguments of the program.
        environment: Variables added to those of this process, in which accelerators are hidden.
    """
    return ChildCommand(
        arguments=("-m", module, *arguments),
        environment=clean_environment(
            os.environ,
            NO_ACCELERATORS,
            environment,
            # Functions of importable modules are pickled by name, so a child must find the same
            # modules.
            paths=tuple(sys.path),
        ),
        dies_with_parent=True,
    )
