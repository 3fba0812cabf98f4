"""Steps of optimizers that are pushed while the training loop goes on.

later = InBackground(optimizer, in_flight=2)
later.apply_gradients(pairs)      # returns at once, unless two steps are under way
later.flush()                     # all steps are on the servers
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

from headrace.arguments import check_instance, check_int
from headrace.distribute.context import OnReplica, here
from headrace.parameter_server.background import Work
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.origin import Attempt, Begun, beginning, in_closure

__all__ = ["InBackground", "may_work_in_background"]


class InBackground:
    """An optimizer whose steps are pushed while the program goes on.

    >>> import headrace as hr
    >>> hr.optimizers.InBackground(hr.optimizers.SGD(0.1), in_flight=1)
    InBackground(SGD(learning_rate=0.1, name='SGD'), in_flight=1)

    In a function that a coordinator schedules a step is sent at once, and its end is waited for
    with the next steps, at `flush`, or when the function returns: a step that fails fails the
    function. What the function reads meanwhile has the step in it; threads that it starts may lack
    it until `flush`. On one of several replicas, and with `mode="sync"`, each step is done when the
    call returns.

    Args:
        optimizer: One of `hr.optimizers`.
        in_flight: At most so many steps are under way; who has another one waits. 0: each step is
            done when the call returns.
    """

    def __init__(self, optimizer: Optimizer, in_flight: int = 2) -> None:
        check_instance("optimizer", optimizer, Optimizer)
        self.optimizer = optimizer
        self.in_flight = check_int("in_flight", in_flight, minimum=0)
        self._under_way: deque[Work[int]] = deque()

    @property
    def name(self) -> str:
        """The name of the optimizer."""
        return self.optimizer.name

    @property
    def iterations(self) -> int:
        """How many steps are on the servers."""
        return self.optimizer.iterations

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Begin a step; see `Optimizer.apply_gradients`. The gradients must not change after it.

        Raises:
            Exception: What an earlier step failed with; it is raised once, and this step was not
                begun.
        """
        pairs = list(grads_and_vars)
        attempt = beginning()
        if attempt is not None and self.in_flight:
            self._begin_in(attempt, pairs)
            return
        while self._under_way and (
            len(self._under_way) >= max(1, self.in_flight) or self._under_way[0].done()
        ):
            self._finish_first()
        cluster = next((target.cluster for _, target in pairs if hasattr(target, "cluster")), None)
        step = functools.partial(self.optimizer.apply_gradients, pairs)
        if cluster is None or not self.in_flight or not may_work_in_background():
            step()
        else:
            self._under_way.append(cluster.background.submit(step))

    def flush(self) -> None:
        """Wait until all steps are on the servers.

        Raises:
            Exception: What one failed with; call again for the others.
        """
        attempt = beginning()
        if attempt is not None:
            for each in self._begun_in(attempt):
                attempt.result_of(each)
        while self._under_way:
            self._finish_first()

    def _begin_in(self, attempt: Attempt, pairs: list[tuple[Any, Any]]) -> None:
        """Begin a step in a closure, whose thread finishes it."""
        mine = self._begun_in(attempt)
        for each in mine[: len(mine) + 1 - self.in_flight]:
            attempt.result_of(each)
        step = self.optimizer.begin_gradients(pairs)
        step.owner = self
        attempt.begun.append(step)

    def _begun_in(self, attempt: Attempt) -> list[Begun]:
        return [each for each in attempt.begun if each.owner is self]

    def _finish_first(self) -> None:
        # It waits for servers, with `server_timeout`, and says so.
        self._under_way[0].wait()
        self._under_way.popleft().result()

    def __repr__(self) -> str:
        return f"InBackground({self.optimizer!r}, in_flight={self.in_flight})"


def may_work_in_background() -> bool:
    """Whether another thread may write for the code that runs here.

    Writes of a closure are told apart by their order, and those of several replicas become one.
    """
    place = here.get()
    return in_closure() is None and not (
        isinstance(place, OnReplica) and place.strategy.num_replicas_in_sync > 1
    )
