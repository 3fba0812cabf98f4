"""Rounds of closures: for each step that several took, the mean of their gradients is pushed once.

Rule 1. The n-th steps that closures took with one optimizer become one step.
Rule 2. Its gradients are means over the closures that took the step; where one of them has none for
        a variable, it counts as zero.
Rule 3. Sums are made in the order in which closures are given, so that the same closures give the
        same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.parameter_server.acknowledged import Acknowledged
from headrace.parameter_server.connection import Servers
from headrace.parameter_server.operations import Fence, Settle
from headrace.parameter_server.origin import Origin, writing_as
from headrace.parameter_server.pushing import TakenStep, push, sum_steps

__all__ = ["ClosureServers", "mean_steps", "push_round"]


_FIRST_WRITE = 1 << 32

"""Keys of a round are those of its last closure, beyond all that a function writes itself."""


def mean_steps(closures: Sequence[Sequence[TakenStep]]) -> list[TakenStep]:
    """Return the steps of a round, in the order in which they first occur.

    Args:
        closures: The steps that each closure took, in their order.

    Raises:
        FailedPreconditionError: Some have a dense gradient and some a sparse one for a variable.
    """
    steps: dict[tuple[str, int], list[TakenStep]] = {}
    for taken in closures:
        counts: dict[str, int] = {}
        for step in taken:
            name = step.optimizer.name
            place = counts[name] = counts.get(name, -1) + 1
            steps.setdefault((name, place), []).append(step)
    return [_mean(each) for each in steps.values()]


def _mean(steps: Sequence[TakenStep]) -> TakenStep:
    total = sum_steps(steps, "functions of a round")
    count = len(steps)
    return total._replace(
        gradients=[
            each._replace(values=each.values / each.values.dtype.type(count))
            for each in total.gradients
        ]
    )


def push_round(incarnation: int, last: int, closures: Sequence[Sequence[TakenStep]]) -> None:
    """Push the steps of a round; what a server carried out already it does not do again.

    Args:
        incarnation: Of the coordinator.
        last: Number of the round's last closure, whose keys are not forgotten yet.
        closures: The steps that each closure took.
    """
    # No worker has number 0, so nobody fences this one.
    with writing_as(Origin(incarnation, last, worker=0, first=_FIRST_WRITE)):
        for step in mean_steps(closures):
            push(step)


# --------------------------------------------------------------------------------------------------
# What servers are told about closures: which have settled, whose writes to refuse, their mean


class ClosureServers:
    """The parameter servers, as far as the closures of one coordinator go.

    Making it fences all earlier coordinators; a server that comes back is told again.

    Args:
        servers: Those of the cluster.
        incarnation: Of the coordinator; a later one's is larger.

    Raises:
        UnavailableError: A server cannot be reached.
    """

    def __init__(self, servers: Servers, incarnation: int) -> None:
        self._servers = servers
        self._incarnation = incarnation
        servers.ask_each(Fence(incarnation))
        servers.on_return(lambda server: servers.ask(server, Fence(incarnation)))

    def acknowledged(self) -> tuple[Acknowledged, ...]:
        """Return what is known to be acknowledged, for workers."""
        return self._servers.acknowledged()

    def learn(self, acknowledged: Sequence[Acknowledged]) -> None:
        """Take note of what a worker knows to be acknowledged."""
        self._servers.lives.learn(acknowledged)

    def settle(self, closures: Sequence[int], below: int) -> None:
        """Have all servers forget the keys of closures that have ended.

        Args:
            closures: Their numbers.
            below: All below this one have, too.
        """
        self._servers.ask_each(Settle(self._incarnation, tuple(closures), below))

    def fence(self, worker: int) -> None:
        """Have all servers refuse what a life of a worker still writes."""
        self._servers.ask_each(Fence(self._incarnation, worker))

    def push_round(self, last: int, closures: Sequence[Sequence[TakenStep]]) -> None:
        """Push the mean of what the closures of a round took as steps.

        Args:
            last: Number of the last of them; none of them has been settled.
            closures: The steps of each.
        """
        push_round(self._incarnation, last, closures)
