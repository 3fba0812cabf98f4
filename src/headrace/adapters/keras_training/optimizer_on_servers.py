"""The counterpart on parameter servers of a Keras optimizer."""

from __future__ import annotations

from typing import Any

from headrace.adapters.keras_training.keras_internals import learning_rate_variable, value_of
from headrace.adapters.keras_training.linked_variables import StepCounter, link
from headrace.adapters.keras_training.loss_scale import inner_optimizer
from headrace.adapters.keras_training.server_optimizers import server_optimizer, settings_of
from headrace.adapters.keras_training.server_weights import Changes
from headrace.distribute.variable import Variable as PlacedVariable
from headrace.errors import FailedPreconditionError

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
        slots: Copies its slots between the servers and the optimizer of Keras; None if they are
            on the servers only.
        is_loaded: Whether slots were loaded from a file since, into the optimizer of Keras.
    """

    def __init__(self, optimizer: Any, strategy: Any, name: str | None) -> None:
        self.strategy = strategy
        self.slots: Any = None
        self.is_loaded = False
        self._optimizer = optimizer
        self._settings = settings_of(optimizer)
        if name is not None:
            name = strategy.reserve_name(name)  # models of one name may follow each other
        with strategy.scope():
            self.applies = server_optimizer(optimizer, name)
        self.counted = Changes(strategy)
        self._rate: Any = None
        self._variable = learning_rate_variable(inner_optimizer(optimizer))
        iterations = inner_optimizer(optimizer).iterations
        self.earlier_steps = int(value_of(iterations))
        self._count = StepCounter(iterations, lambda: self.applies.iterations, self.counted.take)

    @property
    def is_current(self) -> bool:
        """Whether the optimizer of Keras has the same settings, count of steps and slots."""
        is_assigned = self._count.is_assigned or self.is_loaded
        return not is_assigned and self._settings == settings_of(self._optimizer)

    def leave_servers(self) -> None:
        """Move the slots back to the optimizer of Keras.

        Raises:
            FailedPreconditionError: They cannot be moved.
        """
        if self.slots is None:
            raise FailedPreconditionError(
                f"the settings or the weights of the optimizer {self._optimizer.name!r} were "
                "changed after it began to train on parameter servers, and its slots are only "
                "there: compile the model with a new optimizer"
            )
        if not self.is_loaded:
            self.slots.pull()

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
    """Return the optimizer on the servers for an optimizer of Keras.

    It is the same object each time, and another one after settings were changed, `iterations` were
    assigned, or a file was loaded.

    Args:
        optimizer: The optimizer of Keras.
        strategy: A `ParameterServerStrategy`.
        name: As for `OptimizerOnServers`; the first call decides.

    Raises:
        FailedPreconditionError: It was changed, and its slots cannot be moved.
    """
    found: OptimizerOnServers | None = vars(optimizer).get(_PLACED)
    if found is not None and found.strategy is strategy and not found.is_current:
        found.leave_servers()
        name, found = found.applies.name, None
    if found is None or found.strategy is not strategy:
        found = OptimizerOnServers(optimizer, strategy, name)
        object.__setattr__(optimizer, _PLACED, found)
    return found
