"""Who may see the dashboard: the checks of the Host header and of the token, without a web server.

A page of any site can make a browser send requests to this machine, and read the answers if the
site's name resolves to 127.0.0.1 (DNS rebinding). Such a request has the site's name in its Host
header, so a dashboard without a token answers only to names of the loopback interface. With a
token, the cookie proves that the user opened the printed URL, and browsers send it to the host that
set it only.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from headrace.transport import address as addresses

__all__ = ["AccessPolicy"]


@dataclass(frozen=True)
class AccessPolicy:
    """Decides about requests.

    Attributes:
        token: Token that requests must have; empty if none is required.
    """

    token: str = ""

    def allows_host(self, host: str | None) -> bool:
        """Return whether a request with this Host header is answered.

        Ports are not compared, because they differ with port forwarding.
        """
        if not host:
            return False
        name = host.rpartition(":")[0] if _has_port(host) else host
        name = name.removeprefix("[").removesuffix("]").rstrip(".").lower()
        return bool(self.token) or name.endswith(".localhost") or addresses.is_loopback(name)

    @property
    def cookie(self) -> str:
        """Name of the cookie with the token.

        Browsers send a cookie to all ports of a host, so two dashboards of one host need two names.
        """
        return f"headrace-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def allows_token(self, token: str | None) -> bool:
        """Return whether a request with this token may see the page; None without a token."""
        if not self.token:
            return True
        # Bytes, because strings must be ASCII.
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit() and not host.endswith("]")
