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
from headrace.process.parent import LEAVING, READY

__all__ = ["NO_ACCELERATORS", "Child", "Command", "bound_command", "clean_environment"]


_BLOCK = 4096
_FILES = 10
"""At most so many are opened to start a process."""
#: What makes an interpreter do something else than run its command to the end.
_FOR_ONE_INTERPRETER = ("PYTHONINSPECT", "PYTHONSTARTUP")


def clean_environment(
    variables: Mapping[str, str], *given: Mapping[str, str], paths: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        variables: Those of this process; what is meant for this interpreter alone is left out.
        given: More, the later ones stronger.
        paths: Where the child finds modules, before anywhere else.
    """
    kept = {name: text for name, text in variables.items() if name not in _FOR_ONE_INTERPRETER}
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in paths)
    for more in given:
        kept.update(more)
    return kept


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a child runs.

    Attributes:
        arguments: After the interpreter: `("-m", "package.module", ...)`.
        environment: All of its variables.
        is_bound: Whether it is of no use without its parent: what it writes until it is ready is
            kept, for a message about why it is not, and it dies when the parent does. Its last two
            arguments are numbers of descriptors: the one that takes over from standard output and
            error when it is ready, and its lifeline (`process/parent.py`).
        output: Descriptor of what takes its standard output and error, where they are not kept;
            None: those of this process.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    is_bound: bool = False
    output: int | None = None


class Child:
    """One process, from its start to its end.

    It has a process group of its own: Ctrl-C is for its parent, which passes it on.
    """

    def __init__(self, command: Command) -> None:
        check_room(_FILES)
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._unread = b""
        # An unnamed file, so that nothing is left when all are killed.
        self._words: IO[bytes] | None = None
        self._lifeline: int | None = None
        if command.is_bound:
            self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is ready
        self._last_words = ""
        #: Whether it was asked to leave, here or by a signal from somebody else.
        self.was_asked = False
        #: What it said when it was ready; None: it is not, yet.
        self.ready: str | None = None
        with contextlib.ExitStack() as stack:
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(self.leave_to_parent)
            stack.enter_context(theirs)
            passed: list[int] = []
            if command.is_bound:
                passed.append(_duplicate_of_stderr())
                stack.callback(os.close, passed[0])
                end, self._lifeline = os.pipe()
                passed.append(end)
                stack.callback(os.close, end)
            self._process = subprocess.Popen(
                [sys.executable, *command.arguments, *map(str, passed)],
                stdin=theirs.fileno(),
                stdout=self._words or command.output,
                stderr=self._words or command.output,
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
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None: it has not ended."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
        return f"ended by signal {-code}"

    def listen(self) -> None:
        """Take what it has said so far."""
        with contextlib.suppress(OSError):
            while piece := self._link.recv(_BLOCK):
                self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            word, _, text = line.decode(errors="replace").partition(" ")
            if word == READY:
                self.ready = text
                self._forget_words()
            elif word == LEAVING:
                self.was_asked = True

    def words(self) -> str:
        """Return what it wrote before it was ready, where that is kept."""
        if self._words is not None:
            self._words.seek(0)
            self._last_words = self._words.read().decode(errors="replace").strip()
        return self._last_words

    def release(self) -> None:
        """Ask it to leave, by closing the link; do not wait."""
        self.listen()
        self.was_asked = True
        self._link.close()

    def terminate(self) -> None:
        """Ask it by SIGTERM; one that was asked before then leaves at once."""
        self.was_asked = True
        self._process.terminate()

    def kill(self) -> None:
        """Kill it (SIGKILL), and wait for its end."""
        self.was_asked = True
        self._process.kill()
        self._process.wait()
        self.bury()

    def wait(self, until: float) -> bool:
        """Wait for its end until a time of the monotonic clock; return whether it has ended."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self.bury()
        return True

    def bury(self) -> None:
        """Take the last words of one that has ended, and free what is held for it here."""
        self.listen()
        self.words()
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Close what belongs to it here; in a forked process the link would else stay open."""
        self._link.close()
        self._forget_words()
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)

    def _forget_words(self) -> None:
        words, self._words = self._words, None
        if words is not None:
            words.close()


def _duplicate_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


NO_ACCELERATORS = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators belong to the process that trains; a child would take memory on them."""


def bound_command(module: str, *arguments: str, environment: Mapping[str, str]) -> Command:
    """Return the command of a child that runs a module of ours and ends with this process.

    Args:
        module: It is run as a program, with two more arguments (see `Command.is_bound`).
        *arguments: Of the program.
        environment: Variables that it gets besides those of this process, and more than these:
            accelerators are hidden from it.
    """
    return Command(
        arguments=("-m", module, *arguments),
        environment=clean_environment(
            os.environ,
            NO_ACCELERATORS,
            environment,
            # Functions of the user's modules travel by name: a child must find the same modules.
            paths=tuple(sys.path),
        ),
        is_bound=True,
    )
