"""The counterpart on parameter servers of a Keras optimizer, and its slots.

While a model trains there, slots are on the servers. Those of an optimizer that was trained before
are moved there. When the model is saved, the optimizer is saved with the slots that the servers
have.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras

from headrace.adapters.keras_training.keras_internals import (
    get_or_attach,
    inner_optimizer,
    learning_rate_variable,
    set_momentum_product,
    value_of,
)
from headrace.adapters.keras_training.server_optimizers import server_optimizer, settings_of
from headrace.adapters.keras_training.server_weights import (
    ChangeTracker,
    StepCounter,
    VariableOwner,
    link,
)
from headrace.distribute.variable import Variable as PlacedVariable
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.parameter_server.rules import AVERAGE, nadam_product, slots_for_rule

__all__ = [
    "OptimizerOnServers",
    "OptimizerSlots",
    "move_slots_to_servers",
    "optimizer_on_servers",
]


class OptimizerOnServers:
    """An optimizer on the servers with the numbers of an optimizer of Keras.

    Args:
        optimizer: The optimizer of Keras. Its `iterations` show the servers' count of steps.
        strategy: A `ParameterServerStrategy`.
        name: The name of its slots on the servers; None for the name of its class and a number.

    Attributes:
        server_optimizer: The optimizer on the servers.
        step_changes: Whether the count of steps may have changed.
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
            self.server_optimizer = server_optimizer(optimizer, name)
        self.step_changes: ChangeTracker = ChangeTracker(strategy)
        self._rate: Any = None
        self._variable = learning_rate_variable(inner_optimizer(optimizer))
        iterations = inner_optimizer(optimizer).iterations
        self.earlier_steps: int = int(value_of(iterations))
        self._count = StepCounter(
            iterations, lambda: self.server_optimizer.iterations, self.step_changes.check_changed
        )

    @property
    def is_current(self) -> bool:
        """Whether the optimizer of Keras has the same settings, count of steps and slots."""
        is_assigned = self._count.is_assigned or self.is_loaded
        return not is_assigned and self._settings == settings_of(self._optimizer)

    def pull_slots(self) -> None:
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
            name = self.strategy.unused_name(f"{self.server_optimizer.name}/learning_rate")
            value = value_of(self._variable)
            with self.strategy.scope():
                self._rate = PlacedVariable(value, name=name, trainable=False)
            if name in self.strategy.existing:
                self._rate.assign(value)
            link(self._variable, _LearningRateOwner(self._rate, self.strategy))
        return self._rate


class _LearningRateOwner(VariableOwner):
    """Writes the learning rate that is set in this process to the servers."""

    def __init__(self, placed: Any, strategy: Any) -> None:
        self._placed = placed
        self._strategy = strategy

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
        FailedPreconditionError: If it was changed, and its slots cannot be moved.
    """

    def make(before: OptimizerOnServers | None) -> OptimizerOnServers:
        if before is None or before.strategy is not strategy:
            return OptimizerOnServers(optimizer, strategy, name)
        before.pull_slots()
        return OptimizerOnServers(optimizer, strategy, before.server_optimizer.name)

    placed: OptimizerOnServers = get_or_attach(
        optimizer,
        "placed",
        make,
        lambda found: found.strategy is strategy and found.is_current,
    )
    return placed


_log = logging.getLogger(__name__)


def move_slots_to_servers(model: Any, placed: Any, weights: Any) -> None:
    """Move the slots of a model's optimizer to the servers, and save them from there.

    Args:
        model: Compiled.
        placed: Its `OptimizerOnServers`.
        weights: Its `ServerWeights`.
    """
    if weights.has_tables:
        return  # their slots would not fit into this process
    cluster = placed.strategy.cluster
    slots = OptimizerSlots(model, placed.server_optimizer, weights.trainable, cluster)
    slots.push(placed.earlier_steps)
    placed.slots = slots
    _use_in_files(model.optimizer, placed)


class OptimizerSlots:
    """Copies slots between an optimizer of Keras and parameter servers.

    Args:
        model: Model that the optimizer trains.
        applies: The optimizer on the servers.
        placed: The trainable variables on the servers, in the order of the model.
        cluster: The cluster of the servers.
    """

    def __init__(self, model: Any, applies: Any, placed: list[Any], cluster: Any) -> None:
        self._variables = list(model.trainable_variables)
        self._optimizer = model.optimizer
        self._applies = applies
        self._placed = placed
        self._cluster = cluster

    def push(self, steps: int) -> None:
        """Move slots and the number of steps to the servers, unless those have counted steps.

        Args:
            steps: How many steps were taken here.
        """
        inner = inner_optimizer(self._optimizer)
        if not (inner.built and steps) or self._applies.iterations:
            return
        for variable, placed, name in self._slots():
            placed.set_slot(self._applies, name, value_of(variable))
        self._applies.counter_in(self._cluster).advance(self._cluster, steps)

    def pull(self) -> None:
        """Copy slots from the servers; build the optimizer here if that was not done."""
        inner = inner_optimizer(self._optimizer)
        if self._cluster.is_closed:
            _log.warning(
                "the optimizer %r is saved without the slots that it has on parameter servers, "
                "because the strategy is closed: save the model before strategy.close()",
                inner.name,
            )
            return
        if not inner.built:
            self._optimizer.build(self._variables)
        for variable, placed, name in self._slots():
            # A variable that no step has changed has none.
            with contextlib.suppress(NotFoundError):
                variable.assign(placed.read_slot(self._applies, name))
        if isinstance(inner, keras.optimizers.Nadam):
            set_momentum_product(inner, nadam_product(inner.beta_1, self._applies.iterations))

    def _slots(self) -> Iterator[tuple[Any, Any, str]]:
        """Yield the slot variables of Keras, with the variable on the servers, and the name."""
        rule = self._applies.rule
        names = [slot.name for slot in slots_for_rule(rule)]
        if rule.ema_momentum is not None:
            names.append(AVERAGE.name)
        by_name: dict[str, list[Any]] = {}
        for each in inner_optimizer(self._optimizer).variables:
            by_name.setdefault(each.name, []).append(each)
        for variable, placed in zip(self._variables, self._placed, strict=True):
            for name in names:
                # Several variables may have one path; their slots have the same order.
                found = by_name.get(f"{variable.path}_{name}".replace("/", "_"))
                if found:
                    yield found.pop(0), placed, name


def _use_in_files(optimizer: Any, placed: Any) -> None:
    """Make Keras save the slots that the servers have, and note when it loads others."""

    def save_own_variables(store: Any) -> None:
        if placed.is_current:
            placed.slots.pull()
        type(optimizer).save_own_variables(optimizer, store)

    def load_own_variables(store: Any) -> None:
        type(optimizer).load_own_variables(optimizer, store)
        placed.is_loaded = True

    object.__setattr__(optimizer, "save_own_variables", save_own_variables)
    object.__setattr__(optimizer, "load_own_variables", load_own_variables)
