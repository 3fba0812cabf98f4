"""Compression of replies on separate threads, for clients that request it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.element import frame_compression
from headrace.service.messages import GetElements
from headrace.service.worker.batch_frames import batch_frame
from headrace.service.worker.result_batch import BatchReply, ResultBatch
from headrace.transport.channel import Buffer, Request

__all__ = ["ReplyCompressor"]

_MIN_BYTES = 16 << 10
_THREADS = 2

SendReply = Callable[[Request, BatchReply, Callable[[ResultBatch], Sequence[Buffer]]], None]


class ReplyCompressor:
    """Sends replies, compressed if requested.

    Args:
        send: Sends a reply, given the function that encodes its batch.
    """

    def __init__(self, send: SendReply) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._thread_pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def send(self, request: Request, content: BatchReply) -> None:
        """Send a reply, now or soon."""
        message = request.message
        codec = message.codec if isinstance(message, GetElements) else ""
        if codec and isinstance(content, ResultBatch) and content.size >= _MIN_BYTES:
            with self._lock:
                if not self._is_closed:
                    self._thread_pool = self._thread_pool or ThreadPoolExecutor(
                        _THREADS, "headrace-pack"
                    )
                    self._thread_pool.submit(
                        self._send,
                        request,
                        content,
                        lambda batch: frame_compression.compress_frame(batch_frame(batch), codec),
                    )
                    return
        self._send(request, content, batch_frame)

    def close(self) -> None:
        """Stop compressing; pending replies are dropped, because the server closes as well."""
        with self._lock:
            self._is_closed = True
        if self._thread_pool is not None:
            self._thread_pool.shutdown(cancel_futures=True)
