"""A dispatcher and workers as processes that are killed while they work, and replaced."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from headrace.errors import UnavailableError
from headrace.process.bound import NO_ACCELERATORS
from headrace.process.child import Child, Command, clean_environment
from headrace.transport.address import lasting_port

__all__ = ["Kill", "Killer", "Servers"]

_START_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_TAIL_BYTES = 2000
_DISPATCHER = "dispatcher"


@dataclass(frozen=True)
class Kill:
    """A process was killed (SIGKILL), and another one started in its place."""

    who: str
    pid: int


class Servers:
    """The processes, each at a post of its own; one thread at a time may use them.

    Args:
        folder: Where the dispatcher's journal is kept, and what all of them write.
        workers: How many workers.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.address = f"127.0.0.1:{lasting_port()}"
        self._log_path = folder / "servers.log"
        self._log: BinaryIO = self._log_path.open("ab")
        port = self.address.rpartition(":")[2]
        journal = ("--fault-tolerant", "--work-dir", str(folder / "journal"))
        self._commands = {
            _DISPATCHER: self._command("dispatcher", "--port", port, *journal),
            **{
                f"worker {number}": self._command(
                    "worker", "--dispatcher", self.address, "--drain-timeout", "0"
                )
                for number in range(1, workers + 1)
            },
        }
        self._children: dict[str, Child] = {}

    def start(self) -> None:
        """Start all of them."""
        for who in self._commands:
            self._spawn(who)

    def await_all(self) -> None:
        """Return when all are ready.

        Raises:
            UnavailableError: One did not start; the message holds what they wrote.
        """
        until = time.monotonic() + _START_SECONDS
        while len(self._ready()) < len(self._children):
            for who, child in self._children.items():
                if not child.is_running or time.monotonic() > until:
                    raise UnavailableError(f"{who} {child.ending}; it wrote:\n{self.last_words()}")
            time.sleep(_LOOK_SECONDS)

    def look(self) -> list[str]:
        """Start those again that ended by themselves; return who may be killed.

        Nobody, before all are ready: where a process takes longer than a second to start, too
        little would else be done.
        """
        for who, child in self._children.items():
            if not child.is_running:
                child.bury()
                self._spawn(who)
        ready = self._ready()
        return ready if len(ready) == len(self._children) else []

    def kill(self, who: str) -> Kill:
        """Kill one (SIGKILL), and start another one in its place."""
        pid = self._children[who].pid
        self._children[who].kill()
        self._spawn(who)
        return Kill(who, pid)

    def last_words(self) -> str:
        """Return the end of what they wrote."""
        return self._log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """Kill all of them: nothing of what they have is needed any more."""
        for child in self._children.values():
            child.kill()
        self._log.close()

    def _spawn(self, who: str) -> None:
        self._children[who] = Child(self._commands[who])

    def _ready(self) -> list[str]:
        for child in self._children.values():
            child.listen()
        return [who for who, child in self._children.items() if child.ready is not None]

    def _command(self, *arguments: str) -> Command:
        return Command(
            arguments=("-P", "-m", "headrace", *arguments, "--with-parent"),
            environment=clean_environment(os.environ, NO_ACCELERATORS, paths=tuple(sys.path)),
            output=self._log.fileno(),
        )


class Killer:
    """Kills one of the servers every second, on a thread of its own, while its `with` block lasts.

    The next one is killed when the last has been replaced, if that takes longer than a second.

    Args:
        servers: Whom; nobody else may use them meanwhile.
        chance: Chooses.
        say: Called on the thread with each kill.
        seconds: From one to the next.
    """

    def __init__(
        self,
        servers: Servers,
        chance: random.Random,
        say: Callable[[Kill], None],
        seconds: float = 1.0,
    ) -> None:
        self._servers = servers
        self._chance = chance
        self._say = say
        self._seconds = seconds
        #: In order.
        self.kills: list[Kill] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-killer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._seconds
        while not self._over.wait(_LOOK_SECONDS):
            victims = self._servers.look()
            if victims and time.monotonic() >= due:
                due = time.monotonic() + self._seconds
                self.kills.append(self._servers.kill(self._chance.choice(victims)))
                self._say(self.kills[-1])
