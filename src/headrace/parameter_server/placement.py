"""On which server the next shard goes: arithmetic that each process repeats alike."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

__all__ = ["ByBytes", "Placement", "PlacementKind", "RoundRobin", "placement"]

PlacementKind = Literal["round_robin", "bytes"]


class Placement(Protocol):
    """Deals shards to servers, one after another."""

    def place(self, shard_bytes: int) -> int:
        """Return the index of the server that the next shard goes to, and remember it."""


class RoundRobin:
    """The k-th shard goes to server k modulo their number."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._placed = 0

    def place(self, shard_bytes: int) -> int:
        """Return the next server in turn."""
        server = self._placed % self._servers
        self._placed += 1
        return server


class ByBytes:
    """A shard goes to the server that has the fewest bytes.

    So no server has more than the mean and the largest shard, and none more than 1.05 times the
    mean when no shard exceeds 5 % of it. Among equals the one with the fewest shards is chosen,
    then the first: shards without bytes go round.
    """

    def __init__(self, servers: int) -> None:
        self._bytes = [0] * servers
        self._shards = [0] * servers

    def place(self, shard_bytes: int) -> int:
        """Return the server that has the least."""
        server = min(
            range(len(self._bytes)),
            key=lambda index: (self._bytes[index], self._shards[index], index),
        )
        self._bytes[server] += shard_bytes
        self._shards[server] += 1
        return server


_KINDS: dict[str, type[RoundRobin] | type[ByBytes]] = {"round_robin": RoundRobin, "bytes": ByBytes}


def placement(kind: str, servers: int) -> Placement:
    """Return what deals shards to so many servers.

    Raises:
        ValueError: There is no placement of this name, or no server.
    """
    if kind not in _KINDS:
        raise ValueError(
            f"`placement` must be one of {', '.join(get_args(PlacementKind))}, but got {kind!r}"
        )
    if servers < 1:
        raise ValueError(f"`servers` must be at least 1, but got {servers}")
    return _KINDS[kind](servers)
