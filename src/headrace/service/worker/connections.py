"""Connections to the dispatcher, lent to whichever thread needs one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from headrace.service.dispatcher.stub import DispatcherStub
from headrace.transport.retry import RetryPolicy, retry

__all__ = ["Connections"]

T = TypeVar("T")

_ASK_SECONDS = 1.0


class Connections:
    """A pool that grows with the number of threads that ask at the same time.

    Args:
        connect: Opens a connection, for the thread that calls it.
        patience: Seconds for which a dispatcher that does not answer is asked again.
    """

    def __init__(self, connect: Callable[[], DispatcherStub], patience: float) -> None:
        self._connect = connect
        self._patience = patience
        self._lock = threading.Lock()
        self._idle: list[DispatcherStub] = []
        self._closed = threading.Event()

    @contextmanager
    def lend(self) -> Iterator[DispatcherStub]:
        """Lend a connection to the calling thread; a used one where there is one."""
        with self._lock:
            stub = self._idle.pop() if self._idle else None
        stub = stub or self._connect()
        try:
            yield stub
        finally:
            with self._lock:
                keep = not self._closed.is_set()
                if keep:
                    self._idle.append(stub)
            if not keep:
                stub.close()

    def once(self, call: Callable[[DispatcherStub, float], T]) -> T:
        """Ask once; `call` gets a connection and the seconds that it may take."""
        with self.lend() as stub:
            return call(stub, _ASK_SECONDS)

    def patiently(
        self, call: Callable[[DispatcherStub, float], T], called_off: threading.Event | None = None
    ) -> T:
        """Ask again and again until the dispatcher answers.

        Raises:
            UnavailableError: It did not for as long as the worker bears it.
            CancelledError: `called_off` was set, or the pool was closed.
        """
        off = called_off or self._closed
        with self.lend() as stub:
            return retry(
                lambda timeout: call(stub, timeout),
                RetryPolicy(deadline=self._patience, max_delay=1.0),
                whom="the worker's dispatcher",
                attempt_timeout=_ASK_SECONDS,
                stop=lambda seconds: off.wait(seconds) or self._closed.is_set(),
            )

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back. May be called twice."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, []
        for stub in idle:
            stub.close()
