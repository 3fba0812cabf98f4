"""Commands that are kept running: each has a process, and gets another when that one dies.

Rule 1: one that was asked to leave, here or by a signal from somebody else, is not started again.
Rule 2: one that was ready once can run, so it is started again however it ended; one that never was
        is started again only where whoever runs the family says that its exit code is no answer.
Rule 3: the delay before it is started again doubles with each death, up to half a minute; a life of
        a minute or more makes the next one short again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.process.child import Child, Command

__all__ = ["BecameReady", "Ended", "Event", "Family", "NotStarted", "Post", "restart_delay"]

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
