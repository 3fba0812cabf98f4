"""Asking servers to save and restore: what takes long, and may be asked again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import AbortedError, UnavailableError
from headrace.parameter_server.connection import Servers
from headrace.parameter_server.messages import (
    Reborn,
    RestoreShards,
    SaveShards,
    ShardsRestored,
    ShardsSaved,
)
from headrace.transport.channel import Channel
from headrace.transport.retry import RetryPolicy, delays

__all__ = ["ask_for_files"]

_SLICE_SECONDS = 1.0
_POLICY = RetryPolicy(first_delay=0.05, max_delay=1.0)


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
    channels: dict[int, Channel] = {}
    try:
        for server in which:
            channels[server] = servers.connect(server)
            channels[server].send(build(server, servers.lives.known(server)))
        return {
            server: _answer(servers, server, channel, build, meets)
            for server, channel in channels.items()
        }
    finally:
        for channel in channels.values():
            channel.close()


def _answer(
    servers: Servers,
    server: int,
    channel: Channel,
    build: Callable[[int, str], SaveShards | RestoreShards],
    meets: bool,
) -> Any:
    until = time.monotonic() + servers.timeout
    waits = delays(_POLICY, random.random)
    while True:
        try:
            reply = channel.receive(_SLICE_SECONDS)
            if reply is None:
                servers.check_open()
                continue
            message = reply.message
            if isinstance(message, Exception):
                raise message
            if isinstance(message, ShardsSaved | ShardsRestored):
                servers.lives.met(server, message.life)
                return message
            assert isinstance(message, Reborn)
            if not meets:
                raise AbortedError(f"{servers.name_of(server)} was started again meanwhile")
            servers.lives.met(server, message.life)
        except UnavailableError as error:
            pause = next(waits)
            if time.monotonic() + pause > until:
                raise UnavailableError(
                    f"{servers.name_of(server)} did not answer for {servers.timeout:g} s: is it "
                    f"running, and is this its address? The last try: {error}"
                ) from error
            servers.pause(pause)
        channel.send(build(server, servers.lives.known(server)))
