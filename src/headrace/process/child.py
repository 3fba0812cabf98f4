"""A process that was started here: the link to it, what it says, how it ended."""

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

from headrace.forks import stays_with_parent
from headrace.open_files import check_room
from headrace.process.parent_link import READY, STOPPING

__all__ = ["NO_ACCELERATORS", "ChildCommand", "ChildProcess", "build_command", "clean_environment"]


_BLOCK = 4096
_MAX_FILES = 10
"""At most so many are opened to start a process."""
#: What makes an interpreter do something else than run its command to the end.
_INTERPRETER_VARIABLES = ("PYTHONINSPECT", "PYTHONSTARTUP")


def clean_environment(
    variables: Mapping[str, str], *given: Mapping[str, str], paths: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        variables: Those of this process; what is meant for this interpreter alone is left out.
        given: More, the later ones stronger.
        paths: Where the child finds modules, before anywhere else.
    """
    kept = {name: text for name, text in variables.items() if name not in _INTERPRETER_VARIABLES}
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in paths)
    for more in given:
        kept.update(more)
    return kept


@dataclass(frozen=True, kw_only=True)
class ChildCommand:
    """What a child runs.

    Attributes:
        arguments: After the interpreter: `("-m", "package.module", ...)`.
        environment: All of its variables.
        dies_with_parent: Whether it is of no use without its parent: what it writes until it is
            ready is kept, for a message about why it is not, and it dies when the parent does. Its
            last two arguments are numbers of descriptors: the one that takes over from standard
            output and error when it is ready, and its lifeline (`process/parent_link.py`).
        output: Descriptor of what takes its standard output and error, where they are not kept;
            None: those of this process.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    dies_with_parent: bool = False
    output: int | None = None


class ChildProcess:
    """One process, from its start to its end.

    It has a process group of its own: Ctrl-C is for its parent, which passes it on.
    """

    def __init__(self, command: ChildCommand) -> None:
        check_room(_MAX_FILES)
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._unread = b""
        # An unnamed file, so that nothing is left when all are killed.
        self._startup_output: IO[bytes] | None = None
        self._lifeline: int | None = None
        if command.dies_with_parent:
            self._startup_output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is ready
        self._final_output = ""
        #: Whether it was asked to leave, here or by a signal from somebody else.
        self.stop_requested = False
        #: What it said when it was ready; None: it is not, yet.
        self.ready_message: str | None = None
        with contextlib.ExitStack() as stack:
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(self.leave_to_parent)
            stack.enter_context(theirs)
            passed: list[int] = []
            if command.dies_with_parent:
                passed.append(_duplicate_stderr())
                stack.callback(os.close, passed[0])
                end, self._lifeline = os.pipe()
                passed.append(end)
                stack.callback(os.close, end)
            self._process = subprocess.Popen(
                [sys.executable, *command.arguments, *map(str, passed)],
                stdin=theirs.fileno(),
                stdout=self._startup_output or command.output,
                stderr=self._startup_output or command.output,
                pass_fds=passed,
                env=dict(command.environment),
                process_group=0,
            )
            undo.pop_all()
        stays_with_parent(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None: it has not ended."""
        return self._process.poll()

    @property
    def exit_description(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
        return f"ended by signal {-code}"

    def read_messages(self) -> None:
        """Take what it has said so far."""
        with contextlib.suppress(OSError):
            while piece := self._link.recv(_BLOCK):
                self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            word, _, text = line.decode(errors="replace").partition(" ")
            if word == READY:
                self.ready_message = text
                self._close_startup_output()
            elif word == STOPPING:
                self.stop_requested = True

    def read_startup_output(self) -> str:
        """Return what it wrote before it was ready, where that is kept."""
        if self._startup_output is not None:
            self._startup_output.seek(0)
            self._final_output = self._startup_output.read().decode(errors="replace").strip()
        return self._final_output

    def request_stop(self) -> None:
        """Ask it to leave, by closing the link; do not wait."""
        self.read_messages()
        self.stop_requested = True
        self._link.close()

    def terminate(self) -> None:
        """Ask it by SIGTERM; one that was asked before then leaves at once."""
        self.stop_requested = True
        self._process.terminate()

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait for its end."""
        self.stop_requested = True
        self._process.kill()
        self._process.wait()
        self.reap()

    def wait(self, until: float) -> bool:
        """Wait for its end until a time of the monotonic clock; return whether it has ended."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self.reap()
        return True

    def reap(self) -> None:
        """Take the last words of one that has ended, and free what is held for it here."""
        self.read_messages()
        self.read_startup_output()
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Close what belongs to it here; in a forked process the link would else stay open."""
        self._link.close()
        self._close_startup_output()
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)

    def _close_startup_output(self) -> None:
        words, self._startup_output = self._startup_output, None
        if words is not None:
            words.close()


def _duplicate_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


NO_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators belong to the process that trains; a child would take memory on them."""


def build_command(module: str, *arguments: str, environment: Mapping[str, str]) -> ChildCommand:
    """Return the command of a child that runs a module of ours and ends with this process.

    Args:
        module: It is run as a program, with two more arguments (see
            `ChildCommand.dies_with_parent`).
        *arguments: Of the program.
        environment: Variables that it gets besides those of this process, and more than these:
            accelerators are hidden from it.
    """
    return ChildCommand(
        arguments=("-m", module, *arguments),
        environment=clean_environment(
            os.environ,
            NO_ACCELERATORS,
            environment,
            # Functions of the user's modules travel by name: a child must find the same modules.
            paths=tuple(sys.path),
        ),
        dies_with_parent=True,
    )
