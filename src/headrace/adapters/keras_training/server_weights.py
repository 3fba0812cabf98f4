"""Variables of Keras on parameter servers, as the coordinator's process sees them.

`link` replaces the class of a Keras variable, so that its reads and assignments call an owner; the
object stays the same. A read returns the value on the servers: if a scheduled function may have
changed any variable, the next read of one fetches all variables of the model, in one request to
each server. An assignment also writes to the servers. So Keras' callbacks, `get_weights` and `save`
work unchanged, and callbacks that read no weights cost nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from headrace.adapters.keras_training.embedding_internals import table_of_variable
from headrace.adapters.keras_training.keras_internals import (
    OWN_ATTRIBUTES,
    extend_class,
    get_or_attach,
    in_stateless_scope,
    seed_variables,
    value_of,
)
from headrace.coordinator.coordinator import ClusterCoordinator, find_coordinator
from headrace.distribute.variable import Variable as PlacedVariable
from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.frameworks.keras_state import LINKED_ATTRIBUTE
from headrace.parameter_server.read_cache import read_together

__all__ = [
    "ChangeTracker",
    "ServerVariables",
    "ServerWeights",
    "StepCounter",
    "link",
    "owner_of",
    "weights_of",
]


class VariableOwner:
    """Interface to the value of a linked Keras variable; called on its reads and writes."""

    def pull(self) -> None:
        """Bring the variable up to date before it is read."""

    def before_write(self) -> None:
        """Prepare for an assignment in this process."""

    def write(self, variable: Any) -> None:
        """Handle an assignment in this process."""


def link(variable: Any, owner: VariableOwner) -> None:
    """Make reads and assignments of a Keras variable call its owner."""
    variable.__dict__[_OWNER] = owner
    kind = type(variable)
    if not hasattr(kind, LINKED_ATTRIBUTE):
        variable.__class__ = extend_class(kind, _ServerBackedVariable, **{LINKED_ATTRIBUTE: kind})


def owner_of(variable: Any) -> Any:
    """Return the owner of a variable, or None."""
    return vars(variable).get(_OWNER)


_OWNER = OWN_ATTRIBUTES + "owner"


class _ServerBackedVariable:
    """A Keras variable whose value is on parameter servers."""

    @property
    def value(self) -> Any:
        if not in_stateless_scope():
            owner_of(self).pull()
        return super().value  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        if in_stateless_scope():
            return super().assign(value)  # type: ignore[misc]
        owner_of(self).before_write()
        result = super().assign(value)  # type: ignore[misc]
        owner_of(self).write(self)
        return result


class StepCounter(VariableOwner):
    """Keeps `optimizer.iterations` equal to the servers' count of steps.

    Args:
        variable: `optimizer.iterations`.
        count: Returns the number of steps.
        may_change: Returns whether the count may have changed since the previous call.

    Attributes:
        is_assigned: Whether this process assigned a count, which the servers do not have.
    """

    def __init__(
        self, variable: Any, count: Callable[[], int], may_change: Callable[[], bool]
    ) -> None:
        self._variable = variable
        self._count = count
        self._may_change = may_change
        self._is_pulling = False
        self.is_assigned: bool = False
        link(variable, self)

    def pull(self) -> None:
        """Read the count from the servers if it may have changed."""
        if not (self._is_pulling or self.is_assigned) and self._may_change():
            self._is_pulling = True
            try:
                self._variable.assign(self._count())
            finally:
                self._is_pulling = False

    def write(self, variable: Any) -> None:
        """Record that the count is no longer that of the servers."""
        self.is_assigned = self.is_assigned or not self._is_pulling


class ServerVariables(VariableOwner):
    """Keeps variables of Keras on the servers of a strategy.

    Reading one fetches all of them, if scheduled functions may have changed any since the last
    read.

    Args:
        strategy: A `ParameterServerStrategy`.
        root: Model, layer, metric or variable that owns the variables.
        description: Description of `root` for errors.

    Attributes:
        version: Number that increases with each write by this process, and with `bump_version`.
    """

    def __init__(self, strategy: Any, root: Any, description: str) -> None:
        self._strategy = strategy
        self._root = weakref.ref(root)
        self._description = description
        self._lock = threading.RLock()
        self._is_pulling = False
        self._placed: dict[int, tuple[Any, Any]] = {}
        self._tables: dict[int, Any] = {}
        self._changes = ChangeTracker(strategy)
        self.version: int = 0

    def place(self, variable: Any, trainable: bool) -> Any:
        """Return a variable on the servers. The first call creates it there."""
        if (table := table_of_variable(variable)) is not None:
            return self._tables.setdefault(id(variable), table.table_in(self._strategy))
        found = self._placed.get(id(variable))
        if found is not None:
            return found[1]
        other = owner_of(variable)
        if isinstance(other, ServerVariables) and other._strategy is self._strategy:
            # Also used without its model, in a scheduled function: share the server variable.
            _, placed = self._placed[id(variable)] = other._placed[id(variable)]
            link(variable, self)
            return placed
        if getattr(variable, "constraint", None) is not None:
            raise FailedPreconditionError(
                f"the variable {variable.path!r} of {self._description} has a constraint, which "
                "parameter servers do not apply: create its layer without a constraint"
            )
        value = value_of(variable)
        name = self._strategy.unused_name(variable.path)
        with self._strategy.scope():
            placed = PlacedVariable(value, name=name, trainable=trainable)
        if name in self._strategy.existing:
            placed.assign(value)  # not the value of an earlier program on the same servers
        self._placed[id(variable)] = variable, placed
        link(variable, self)
        return placed

    @property
    def root(self) -> Any:
        """Model, layer, metric or variable that owns the variables."""
        return self._root()

    @property
    def by_name(self) -> dict[str, Any]:
        """All variables and tables on the servers, by name."""
        return {
            **{placed.name: placed for _, placed in self._placed.values()},
            **{f"tables/{table.name}": table for table in self._tables.values()},
        }

    @property
    def has_tables(self) -> bool:
        """Whether any variable is a table."""
        return bool(self._tables)

    def bump_version(self) -> int:
        """Increase the version, so that workers read all values again; return it."""
        self.version += 1
        return self.version

    def mark_outdated(self) -> None:
        """Mark the values as outdated, after a change that no scheduled function made."""
        self._changes.mark_changed()

    def read_only(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for scheduling functions that change no values, such as evaluation."""
        return self._changes.assume_unchanged()

    def pull(self) -> None:
        """Fetch the values, if they may have changed."""
        with self._lock:
            if self._is_pulling or not self._changes.check_changed():
                return
            if self._strategy.cluster.is_closed:
                self._changes.mark_changed()
                raise FailedPreconditionError(
                    f"the values of {self._description} were not read after the last functions "
                    "that may have changed them, and its strategy is closed: call "
                    "model.get_weights() or save the model before strategy.close()"
                )
            self._is_pulling = True
            try:
                pairs = list(self._placed.values())
                values = read_together([placed for _, placed in pairs])
                for (variable, _), value in zip(pairs, values, strict=True):
                    variable.assign(value)
            except BaseException:
                self._changes.mark_changed()
                raise
            finally:
                self._is_pulling = False

    def write(self, variable: Any) -> None:
        """Write the value assigned to a variable to the servers, unless it was read from them."""
        with self._lock:
            if self._is_pulling or self._strategy.cluster.is_closed:
                return
            _, placed = self._placed[id(variable)]
            self._is_pulling = True  # otherwise reading the value would fetch the previous one
            try:
                placed.assign(value_of(variable))
            finally:
                self._is_pulling = False
            self.version += 1


class ServerWeights(ServerVariables):
    """Keeps the variables of a model on the servers of a strategy.

    Args:
        model: Built Keras model.
        strategy: A `ParameterServerStrategy`.

    Attributes:
        trainable: Trainable variables on the servers, in Keras' order.
        state: Non-trainable variables on the servers; None for seeds, which stay in this process.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(strategy, model, f"the Keras model {model.name!r}")
        self._model = model

    def place_all(self) -> None:
        """Place the variables that are not on the servers yet, and set the attributes."""
        model = self._model
        seeds = {id(each) for each in seed_variables(model)}
        self.trainable = [self.place(each, True) for each in model.trainable_variables]
        self.state: list[Any] = []
        self._seed_variables: dict[int, Any] = {}
        for index, variable in enumerate(model.non_trainable_variables):
            is_seed = id(variable) in seeds
            self.state.append(None if is_seed else self.place(variable, False))
            if is_seed:
                self._seed_variables[index] = variable

    @property
    def seeds(self) -> dict[int, NDArray[Any]]:
        """Values of seeds, by index among the non-trainable variables."""
        return {index: value_of(each) for index, each in self._seed_variables.items()}

    def set_seeds(self, seeds: dict[int, NDArray[Any]]) -> None:
        """Set the values of seeds."""
        for index, value in seeds.items():
            self._seed_variables[index].assign(value)

    def use_averages(self, optimizer: Any) -> None:
        """Set the trainable variables to their running averages, if an optimizer keeps those."""
        if optimizer.rule.ema_momentum is None:
            return
        for placed in self.trainable:
            # A variable that no step has changed has no average.
            with contextlib.suppress(NotFoundError):
                placed.assign(placed.read_slot(optimizer, "average").astype(placed.dtype))
        self.mark_outdated()
        self.version += 1


def weights_of(model: Any, strategy: Any) -> ServerWeights:
    """Place all variables of a model on servers; return the same object each time.

    Args:
        model: Built Keras model.
        strategy: Strategy of the model.
    """
    found: ServerWeights = get_or_attach(model, "weights", lambda _: ServerWeights(model, strategy))
    found.place_all()
    return found


class ChangeTracker:
    """Tracks whether scheduled functions may have changed values on the servers.

    Args:
        strategy: Strategy of the coordinator.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # Kept when it is closed, since its last functions may have changed values.
        self._coordinator = ClusterCoordinator(strategy)
        self._last_activity = 0, 1
        self._last_check = 0.0
        self._is_marked = False

    def mark_changed(self) -> None:
        """Make the next `check_changed` return True."""
        self._is_marked = True

    @contextlib.contextmanager
    def assume_unchanged(self) -> Iterator[None]:
        """Within this context, treat scheduled functions as changing no values."""
        before = self._coordinator.activity
        is_up_to_date = (
            before == self._last_activity and before[0] < before[1] and not self._is_marked
        )
        yield
        if is_up_to_date:
            self._last_activity = self._coordinator.activity

    def check_changed(self) -> bool:
        """Return whether values may have changed since the previous call.

        While functions run, it is True at most every 0.1 s, and after each function that ends.
        """
        found = find_coordinator(self._strategy)
        if found is not None and found is not self._coordinator:
            self._coordinator, self._is_marked = found, True
        last, first = self._coordinator.activity
        now = time.monotonic()
        is_due = first <= last and now - self._last_check > _MIN_CHECK_SECONDS
        if not (is_due or self._is_marked or (last, first) != self._last_activity):
            return False
        self._last_activity, self._last_check, self._is_marked = (last, first), now, False
        return True


_MIN_CHECK_SECONDS = 0.1
