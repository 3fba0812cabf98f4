"""Authentication for a server with keys: answers ZeroMQ's requests at each handshake."""

from __future__ import annotations

import contextlib
import logging
from typing import Literal

import zmq
import zmq.auth

from headrace.transport.security import AllowList, Security

__all__ = ["Authenticator"]

_log = logging.getLogger(__name__)

_MAX_WARNED_ADDRESSES = 1000


class Authenticator:
    """The authenticator of one ZeroMQ context, for one ROUTER. Used by the server's thread only."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], security: Security
    ) -> None:
        security.apply(router, "server")
        self._allow_list = AllowList.of(security)
        self._was_refused = False
        self._warned_addresses: set[str] = set()
        self._authenticator = zmq.auth.Authenticator(context, log=_log)
        self._authenticator.configure_curve_callback(domain="headrace", credentials_provider=self)
        self._authenticator.start()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when a handshake waits; then call `authenticate_next`."""
        found: zmq.Socket[bytes] = self._authenticator.zap_socket
        return found

    def authenticate_next(self) -> None:
        """Accept or reject one peer; warn once for each address that was rejected."""
        message = self._authenticator.zap_socket.recv_multipart()
        self._was_refused = False
        # The handler is a coroutine that never waits, because the callback is a plain function.
        with contextlib.suppress(StopIteration):
            self._authenticator.handle_zap_message(message).send(None)
        if not self._was_refused:
            return
        # RFC 27/ZAP: version, request id, domain, address, ...
        host = message[3].decode("ascii", "replace").removeprefix("::ffff:")
        if (
            host not in self._warned_addresses
            and len(self._warned_addresses) < _MAX_WARNED_ADDRESSES
        ):
            self._warned_addresses.add(host)
            _log.warning("refused a connection from %s: its key is not authorized", host)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a public key is accepted; called by pyzmq's authenticator."""
        self._was_refused = not self._allow_list.callback(domain, key)
        return not self._was_refused

    def role_of(self, key: bytes) -> Literal["worker", "client"] | None:
        """Return the role of an accepted peer with this public key."""
        return self._allow_list.role_of(key.decode("ascii", "replace"))

    def close(self) -> None:
        self._authenticator.stop()
