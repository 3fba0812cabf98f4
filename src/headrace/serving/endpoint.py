"""HTTP endpoint for monitoring a server.

    /metrics    for Prometheus
    /healthz    200 while the server's process can answer at all
    /readyz     200 once the server is ready; 503 with the reason before

It runs on a separate thread, and never blocks on the server's work. It is read-only, and exposes no
user data.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from headrace.forks import register_fork_sensitive
from headrace.process_metrics import REGISTRY
from headrace.transport import address as addresses

__all__ = ["Endpoint"]

_log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
"""Seconds within which a request must arrive and be answered."""
_MAX_CONNECTIONS = 32
"""Concurrent connections; each needs a thread and a descriptor, and clients are unauthenticated."""
_POLL_SECONDS = 0.1
_CREATED = "_created"
_TEXT = "text/plain; charset=utf-8"


class Endpoint:
    """Serves the three pages until it is closed.

    Args:
        host: Interface to listen on.
        port: Port to listen on; 0 takes a free one.
        metrics: Returns the server's metrics; those of the process are added.
        not_ready_reason: Returns why the server is not ready; empty if it is.

    Raises:
        OSError: If the port is in use, or the host is not an address of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Callable[[], Iterable[Metric]],
        not_ready_reason: Callable[[], str],
    ) -> None:
        self._pages: dict[str, Callable[[str], tuple[HTTPStatus, str, bytes]]] = {
            "/metrics": lambda accept: _metrics(_CombinedMetrics(metrics), accept),
            "/healthz": lambda accept: (HTTPStatus.OK, _TEXT, b"ok\n"),
            "/readyz": lambda accept: _readiness(not_ready_reason()),
        }
        try:
            self._server = _Server(host, port, self._pages)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot serve metrics at port {port} of {host} ({error.strerror}); choose "
                "another port, or 0 for a free one",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="headrace-metrics",
            daemon=True,
        )
        register_fork_sensitive(self)
        self._forked = False
        self._thread.start()

    @property
    def address(self) -> str:
        """Address at which it listens, as "host:port"."""
        host, port = self._server.socket.getsockname()[:2]
        return addresses.join(host, port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._forked:
            return
        self._server.shutdown()
        self._server.server_close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def after_fork_in_child(self) -> None:
        """Close the child's copy of the port; the child has no thread."""
        self._forked = True
        self._server.socket.close()


class _Server(socketserver.ThreadingTCPServer):
    """HTTP server on which slow connections delay neither others nor the end of the process.

    The accepting thread closes slow connections, and rejects those above the limit.
    """

    allow_reuse_address = True
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        host: str,
        port: int,
        pages: dict[str, Callable[[str], tuple[HTTPStatus, str, bytes]]],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        #: Start time by connection.
        self._since: dict[Any, float] = {}
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._since) >= _MAX_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are too slow; called every tenth of a second."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > _TIMEOUT_SECONDS:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("cannot send a reply to %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            pages_text = "there are " + ", ".join(self.server.pages) + "\n"
            status, kind, body = HTTPStatus.NOT_FOUND, _TEXT, pages_text.encode()
        else:
            try:
                status, kind, body = page(self.headers.get("Accept") or "")
            except Exception as error:
                _log.debug("cannot serve %s", self.path, exc_info=True)
                message = f"{type(error).__name__}: {error}\n"
                status, kind, body = HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, message.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class _CombinedMetrics:
    """Metrics of the process and of one server in it."""

    def __init__(self, server_metrics: Callable[[], Iterable[Metric]]) -> None:
        self._server_metrics = server_metrics

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            # The creation times of counters add nothing to the start time of the process.
            metric.samples = [each for each in metric.samples if not each.name.endswith(_CREATED)]
            yield metric
        yield from self._server_metrics()


def _metrics(metrics: Any, accept: str) -> tuple[HTTPStatus, str, bytes]:
    encode, kind = choose_encoder(accept)
    return HTTPStatus.OK, kind, encode(metrics)


def _readiness(reason: str) -> tuple[HTTPStatus, str, bytes]:
    if reason:
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"not ready: {reason}\n".encode()
    return HTTPStatus.OK, _TEXT, b"ready\n"
