"""Ownership of ZeroMQ's threads: one context per process, which exists while it is used."""

from __future__ import annotations

import os
import threading

import zmq
import zmq.utils.garbage  # its exit handler must run after those registered later

from headrace.open_files import check_available

__all__ = ["FILES_PER_CONTEXT", "SharedContext", "shared_context", "start_frame_collector"]

FILES_PER_CONTEXT = 24
"""Files that ZeroMQ's threads and one or two sockets open: if one cannot be opened, it aborts."""


def start_frame_collector() -> None:
    """Have pyzmq start the thread that collects frames lent to ZeroMQ.

    Otherwise it would start with the first such frame, and wait forever if no descriptor is left.
    """
    zmq.Frame(b"frame", copy=False, copy_threshold=0)


class SharedContext:
    """A context that is created for the first user and terminated after the last one."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may close a channel, and so call `release`, while this
        # thread is inside `acquire`.
        self._lock = threading.RLock()
        self._users: set[object] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        #: Contexts inherited by a fork; they must not be terminated here.
        self._inherited: list[zmq.Context[zmq.Socket[bytes]]] = []

    def acquire(self, user: object) -> zmq.Context[zmq.Socket[bytes]]:
        """Return the context; it exists until `release`, after the user's sockets are closed.

        Raises:
            OSError: If this process cannot open the files that it needs.
        """
        with self._lock:
            if self._context is None:
                check_available(FILES_PER_CONTEXT)
            self._users.add(user)
            if self._context is None:
                start_frame_collector()
                # Half the cores: ZeroMQ's threads copy and encrypt; the others are left to the
                # user.
                self._context = zmq.Context(max(1, min(4, (os.cpu_count() or 2) // 2)))
                self._context.max_sockets = 65536
            return self._context

    def release(self, user: object) -> None:
        """Terminate the context if it has no other user; may wait as long as its sockets linger.

        Only the first call for a user has an effect, so an interrupted call can be repeated.
        """
        with self._lock:
            self._users.discard(user)
            ended = None if self._users else self._context
            if ended is not None:
                self._context = None
        if ended is not None:
            ended.term()

    def reset_after_fork(self) -> None:
        """Leave everything to the parent; called in a newly forked process."""
        self._lock = threading.RLock()
        self._users = set()
        if self._context is not None:
            self._inherited.append(self._context)
            self._context = None


shared_context = SharedContext()
"""Context of this process's channels, and of its servers without keys (ZeroMQ uses one
authenticator per context, so a server with keys has its own context).
"""

os.register_at_fork(after_in_child=shared_context.reset_after_fork)
