"""Asking servers to save and restore: what takes long, and may be asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import AbortedError, UnavailableError
from headrace.parameter_server.connection import NOTHING_HERE, Servers
from headrace.parameter_server.messages import (
    Elsewhere,
    Reborn,
    RestoreShards,
    SaveShards,
    ShardsRestored,
    ShardsSaved,
)
from headrace.parameter_server.origin import finish, under_way
from headrace.transport.channel import Channel

__all__ = ["ask_for_files"]

_SLICE_SECONDS = 1.0


def ask_for_files(
    servers: Servers,
    which: Sequence[int],
    build: Callable[[int, str], SaveShards | RestoreShards],
    *,
    meets: bool = True,
) -> dict[int, Any]:
    """Ask servers to save or restore, all at a time; return their answers.

    Args:
        servers: Those of the cluster.
        which: Their numbers.
        build: Takes a server and its life, and returns what to ask.
        meets: Whether a server that was started again is seen to first, and then asked again.

    Raises:
        UnavailableError: A server could not be reached in time.
        AbortedError: One was started again, and `meets` is false.
        HeadraceError: What a server answered with.
    """
    finish(under_way())  # what is sent here does not come after what is sent on a thread's lines
    calls: dict[int, _Call] = {}
    try:
        for server in which:
            calls[server] = _Call(servers, server, build)
            calls[server].begin()
        return {server: _answer(servers, call, meets) for server, call in calls.items()}
    finally:
        for call in calls.values():
            call.close()


class _Call:
    """What one server is asked, at its address, or at that of another that has the same."""

    def __init__(
        self,
        servers: Servers,
        server: int,
        build: Callable[[int, str], SaveShards | RestoreShards],
    ) -> None:
        self.server = server
        self._servers = servers
        self._build = build
        self._channel: Channel | None = None
        self.asked = -1

    def begin(self) -> None:
        """Send it, to whoever is to be asked now."""
        servers, asked = self._servers, self._servers.leaders.server_of(self.server)
        if self._channel is None or asked != self.asked:
            self.close()
            self._channel, self.asked = servers.connect(asked), asked
        life = servers.lives.known(self.server)
        message = self._build(self.server, life)
        seen = servers.lives.seen(self.server, life)
        self._channel.send(servers.leaders.to_store(message, self.server, seen))

    def receive(self) -> Any:
        """Return what arrives in a while; None: nothing did."""
        assert self._channel is not None
        reply = self._channel.receive(_SLICE_SECONDS)
        return None if reply is None else reply.message

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()


def _answer(servers: Servers, call: _Call, meets: bool) -> Any:
    server = call.server
    patience = servers.patience(server, "save or restore shards")
    while True:
        try:
            message = call.receive()
            if message is None:
                servers.check_open()
                patience.say("has not answered")
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, ShardsSaved | ShardsRestored):
                servers.lives.met(server, message.life, position=message.position)
                return message
            if isinstance(message, Elsewhere):
                servers.is_elsewhere(server, call.asked, message)
            else:
                assert isinstance(message, Reborn)
                if not meets:
                    raise AbortedError(f"{servers.name_of(server)} was started again meanwhile")
                servers.lives.met(server, message.life)
        except UnavailableError as error:
            servers.leaders.is_gone(server, call.asked)
            patience.wait(error)
        else:
            if isinstance(message, Elsewhere):
                patience.wait(UnavailableError(NOTHING_HERE))
        call.begin()
