"""Typed calls to a dispatcher."""

from __future__ import annotations

from headrace.service.messages import DispatcherReply
from headrace.serving.rpc import Stub
from headrace.transport import zeromq
from headrace.transport.security import Security

__all__ = ["DispatcherStub"]


class DispatcherStub(Stub):
    """One connection to a dispatcher, for one thread. All requests are idempotent.

    Args:
        address: "host:port" of the dispatcher, which need not be running yet.
        security: Keys, if the dispatcher requires them.
    """

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        channel = zeromq.connect(
            address, reply_type=DispatcherReply, security=security, shared_memory=False
        )
        super().__init__(channel, "dispatcher")
