"""The optimizer on the parameter servers that takes the steps of an optimizer of Keras."""

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
    """What stands for an optimizer of Keras on the servers of a strategy.

    Args:
        optimizer: Of Keras. Its `iterations` show how many steps the servers have counted.
        strategy: A `ParameterServerStrategy`.
        name: Of its slots on the servers; None: that of its class, with a number.

    Attributes:
        applies: The optimizer on the servers.
        counted: Notes when the count of steps may have changed.
    """

    def __init__(self, optimizer: Any, strategy: Any, name: str | None) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.applies = server_optimizer(optimizer, name)
        self.counted = Changes(strategy)
        self._rate: Any = None
        self._variable = learning_rate_variable(inner_optimizer(optimizer))
        iterations = inner_optimizer(optimizer).iterations
        StepCounter(iterations, lambda: self.applies.iterations, self.counted.take)

    @property
    def rate(self) -> Any:
        """The learning rate as a variable on the servers; None: a schedule says it."""
        if self._variable is not None and self._rate is None:
            name = self.strategy.unused_name(f"{self.applies.name}/learning_rate")
            value = value_of(self._variable)
            with self.strategy.scope():
                self._rate = PlacedVariable(value, name=name, trainable=False)
            self._rate.assign(value)  # the servers may have had one of this name
            link(self._variable, _Rate(self._rate, self.strategy))
        return self._rate


class _Rate:
    """Has workers know the learning rate that is set here."""

    def __init__(self, placed: Any, strategy: Any) -> None:
        self._placed = placed
        self._strategy = strategy

    def pull(self) -> None:
        """Do nothing: it is set here alone."""

    def before_write(self) -> None:
        """Do nothing."""

    def write(self, variable: Any) -> None:
        """Write it to the servers."""
        if not self._strategy.cluster.is_closed:
            self._placed.assign(value_of(variable))


def optimizer_on_servers(
    optimizer: Any, strategy: Any, name: str | None = None
) -> OptimizerOnServers:
    """Return what stands for an optimizer on the servers; the same one each time.

    Args:
        optimizer: Of Keras.
        strategy: A `ParameterServerStrategy`.
        name: See `OptimizerOnServers`; it counts where the optimizer was not on servers before.
    """
    found: OptimizerOnServers | None = vars(optimizer).get(_PLACED)
    if found is None or found.strategy is not strategy:
        found = OptimizerOnServers(optimizer, strategy, name)
        object.__setattr__(optimizer, _PLACED, found)
    return found
