"""Sending of replies, with counts of the bytes that connections have not taken yet.

ZeroMQ accepts everything and does not report when data was sent. But it releases a borrowed frame
once the kernel has it, and the frames of a connection are sent in order. So after each 64 KiB
written to a peer, one frame is lent and tracked; when it is released, everything written up to it
has been sent.

Rule 1. Counts change on the server's thread only. The release of a frame, on any thread, only
        appends to `_sent`.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from headrace.errors import UnavailableError
from headrace.process_metrics import count_reply_dropped, count_slow_connection_closed
from headrace.transport.envelope import ERROR, ReplyHeader, encode, encode_error
from headrace.transport.limits import ServerLimits
from headrace.transport.zeromq_peers import Peer

__all__ = ["QueuedReply", "ReplyWriter"]

_log = logging.getLogger(__name__)

_MIN_TRACKED_BYTES = 64 << 10
_SLACK_BYTES = 16 << 20
_NOW = int(zmq.DONTWAIT)
_MORE_NOW = int(zmq.DONTWAIT | zmq.SNDMORE)


class QueuedReply(NamedTuple):
    """One encoded reply and its peer."""

    peer: Peer
    request_id: int
    header: bytes
    buffers: Sequence[memoryview]


class ReplyWriter:
    """Writes replies to a ROUTER socket, within limits. Used by the server's thread only."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        limits: ServerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._limits = limits
        self._clock = clock
        self._tracked_frames: dict[int, weakref.ref[np.ndarray]] = {}
        self._numbers = itertools.count()
        self._sent: deque[tuple[Peer, int]] = deque()
        #: Bytes of replies that the connections of all peers have not taken yet.
        self.pending_bytes: int = 0

    def write(self, reply: QueuedReply) -> None:
        """Pass a reply to ZeroMQ, or an error in its place if too much is unread."""
        peer, request_id, header, buffers = reply
        if peer.is_disconnected:
            return
        size = len(header) + sum([view.nbytes for view in buffers])
        if size >= _MIN_TRACKED_BYTES and self._is_full(peer, size):
            count_reply_dropped()
            header, buffers = self._rejection_header(peer, request_id, size), ()
            size = len(header)
        peer.untracked_bytes += size
        if peer.untracked_bytes < _MIN_TRACKED_BYTES:
            self._send(peer, header, buffers)
            return
        self._count_sent()
        frames = [memoryview(header), *buffers]
        sizes = [frame.nbytes for frame in frames]
        largest = sizes.index(max(sizes))
        marked = np.frombuffer(frames[largest], np.uint8)
        amount, peer.untracked_bytes = peer.untracked_bytes, 0
        if not peer.pending_bytes:
            peer.last_progress_at = self._clock()
        peer.pending_bytes += amount
        self.pending_bytes += amount
        self._track_frame(marked, peer, amount)
        self._send(peer, header, buffers, largest, marked)
        if (
            peer.pending_bytes > self._limits.pending_reply_bytes + _SLACK_BYTES
            and size < _MIN_TRACKED_BYTES
        ):
            self._cut_peer(peer)  # it keeps sending requests and reads no replies

    def _is_full(self, peer: Peer, size: int) -> bool:
        self._count_sent()
        return peer.pending_bytes > 0 and (
            peer.pending_bytes + size > self._limits.pending_reply_bytes
            or self.pending_bytes + size > self._limits.total_pending_reply_bytes
        )

    def _rejection_header(self, peer: Peer, request_id: int, size: int) -> bytes:
        error = UnavailableError(
            f"a reply of {size:,} bytes was dropped because {peer.pending_bytes:,} "
            "bytes of earlier replies are unread; read them and send the request again"
        )
        return encode(ReplyHeader(request_id, ERROR, msgspec.Raw(encode_error(error))))

    def _track_frame(self, marked: np.ndarray, peer: Peer, amount: int) -> None:
        number, marks, sent = next(self._numbers), self._tracked_frames, self._sent

        def let_go(_: object) -> None:
            marks.pop(number, None)
            sent.append((peer, amount))

        marks[number] = weakref.ref(marked, let_go)

    def _count_sent(self) -> None:
        sent = self._sent
        if not sent:
            return
        now = self._clock()
        while sent:
            peer, amount = sent.popleft()
            peer.pending_bytes -= amount
            peer.last_progress_at = now
            self.pending_bytes -= amount

    def _send(
        self,
        peer: Peer,
        header: bytes,
        buffers: Sequence[memoryview],
        largest: int = -1,
        marked: np.ndarray | None = None,
    ) -> None:
        router = self._router
        has_started = False
        written = 0
        try:
            router.send(peer.route, _MORE_NOW)
            has_started = True
            if marked is not None and largest == 0:
                self._send_borrowed(marked, _MORE_NOW if buffers else _NOW)
            else:
                router.send(header, _MORE_NOW if buffers else _NOW)
            for index, view in enumerate(buffers, 1):
                flags = _NOW if index == len(buffers) else _MORE_NOW
                if marked is not None and index == largest:
                    self._send_borrowed(marked, flags)
                else:
                    router.send(view, flags, copy=False)
                written = index
        except BaseException as error:
            _log.warning("cannot send a reply: %s: %s", type(error).__name__, error)
            # The next reply would be read as the rest of this one. So it is completed with more
            # frames than announced, and the peer, which drops it for that, is disconnected.
            if has_started:
                for _ in range(written, len(buffers)):
                    router.send(b"", _MORE_NOW)
                router.send(b"", _NOW)
            self._cut_peer(peer)
            if not isinstance(error, zmq.ZMQError):
                raise

    def _send_borrowed(self, frame: np.ndarray, flags: int) -> None:
        # However small: ZeroMQ would release a copied frame at once.
        self._router.send(zmq.Frame(frame, copy=False, copy_threshold=0), flags, copy=False)

    def cut_stalled_peers(self, peers: Iterable[Peer]) -> None:
        """Disconnect peers that have stopped reading while a limit is nearly reached."""
        self._count_sent()
        limits = self._limits
        crowded = self.pending_bytes + _MIN_TRACKED_BYTES > limits.total_pending_reply_bytes
        oldest = self._clock() - limits.stall_seconds
        for peer in peers:
            if (
                peer.pending_bytes
                and peer.last_progress_at < oldest
                and (crowded or 2 * peer.pending_bytes > limits.pending_reply_bytes)
            ):
                self._cut_peer(peer)

    def _cut_peer(self, peer: Peer) -> None:
        if not peer.is_disconnected:
            count_slow_connection_closed()
            _log.warning(
                "closed the connection to a stalled peer with %s unread bytes",
                f"{peer.pending_bytes:,}",
            )
        peer.disconnect()
