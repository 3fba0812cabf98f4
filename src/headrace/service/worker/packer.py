"""Packs answers for clients that asked for it, on a thread of its own: it takes a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.element import packing
from headrace.service.messages import GetElements
from headrace.service.worker.portion import Answer, Portion
from headrace.service.worker.sending import frame_of
from headrace.transport.channel import Buffer, Request

__all__ = ["Packer"]

_LEAST_BYTES = 16 << 10
_THREADS = 2

Send = Callable[[Request, Answer, Callable[[Portion], Sequence[Buffer]]], None]


class Packer:
    """Sends answers, packed where that was asked for.

    Args:
        send: Sends one, given what makes its frame.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._is_closed = False

    def answer(self, request: Request, content: Answer) -> None:
        """Send an answer, now or soon."""
        message = request.message
        codec = message.codec if isinstance(message, GetElements) else ""
        if codec and isinstance(content, Portion) and content.size >= _LEAST_BYTES:
            with self._lock:
                if not self._is_closed:
                    self._threads = self._threads or ThreadPoolExecutor(_THREADS, "headrace-pack")
                    self._threads.submit(
                        self._send,
                        request,
                        content,
                        lambda portion: packing.pack(frame_of(portion), codec),
                    )
                    return
        self._send(request, content, frame_of)

    def close(self) -> None:
        """Pack nothing more; what was not begun is given up, for the server closes as well."""
        with self._lock:
            self._is_closed = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
