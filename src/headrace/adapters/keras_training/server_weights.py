"""The variables of a Keras model on parameter servers, as the coordinator's process sees them.

A variable keeps its object. Reading it here gives what the servers have: `ServerWeights` marks its
values as outdated when a step may have changed them, and the next read of any of them fetches all
in one request to each server. Assigning writes to the servers as well. So callbacks, `get_weights`
and `save` of Keras work as they are, and those that look at no weights cost nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.adapters.keras_training.keras_internals import (
    in_stateless_scope,
    seed_variables,
    value_of,
)
from headrace.adapters.keras_training.worker_model import StateKind
from headrace.distribute.variable import Variable as PlacedVariable
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.parameter_server.read_cache import read_together

__all__ = ["ServerWeights", "StepCounter"]

_OWNER = "_headrace_owner"


class _Owner(Protocol):
    """Who keeps the value of a variable elsewhere."""

    def pull(self) -> None:
        """Bring the variable up to date."""

    def write(self, variable: Any) -> None:
        """Take note that the variable was assigned here."""


class ServerWeights:
    """Keeps the variables of a model on the servers of a strategy.

    Args:
        model: Built.
        strategy: A `ParameterServerStrategy`.

    Attributes:
        trainable: The trainable variables on the servers, in the order of the model.
        state: The non-trainable ones; None for seeds, which stay here.
        kinds: What each of those is (`StateKind`).
        version: Changes with each write from here, and with `new_version`.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._lock = threading.RLock()
        self._is_outdated = False
        self._is_pulling = False
        self._placed: dict[int, tuple[Any, Any]] = {}
        self._names: set[str] = set()
        self._model = model
        self._strategy = strategy
        self.version = 0
        self.place()

    def place(self) -> None:
        """Place the variables that are not on the servers yet, and look at what each one is."""
        model = self._model
        seeds = {id(each) for each in seed_variables(model)}
        self.trainable = [self._on_servers(each, True) for each in model.trainable_variables]
        self.state: list[Any] = []
        self.kinds: list[str] = []
        self._seed_variables: dict[int, Any] = {}
        for index, variable in enumerate(model.non_trainable_variables):
            is_seed = id(variable) in seeds
            self.kinds.append(StateKind.SEED if is_seed else StateKind.STATISTIC)
            self.state.append(None if is_seed else self._on_servers(variable, False))
            if is_seed:
                self._seed_variables[index] = variable

    @property
    def seeds(self) -> dict[int, NDArray[Any]]:
        """By index among the non-trainable variables, the values of seeds."""
        return {index: value_of(each) for index, each in self._seed_variables.items()}

    def set_seeds(self, seeds: dict[int, NDArray[Any]]) -> None:
        """Set the values of seeds."""
        for index, value in seeds.items():
            self._seed_variables[index].assign(value)

    @property
    def by_name(self) -> dict[str, Any]:
        """All variables on the servers, by their names."""
        return {placed.name: placed for _, placed in self._placed.values()}

    def _on_servers(self, variable: Any, trainable: bool) -> Any:
        found = self._placed.get(id(variable))
        if found is not None:
            return found[1]
        if getattr(variable, "constraint", None) is not None:
            raise FailedPreconditionError(
                f"the variable {variable.path!r} of the Keras model {self._model.name!r} has a "
                "constraint, which parameter servers do not apply: make its layer without it"
            )
        value = value_of(variable)
        with self._strategy.scope():
            placed = PlacedVariable(value, name=self._name_of(variable), trainable=trainable)
        self._placed[id(variable)] = variable, placed
        _link(variable, self)
        return placed

    def _name_of(self, variable: Any) -> str:
        name, number = variable.path, 1
        while name in self._names:
            name, number = f"{variable.path}_{number}", number + 1
        self._names.add(name)
        return str(name)

    def new_version(self) -> int:
        """Return a version for which workers read all values again."""
        self.version += 1
        return self.version

    # --- values here ----------------------------------------------------------------------------

    def outdate(self) -> None:
        """Take note that steps may have changed the values on the servers."""
        self._is_outdated = True

    def pull(self) -> None:
        """Fetch the values, if they are outdated."""
        with self._lock:
            if not self._is_outdated or self._is_pulling:
                return
            self._is_pulling = True
            try:
                pairs = list(self._placed.values())
                values = read_together([placed for _, placed in pairs])
                for (variable, _), value in zip(pairs, values, strict=True):
                    variable.assign(value)
                self._is_outdated = False
            finally:
                self._is_pulling = False

    def write(self, variable: Any) -> None:
        """Write what was assigned to a variable here to the servers, unless it came from there."""
        if self._is_pulling or self._strategy.cluster.is_closed:
            return
        _, placed = self._placed[id(variable)]
        placed.assign(value_of(variable))
        self.version += 1

    def use_averages(self, optimizer: Any) -> None:
        """Set the trainable variables to their running averages, if an optimizer keeps those."""
        if optimizer.rule.ema_momentum is None:
            return
        for placed in self.trainable:
            # A variable that no step has changed has none.
            with contextlib.suppress(NotFoundError):
                placed.assign(placed.read_slot(optimizer, "average").astype(placed.dtype))
        self.outdate()
        self.version += 1


class StepCounter:
    """Has `optimizer.iterations` of a model show how many steps the servers have counted.

    Args:
        variable: `optimizer.iterations`.
        count: Returns the number of steps.
    """

    def __init__(self, variable: Any, count: Callable[[], int]) -> None:
        self._variable = variable
        self._count = count
        self._is_outdated = False
        _link(variable, self)

    def outdate(self) -> None:
        """Take note that steps may have been counted."""
        self._is_outdated = True

    def pull(self) -> None:
        """Ask the servers, if that is necessary."""
        if self._is_outdated:
            self._is_outdated = False
            self._variable.assign(self._count())

    def write(self, variable: Any) -> None:
        """Keep what was assigned here: the servers count by themselves."""


def _link(variable: Any, owner: _Owner) -> None:
    """Have reads and assignments of a Keras variable go to its owner, too."""
    variable.__dict__[_OWNER] = owner
    kind: Any = type(variable)
    variable.__class__ = _linked(kind)


@functools.cache
def _linked(kind: Any) -> type:
    base: Any = kind

    class ServerBackedVariable(base):  # type: ignore[misc]
        """A Keras variable whose value is on parameter servers."""

        local_class = kind

        @property
        def value(self) -> Any:
            if not in_stateless_scope():
                self.__dict__[_OWNER].pull()
            return base.value.fget(self)

        def assign(self, value: Any) -> Any:
            result = base.assign(self, value)
            if not in_stateless_scope():
                self.__dict__[_OWNER].write(self)
            return result

    ServerBackedVariable.__name__ = ServerBackedVariable.__qualname__ = kind.__name__
    return ServerBackedVariable
