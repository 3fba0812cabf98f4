"""How many steps an optimizer has taken: a number on a parameter server."""

from __future__ import annotations

from headrace.parameter_server.current import cluster_of
from headrace.parameter_server.operations import Count, Counted

__all__ = ["COUNTING_SERVER", "Counter"]

COUNTING_SERVER = 0
"""Which server counts steps."""


class Counter:
    """The steps of all optimizers of one name in one cluster; a handle.

    Args:
        cluster_id: Of the cluster that counts.
        optimizer: Name of the optimizer.
    """

    def __init__(self, cluster_id: str, optimizer: str) -> None:
        self._cluster_id = cluster_id
        self.name = f"{optimizer}/iterations"

    def __call__(self) -> int:
        """Ask the server that counts."""
        cluster = cluster_of(self._cluster_id, f"the counter {self.name!r}")
        answer, _ = cluster.servers.ask(COUNTING_SERVER, Count(self.name, 0))
        assert isinstance(answer, Counted)
        return answer.after
