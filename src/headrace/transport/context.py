"""Who owns ZeroMQ's threads: one context for a process, there while somebody uses it."""

from __future__ import annotations

import os
import threading

import zmq
import zmq.utils.garbage  # Now: what it does at exit comes after what is registered later.

from headrace.open_files import check_room

__all__ = ["FILES_PER_CONTEXT", "SharedContext", "shared_context", "start_frame_collector"]

FILES_PER_CONTEXT = 24
"""What ZeroMQ's threads and a socket or two open: without one of them it ends the process."""


def start_frame_collector() -> None:
    """Have pyzmq start the thread that collects frames that were lent to ZeroMQ.

    It would start with the first such frame, and wait without end if there is no descriptor left.
    """
    zmq.Frame(b"frame", copy=False, copy_threshold=0)


class SharedContext:
    """A context that the first user starts and the last one ends."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a channel, and so call `release`, while this
        # very thread is inside `acquire`.
        self._lock = threading.RLock()
        self._users: set[object] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        #: Contexts of the processes that this one was forked from; nobody may end them here.
        self._inherited: list[zmq.Context[zmq.Socket[bytes]]] = []

    def acquire(self, user: object) -> zmq.Context[zmq.Socket[bytes]]:
        """Return the context; it is there until `release`, after the user's sockets are closed.

        Raises:
            OSError: This process cannot open the files that it takes.
        """
        with self._lock:
            if self._context is None:
                check_room(FILES_PER_CONTEXT)
            self._users.add(user)
            if self._context is None:
                start_frame_collector()
                # Half the cores: ZeroMQ's threads copy and encrypt, the rest is the user's.
                self._context = zmq.Context(max(1, min(4, (os.cpu_count() or 2) // 2)))
                self._context.max_sockets = 65536
            return self._context

    def release(self, user: object) -> None:
        """End the context if nobody else uses it; may wait as long as its sockets linger.

        Only the first call for a user counts: one that was interrupted can be made again.
        """
        with self._lock:
            self._users.discard(user)
            ended = None if self._users else self._context
            if ended is not None:
                self._context = None
        if ended is not None:
            ended.term()

    def reset_after_fork(self) -> None:
        """Leave everything to the parent; called in a process that was just forked."""
        self._lock = threading.RLock()
        self._users = set()
        if self._context is not None:
            self._inherited.append(self._context)
            self._context = None


shared_context = SharedContext()
"""The context of this process's channels, and of its servers that check no keys (ZeroMQ asks one
authenticator per context, so a server that does has a context of its own)."""

os.register_at_fork(after_in_child=shared_context.reset_after_fork)
