"""A family of bound children, and the thread that looks at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from headrace.errors import CancelledError, UnavailableError
from headrace.process.child import Child, Command
from headrace.process.family import BecameReady, Ended, Event, Family, Post
from headrace.process.stopping import stop

__all__ = ["STOP_SECONDS", "Household"]

STOP_SECONDS = 4.0
"""How long a child may take to end; one that has work to hand back does so in the first second."""

_LOOK_SECONDS = 0.05
_START_SECONDS = 60.0


class Household:
    """Starts children, waits until they are ready, and keeps them running until it is closed.

    Args:
        what: What a child is, for messages: "worker process".
        note: Called with each event of a child that nobody waits for: one that died, or is ready
            after it was started again. It is called under the lock of this object, from its thread.
        restarts: Whether children that die by themselves are replaced.
    """

    def __init__(
        self, what: str, note: Callable[[Event], object], *, restarts: bool = True
    ) -> None:
        self._what = what
        self._note = note
        self._family = Family(restarts=restarts)
        self._closing = threading.Event()
        #: Held by whoever looks at the family, or changes what is below.
        self._changed = threading.Condition()
        #: What became of the children that `start` waits for; None: it is not known yet.
        self._awaited: dict[Post, Child | UnavailableError | None] = {}
        self._watcher = threading.Thread(
            target=self._watch, name="headrace-cluster-watch", daemon=True
        )
        self._watcher.start()

    def start(self, commands: Sequence[Command]) -> list[tuple[Post, Child]]:
        """Start children; return when all are ready, or end them all again.

        Returns:
            For each command its post, and the child that is ready now.

        Raises:
            UnavailableError: One did not start; the message holds what it wrote.
            CancelledError: The household was closed meanwhile.
        """
        until = time.monotonic() + _START_SECONDS
        posts: list[Post] = []
        with self._changed:
            try:
                for command in commands:
                    posts.append(self._family.add(command, time.monotonic()))
                    self._awaited[posts[-1]] = None
                return [(post, self._wait_for(post, until)) for post in posts]
            except BaseException:
                for post in posts:
                    self._give_up(post)
                raise
            finally:
                for post in posts:
                    self._awaited.pop(post, None)

    def kill(self, post: Post) -> None:
        """Kill a child (SIGKILL); it is not started again."""
        with self._changed:
            self._give_up(post)

    def close(self) -> None:
        """Stop all children side by side; kill those that do not end in a few seconds."""
        self._closing.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join()
        for child in self._family.children:
            child.listen()
            if child.ready is None:
                # It has nothing to hand back, and may be in the middle of its imports.
                child.kill()
        stop(self._family.children, STOP_SECONDS)

    def _give_up(self, post: Post) -> None:
        self._family.remove(post)
        if post.child is not None:
            post.child.kill()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            with self._changed:
                for event in self._family.look(time.monotonic()):
                    match event:
                        case BecameReady(post, child) if post in self._awaited:
                            self._awaited[post] = child
                        case Ended(post, child, _) if post in self._awaited:
                            self._awaited[post] = self._failure(child, child.ending)
                        case _:
                            self._note(event)
                self._changed.notify_all()

    def _wait_for(self, post: Post, until: float) -> Child:
        while True:
            match self._awaited[post]:
                case Child() as child:
                    return child
                case UnavailableError() as error:
                    raise error
            if self._closing.is_set():
                raise CancelledError("the cluster is closed")
            if time.monotonic() > until and post.child is not None:
                raise self._failure(post.child, f"is not ready after {_START_SECONDS:.0f} s")
            self._changed.wait(_LOOK_SECONDS)

    def _failure(self, child: Child, words: str) -> UnavailableError:
        return UnavailableError(
            f"{self._what} {child.pid} {words}. It wrote:\n{child.words() or '(nothing)'}"
        )
