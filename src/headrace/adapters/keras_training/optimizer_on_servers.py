"""The counterpart on parameter servers of a Keras optimizer."""

from __future__ import annotations

from typing import Any

from headrace.adapters.keras_training.keras_internals import learning_rate_variable, value_of
from headrace.adapters.keras_training.linked_variables import StepCounter, link
from headrace.adapters.keras_training.loss_scale import inner_optimizer
from headrace.adapters.keras_training.server_optimizers import server_optimizer
from headrace.adapters.keras_training.server_weights import Changes
from headrace.distribute.variable import Variable as PlacedVariable

__all__ = ["OptimizerOnServers", "optimizer_on_servers"]

_PLACED = "_headrace_placed"


class OptimizerOnServers:
    """An optimizer on the servers with the numbers of an optimizer of Keras.

    Args:
        optimizer: The optimizer of Keras. Its `iterations` show the servers' count of steps.
        strategy: A `ParameterServerStrategy`.
        name: The name of its slots on the servers; None for the name of its class and a number.

    Attributes:
        applies: The optimizer on the servers.
        counted: Whether the count of steps may have changed.
        earlier_steps: How many steps the optimizer took before it was placed on the servers.
    """

    def __init__(self, optimizer: Any, strategy: Any, name: str | None) -> None:
        self.strategy = strategy
        if name is not None:
            name = strategy.reserve_name(name)  # models of one name may follow each other
        with strategy.scope():
            self.applies = server_optimizer(optimizer, name)
        self.counted = Changes(strategy)
        self._rate: Any = None
        self._variable = learning_rate_variable(inner_optimizer(optimizer))
        iterations = inner_optimizer(optimizer).iterations
        self.earlier_steps = int(value_of(iterations))
        StepCounter(iterations, lambda: self.applies.iterations, self.counted.take)

    @property
    def rate(self) -> Any:
        """The learning rate, a variable on the servers; None if the optimizer has a schedule."""
        if self._variable is not None and self._rate is None:
            name = self.strategy.unused_name(f"{self.applies.name}/learning_rate")
            value = value_of(self._variable)
            with self.strategy.scope():
                self._rate = PlacedVariable(value, name=name, trainable=False)
            if name in self.strategy.existing:
                self._rate.assign(value)
            link(self._variable, _Rate(self._rate, self.strategy))
        return self._rate


class _Rate:
    """Writes the learning rate that is set in this process to the servers."""

    def __init__(self, placed: Any, strategy: Any) -> None:
        self._placed = placed
        self._strategy = strategy

    def pull(self) -> None:
        """Do nothing: only this process sets it."""

    def before_write(self) -> None:
        """Do nothing."""

    def write(self, variable: Any) -> None:
        """Write it to the servers."""
        if not self._strategy.cluster.is_closed:
            self._placed.assign(value_of(variable))


def optimizer_on_servers(
    optimizer: Any, strategy: Any, name: str | None = None
) -> OptimizerOnServers:
    """Return the optimizer on the servers for an optimizer of Keras, the same object each time.

    Args:
        optimizer: The optimizer of Keras.
        strategy: A `ParameterServerStrategy`.
        name: As for `OptimizerOnServers`; the first call decides.
    """
    found: OptimizerOnServers | None = vars(optimizer).get(_PLACED)
    if found is None or found.strategy is not strategy:
        found = OptimizerOnServers(optimizer, strategy, name)
        object.__setattr__(optimizer, _PLACED, found)
    return found
