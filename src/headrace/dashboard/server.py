"""Web server of the dashboard."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Self

import uvicorn

from headrace.dashboard.access import AccessPolicy
from headrace.dashboard.app import make_app
from headrace.dashboard.sampler import StatusSampler
from headrace.transport import address as addresses

__all__ = ["Dashboard"]

_MAX_CONNECTIONS = 100
_POLL_SECONDS = 0.01
_STOP_SECONDS = 1
"""Seconds that open connections get when the server stops."""


class Dashboard:
    """Serves the page until it is stopped; a context manager.

    >>> from headrace.dashboard.server import Dashboard
    >>> with hr.service.LocalCluster(num_workers=1, processes=False) as cluster:
    ...     with Dashboard(cluster.target.removeprefix("tcp://")) as dashboard:
    ...         print(dashboard.url.rpartition(":")[0])
    http://127.0.0.1

    A token is required if other machines can reach the page. It is also required with keys, because
    other users of this machine, who have no keys, can reach the page, too.

    Args:
        address: Address of the dispatcher, coordinator or parameter server.
        host: Address to listen at.
        port: Port to listen at; 0 picks a free port.
        keys: Directory of keys; None without keys.

    Raises:
        typer.BadParameter: If an argument is invalid.
    """

    def __init__(
        self, address: str, *, host: str = "127.0.0.1", port: int = 0, keys: Path | None = None
    ) -> None:
        self._host = host
        self._port = port
        needs_token = keys is not None or not addresses.is_loopback(host)
        self._policy = AccessPolicy(secrets.token_urlsafe(24) if needs_token else "")
        self._sampler = StatusSampler(address, keys)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start serving; return when the server is ready.

        Raises:
            OSError: If the port is in use, or the host is not an address of this machine.
        """
        try:
            listener = _listen(self._host, self._port)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot serve the dashboard at port {self._port} of {self._host} "
                f"({error.strerror}); choose another port, or 0 for a free one",
            ) from error
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(self._sampler, self._policy),
            # Its log would contain the token.
            access_log=False,
            log_config=None,
            log_level="critical",
            lifespan="off",
            limit_concurrency=_MAX_CONNECTIONS,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listener]},
            name="headrace-dashboard",
            daemon=True,
        )
        self._sampler.start()
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the web server of the dashboard ended while it started")
            time.sleep(_POLL_SECONDS)

    @property
    def url(self) -> str:
        """URL to open, with the token if one is required."""
        host = self._host
        if addresses.is_wildcard(host):
            host = socket.gethostname()
        query = f"?token={self._policy.token}" if self._policy.token else ""
        return f"http://{addresses.join(host, self._port)}/{query}"

    @property
    def metrics_address(self) -> str:
        """Empty: the dashboard has no metrics."""
        return ""

    def stop(self) -> None:
        """Stop serving. Idempotent, and allowed before `start`."""
        self._sampler.stop()  # ends the streams of events
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        "0.0.0.0" if host == "*" else host, port, type=socket.SOCK_STREAM
    )[0]
    return socket.create_server(address[:2], family=family)
