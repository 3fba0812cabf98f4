"""The slots of a Keras optimizer, which are on parameter servers while its model trains there.

Those of an optimizer that was trained before are moved to the servers. When the model is saved, the
optimizer is saved with the slots that the servers have.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras

from headrace.adapters.keras_training.keras_internals import set_momentum_product, value_of
from headrace.adapters.keras_training.loss_scale import inner_optimizer
from headrace.errors import NotFoundError
from headrace.parameter_server.rules import AVERAGE, nadam_product, slots_of

__all__ = ["OptimizerSlots", "slots_on_servers"]

_log = logging.getLogger(__name__)


def slots_on_servers(model: Any, placed: Any, weights: Any) -> None:
    """Move the slots of a model's optimizer to the servers, and save them from there.

    Args:
        model: Compiled.
        placed: Its `OptimizerOnServers`.
        weights: Its `ServerWeights`.
    """
    if weights.has_tables:
        return  # their slots would not fit into this process
    cluster = placed.strategy.cluster
    slots = OptimizerSlots(model, placed.applies, weights.trainable, cluster)
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
        names = [slot.name for slot in slots_of(rule)]
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
