"""A poller: one thread waits for replies on many channels.

Rule 1. The channels of a poller belong to the thread that calls `wait`; only `wake` may be called
        from other threads.
Rule 2. `wait` returns everything that has arrived on any channel: replies, and the error of a lost
        connection in place of the replies that were lost with it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from headrace.errors import HeadraceError
from headrace.transport.channel import Channel, Reply

__all__ = ["ChannelPoller"]

_MAX_REPLIES_PER_CHANNEL = 64
"""Number of replies taken from one channel before the others get their turn."""


class ChannelPoller:
    """Waits on several channels, and for a wake-up."""

    def __init__(self) -> None:
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = False
        self._lock = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup_fd, zmq.POLLIN)
        #: Sockets that the ZeroMQ poller watches for each channel.
        self._watched: dict[Channel, Sequence[Any]] = {}
        self._owners: dict[Any, Channel] = {}
        self._closed = False

    def add(self, channel: Channel) -> None:
        """Add a channel to wait on."""
        self._watched[channel] = ()
        channel.set_wakeup(self.wake)

    def remove(self, channel: Channel) -> None:
        """Stop waiting on a channel; must be called before it is closed."""
        self._watch(channel, ())
        self._watched.pop(channel, None)
        channel.set_wakeup(None)

    def wake(self) -> None:
        """End the current wait, or the next one. Thread-safe."""
        if self._is_woken:
            return
        # Under the lock: the number of a closed eventfd may belong to another file by now.
        with self._lock:
            if not self._closed:
                self._is_woken = True
                os.eventfd_write(self._wakeup_fd, 1)

    def wait(self, timeout: float) -> list[tuple[Channel, Reply | HeadraceError]]:
        """Return what has arrived, after at most `timeout` seconds or a wake-up; may be empty."""
        events = self._collect([channel for channel in self._watched if channel.has_pending])
        if events:
            return events
        for channel in self._watched:
            self._watch(channel, channel.sockets())
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            # Rounded up: a wait of less than a millisecond must not become a busy loop.
            ready = self._poller.poll(
                None if remaining == math.inf else max(0, math.ceil(remaining * 1000))
            )
            woken = any(each == self._wakeup_fd for each, _ in ready)
            if woken:
                # In this order: a wake-up in between is covered by this return.
                os.eventfd_read(self._wakeup_fd)
                self._is_woken = False
            channels = {self._owners[each] for each, _ in ready if each in self._owners}
            if woken:  # possibly by a channel without sockets
                channels.update(each for each, sockets in self._watched.items() if not sockets)
            events = self._collect(list(channels))
            if events or woken or remaining <= 0:
                return events

    def _collect(self, channels: Sequence[Channel]) -> list[tuple[Channel, Reply | HeadraceError]]:
        events: list[tuple[Channel, Reply | HeadraceError]] = []
        for channel in channels:
            for _ in range(_MAX_REPLIES_PER_CHANNEL):
                try:
                    reply = channel.receive(0.0)
                except HeadraceError as error:
                    events.append((channel, error))
                    break
                if reply is None:
                    break
                events.append((channel, reply))
        return events

    def _watch(self, channel: Channel, sockets: Sequence[Any]) -> None:
        before = self._watched.get(channel, ())
        if tuple(before) == tuple(sockets):
            return
        for each in before:
            self._poller.unregister(each)
            del self._owners[each]
        for each in sockets:
            self._poller.register(each, zmq.POLLIN)
            self._owners[each] = channel
        self._watched[channel] = tuple(sockets)

    def close(self) -> None:
        """Close the eventfd, and leave the channels open. Idempotent."""
        for channel in list(self._watched):
            self.remove(channel)
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wakeup_fd)
