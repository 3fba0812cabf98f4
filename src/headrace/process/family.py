"""Commands that are kept running: each has a process, and gets another when that one dies.

Rule 1: one that was asked to leave, here or by a signal from somebody else, is not started again.
Rule 2: one that was ready once can run, so it is started again however it ended; one that never was
        is started again only where whoever runs the family says that its exit code is no answer.
Rule 3: the delay before it is started again doubles with each death, up to half a minute; a life of
        a minute or more makes the next one short again.

A `Household` is a family and the thread that looks at it. `stop` asks children to leave, waits, and
kills those that do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.errors import CancelledError, UnavailableError
from headrace.process.child import Child, Command

__all__ = [
    "STOP_SECONDS",
    "BecameReady",
    "Ended",
    "Event",
    "Family",
    "Household",
    "NotStarted",
    "Post",
    "restart_delay",
    "stop",
]


_STOP_LOOK_SECONDS = 1.0


def stop(
    children: Sequence[Child],
    seconds: float,
    *,
    hurried: float = 0.0,
    is_hurried: Callable[[float], bool] | None = None,
) -> list[Child]:
    """Ask children to leave, wait for all of them, kill those that do not.

    Args:
        children: Some may have ended already.
        seconds: How long they have, together.
        hurried: How long they have from the moment when somebody hurries them.
        is_hurried: Waits for up to so many seconds, less when a child ends, and says whether
            somebody wants them to leave at once; that is asked by SIGTERM.

    Returns:
        Those that had to be killed.
    """
    for child in children:
        child.release()
    until = time.monotonic() + seconds
    left = list(children)
    asked_again = False
    while (left := [child for child in left if child.is_running]) and (
        remaining := until - time.monotonic()
    ) > 0:
        if is_hurried is None:
            left[0].wait(until)
        elif is_hurried(min(remaining, _STOP_LOOK_SECONDS)) and not asked_again:
            asked_again = True
            until = min(until, time.monotonic() + hurried)
            for child in left:
                child.terminate()
    for child in left:
        child.kill()
    for child in children:
        child.bury()
    return left


_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
_GOOD_LIFE_SECONDS = 60.0


def restart_delay(deaths: int) -> float:
    """Return the seconds before a process is started again, after so many deaths in a row."""
    doublings = min(max(0, deaths - 1), 10)
    return min(_FIRST_DELAY * float(2**doublings), _LONGEST_DELAY)


@dataclass(eq=False)
class Post:
    """A command that is kept running, and the process that runs it now.

    Attributes:
        command: What is run.
        child: Its process; None: it has none at the moment.
        due: When another is to be started, if one is.
    """

    command: Command
    child: Child | None = None
    due: float | None = None
    _since: float = field(default=0.0, repr=False)
    _deaths: int = field(default=0, repr=False)
    _was_ready: bool = field(default=False, repr=False)
    _is_ready: bool = field(default=False, repr=False)

    def start(self, now: float, spawn: Callable[[Command], Child]) -> None:
        """Start its process."""
        self.due, self._is_ready = None, False
        self.child, self._since = spawn(self.command), now

    def notice_ready(self) -> bool:
        """Return whether its process has become ready since the last look."""
        if self.child is None or self.child.ready is None or self._is_ready:
            return False
        self._is_ready = self._was_ready = True
        return True

    def lose(self, now: float, retries: Callable[[int], bool]) -> float | None:
        """Give up its process, which has ended; return the delay before the next, if there is one.

        Args:
            now: When that was seen.
            retries: Whether one that ends with a code before it ever was ready is tried again.
        """
        child, self.child = self.child, None
        if child is not None and (
            child.was_asked or not (self._was_ready or retries(child.code or 0))
        ):
            return None
        self._deaths = 1 if now - self._since > _GOOD_LIFE_SECONDS else self._deaths + 1
        delay = restart_delay(self._deaths)
        self.due = now + delay
        return delay


@dataclass(frozen=True)
class BecameReady:
    """The process of a post said that it is ready."""

    post: Post
    child: Child


@dataclass(frozen=True)
class Ended:
    """The process of a post ended; `again_in` are the seconds until the next, if there is one."""

    post: Post
    child: Child
    again_in: float | None


@dataclass(frozen=True)
class NotStarted:
    """The system refused to start the process of a post."""

    post: Post
    error: OSError
    again_in: float


Event: TypeAlias = BecameReady | Ended | NotStarted


class Family:
    """Keeps commands running. Whoever owns it calls `look` now and then, from one thread at a time.

    Args:
        restarts: Whether processes that die by themselves are replaced.
        retries: Whether one that ends with an exit code before it ever was ready is tried again.
        spawn: Starts a process.
    """

    def __init__(
        self,
        *,
        restarts: bool = True,
        retries: Callable[[int], bool] = lambda code: False,
        spawn: Callable[[Command], Child] = Child,
    ) -> None:
        self._restarts = restarts
        self._retries = retries
        self._spawn = spawn
        self._posts: list[Post] = []

    @property
    def children(self) -> list[Child]:
        """The processes that there are now."""
        return [post.child for post in self._posts if post.child is not None]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be kept running."""
        return not self._posts

    def add(self, command: Command, now: float) -> Post:
        """Start a command, and keep it running.

        Raises:
            OSError: The system refuses to start it.
        """
        post = Post(command)
        post.start(now, self._spawn)
        self._posts.append(post)
        return post

    def remove(self, post: Post) -> None:
        """Do not keep a command running any longer."""
        if post in self._posts:
            self._posts.remove(post)

    def next_due(self) -> float | None:
        """Return when the next process is to be started again, if one is."""
        return min((post.due for post in self._posts if post.due is not None), default=None)

    def look(self, now: float) -> list[Event]:
        """Start what is due, and return what has happened since the last look."""
        events: list[Event] = []
        for post in list(self._posts):
            if post.due is not None and post.due <= now:
                try:
                    post.start(now, self._spawn)
                except OSError as error:
                    events.append(NotStarted(post, error, post.lose(now, self._retries) or 0.0))
            child = post.child
            if child is None:
                continue
            running = child.is_running
            # After that: what it said before it ended is heard.
            child.listen()
            if post.notice_ready():
                events.append(BecameReady(post, child))
            if not running:
                child.bury()
                again_in = post.lose(now, self._retries) if self._restarts else None
                if again_in is None:
                    self._posts.remove(post)
                events.append(Ended(post, child, again_in))
        return events


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
