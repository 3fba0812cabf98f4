"""Save and restore requests to servers, which take long and may be repeated."""

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
    """Ask servers to save or restore, in parallel; return their replies.

    Args:
        servers: Client of the cluster's servers.
        server_indices: Indices of the servers.
        build: Returns the request for a server and its state id.
        handles_restart: Whether the request is repeated after a restarted server has been
            recovered.

    Raises:
        UnavailableError: If a server was unreachable for too long.
        AbortedError: If a server was restarted, and `handles_restart` is false.
        HeadraceError: If a server replied with an error.
    """
    wait_for_steps(
        current_pending_steps()
    )  # these requests are not ordered after those on the thread's connections
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
    """Request to one server, or to the other replica of its store."""

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
        """Send the request to the server that is expected to lead the store."""
        servers, target = self._servers, self._servers.leaders.find_server(self.server)
        if self._channel is None or target != self.target_server:
            self.close()
            self._channel, self.target_server = servers.connect(target), target
        state_id = servers.states.state_id(self.server)
        message = self._build(self.server, state_id)
        position = servers.states.acknowledged_position(self.server, state_id)
        self._channel.send(servers.leaders.address_message(message, self.server, position))

    def receive(self) -> Any:
        """Return the next message, or None if none arrived in 1 s."""
        assert self._channel is not None
        reply = self._channel.receive(_POLL_SECONDS)
        return None if reply is None else reply.message

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()


def _wait_for_reply(servers: ParameterServerClient, call: _FileCall, handles_restart: bool) -> Any:
    server = call.server
    wait = servers.start_wait(server, "save or restore shards")
    while True:
        try:
            message = call.receive()
            if message is None:
                servers.check_open()
                wait.warn_if_due("no reply")
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
                        f"{servers.describe_server(server)} was restarted during the request"
                    )
                servers.states.record_state(server, message.state_id)
        except UnavailableError as error:
            servers.leaders.record_unavailable(server, call.target_server)
            wait.wait_before_retry(error)
        else:
            if isinstance(message, NotLeader):
                wait.wait_before_retry(UnavailableError(NO_STATE_MESSAGE))
        call.send()
