"""Asking servers to save and restore: what takes long, and may be asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import AbortedError, UnavailableError
from headrace.parameter_server.messages import (
    NotLeader,
    RestoreShards,
    SaveShards,
    ShardsRestored,
    ShardsSaved,
    StateLost,
)
from headrace.parameter_server.server_requests import NO_STATE_MESSAGE, ParameterServerClient
from headrace.parameter_server.write_context import current_pending_steps, wait_for_steps
from headrace.transport.channel import Channel

__all__ = ["request_files"]

_POLL_SECONDS = 1.0


def request_files(
    servers: ParameterServerClient,
    server_indices: Sequence[int],
    build: Callable[[int, str], SaveShards | RestoreShards],
    *,
    handles_restart: bool = True,
) -> dict[int, Any]:
    """Ask servers to save or restore, all at a time; return their answers.

    Args:
        servers: Those of the cluster.
        server_indices: Their numbers.
        build: Takes a server and its life, and returns what to ask.
        handles_restart: Whether a server that was started again is seen to first, and then asked
            again.

    Raises:
        UnavailableError: A server could not be reached in time.
        AbortedError: One was started again, and `handles_restart` is false.
        HeadraceError: What a server answered with.
    """
    wait_for_steps(
        current_pending_steps()
    )  # what is sent here does not come after what is sent on a thread's lines
    calls: dict[int, _FileCall] = {}
    try:
        for server in server_indices:
            calls[server] = _FileCall(servers, server, build)
            calls[server].send()
        return {
            server: _wait_for_reply(servers, call, handles_restart)
            for server, call in calls.items()
        }
    finally:
        for call in calls.values():
            call.close()


class _FileCall:
    """What one server is asked, at its address, or at that of another that has the same."""

    def __init__(
        self,
        servers: ParameterServerClient,
        server: int,
        build: Callable[[int, str], SaveShards | RestoreShards],
    ) -> None:
        self.server = server
        self._servers = servers
        self._build = build
        self._channel: Channel | None = None
        self.target_server = -1

    def send(self) -> None:
        """Send it, to whoever is to be asked now."""
        servers, asked = self._servers, self._servers.leaders.find_server(self.server)
        if self._channel is None or asked != self.target_server:
            self.close()
            self._channel, self.target_server = servers.connect(asked), asked
        life = servers.states.state_id(self.server)
        message = self._build(self.server, life)
        seen = servers.states.acknowledged_position(self.server, life)
        self._channel.send(servers.leaders.address_message(message, self.server, seen))

    def receive(self) -> Any:
        """Return what arrives in a while; None: nothing did."""
        assert self._channel is not None
        reply = self._channel.receive(_POLL_SECONDS)
        return None if reply is None else reply.message

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()


def _wait_for_reply(servers: ParameterServerClient, call: _FileCall, handles_restart: bool) -> Any:
    server = call.server
    patience = servers.start_wait(server, "save or restore shards")
    while True:
        try:
            message = call.receive()
            if message is None:
                servers.check_open()
                patience.warn_if_due("has not answered")
                continue
            if isinstance(message, Exception):
                raise message
            if isinstance(message, ShardsSaved | ShardsRestored):
                servers.states.record_state(server, message.state_id, position=message.position)
                return message
            if isinstance(message, NotLeader):
                servers.handle_not_leader(server, call.target_server, message)
            else:
                assert isinstance(message, StateLost)
                if not handles_restart:
                    raise AbortedError(
                        f"{servers.describe_server(server)} was started again meanwhile"
                    )
                servers.states.record_state(server, message.state_id)
        except UnavailableError as error:
            servers.leaders.record_unavailable(server, call.target_server)
            patience.wait_before_retry(error)
        else:
            if isinstance(message, NotLeader):
                patience.wait_before_retry(UnavailableError(NO_STATE_MESSAGE))
        call.send()
