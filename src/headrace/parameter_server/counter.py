"""How many steps an optimizer has taken: a number on a parameter server."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.parameter_server.connection import Ask
from headrace.parameter_server.current import Cluster, cluster_of
from headrace.parameter_server.operations import Answer, Count, Counted
from headrace.parameter_server.origin import next_key

__all__ = ["COUNTING_SERVER", "Counter", "counters_of", "steps_of"]

COUNTING_SERVER = 0
"""Which server counts steps."""

_SUFFIX = "/iterations"


def steps_of(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the steps of optimizers among the counters of a server, by their names."""
    return {
        name.removesuffix(_SUFFIX): count
        for name, count in counters.items()
        if name.endswith(_SUFFIX)
    }


def counters_of(steps: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of a server, by their names, for the steps of optimizers."""
    return {f"{name}{_SUFFIX}": count for name, count in steps.items()}


class Counter:
    """The steps of all optimizers of one name in one cluster; a handle.

    Args:
        cluster_id: Of the cluster that counts.
        optimizer: Name of the optimizer.
    """

    def __init__(self, cluster_id: str, optimizer: str) -> None:
        self._cluster_id = cluster_id
        self.name = f"{optimizer}{_SUFFIX}"

    def __call__(self) -> int:
        """Ask the server that counts."""
        cluster = cluster_of(self._cluster_id, f"the counter {self.name!r}")
        seen = cluster.counters.get(self.name, 0)
        answer, _ = cluster.servers.ask(COUNTING_SERVER, Count(self.name, 0, seen=seen))
        return self.counted(cluster, answer).after

    def advance(self, cluster: Cluster, steps: int) -> None:
        """Count so many steps more."""
        operation = Count(self.name, steps, next_key(self.name), cluster.counters.get(self.name, 0))
        answer, _ = cluster.servers.ask(COUNTING_SERVER, operation)
        self.counted(cluster, answer)

    def step(self, cluster: Cluster) -> Ask:
        """Return what is to be asked for one more step."""
        seen = cluster.counters.get(self.name, 0)
        return Ask(COUNTING_SERVER, Count(self.name, 1, next_key(self.name), seen))

    def counted(self, cluster: Cluster, answer: Answer) -> Counted:
        """Take note of an answer, and return it."""
        assert isinstance(answer, Counted)
        cluster.counters[self.name] = answer.after
        return answer
