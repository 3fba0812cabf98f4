"""Waiting in the main thread for a signal, without exceptions out of nowhere and without races."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self, TextIO

from headrace.forks import in_each_child

__all__ = ["STOP_SIGNALS", "Signals"]

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


class Signals:
    """Collects signals while the `with` block lasts; `wait` tells which came.

    A signal that arrives before `wait` is not lost, and none interrupts what the main thread is
    doing, so that starting and stopping are never left half done.
    """

    def __init__(self, *, children: bool = False) -> None:
        self._wanted = STOP_SIGNALS | ({signal.SIGCHLD} if children else set())

    def __enter__(self) -> Self:
        """Take the signals over from Python's own handlers."""
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {
            number: signal.signal(number, _leave_it_to_the_wakeup) for number in self._wanted
        }
        _taken_over.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        _taken_over.remove(self)
        self._restore(self._wakeup_before)
        self._receiver.close()
        self._sender.close()

    def _restore(self, wakeup: int) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)

    def wake(self) -> None:
        """Let `wait` return without a signal; called from any thread, at any time."""
        # A full buffer wakes as well as one byte more would; after the block nobody waits.
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")

    def wait(
        self,
        timeout: float | None = None,
        closing: Sequence[TextIO] = (),
        readable: Sequence[TextIO] = (),
    ) -> frozenset[signal.Signals]:
        """Wait for signals, or a call of `wake`; return the signals that came.

        Args:
            timeout: Seconds to wait, or None for as long as it takes.
            closing: Streams that tell by closing that whoever started us is gone, which counts as
                SIGTERM.
            readable: Streams that end the wait, too, when something can be read from them.
        """
        watched: list[socket.socket | TextIO] = [self._receiver, *closing, *readable]
        ready, _, _ = select.select(watched, [], [], timeout)
        numbers = set(self._receiver.recv(4096)) if self._receiver in ready else set()
        if any(stream in ready for stream in closing):
            numbers.add(signal.SIGTERM)
        return frozenset(number for number in self._wanted if number in numbers)


def _give_back_in_a_child() -> None:
    # A process that a user's function forks has nobody who waits; what it was sent would be heard
    # in this one, through the socket that both have.
    for each in reversed(_taken_over):
        each._restore(-1)
    _taken_over.clear()


_taken_over: list[Signals] = []
in_each_child(_give_back_in_a_child)


def _leave_it_to_the_wakeup(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number was written to the socket already."""
