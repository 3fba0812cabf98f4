"""Format and validation of saved iterator states.

    {"version": 3, "plan": identity, "seed": s, "epoch": n, "fixed_seeds": [...],
     "position": position}

A position has one of these forms. Only a `stream` may depend on where the plan was read:

* `{"stream": state}`: state of the steps of one process. With `"service_steps": [n, ...]`, it is
  the state of the steps after `distribute`; the first n steps of the plan as written run on
  workers.
* `{"splits": state, "partition_mode": mode}`: position in splits of an ordered reading, for any
  reader.
* `{"positions": {"watermark", "delivered", "partial_splits"}}`: position of an unordered reading,
  for any reader.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, get_args

from headrace.arguments import check_state_version
from headrace.element.chunk import States
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered_elements import DeliveredElements
from headrace.execution.iterator import State
from headrace.plan.elements import FromSource
from headrace.plan.identity import describe_changed_functions, describe_first_difference, identity
from headrace.plan.node import Node
from headrace.plan.traverse import walk
from headrace.rewrites.partition import PartitionMode

__all__ = [
    "POSITION_KINDS",
    "VERSION",
    "HeldPositions",
    "IteratorPosition",
    "check_state",
    "check_state_format",
    "service_steps",
]


VERSION = 3
POSITION_KINDS = ("splits", "positions", "stream")
"""Keys of the forms of a position."""


def service_steps(plan: Node) -> list[int]:
    """Return the number of steps as written up to each `distribute`, inputs first."""
    count, counts = 0, []
    for node in walk(plan):
        remote_plan = node.source.remote_plan if isinstance(node, FromSource) else None
        if remote_plan is not None:
            count += len(identity(remote_plan))
            counts.append(count)
        elif not node.is_transparent:
            count += 1
    return counts


def check_state_format(state: Any) -> None:
    """Check that a state has the format of `get_state`.

    Raises:
        TypeError: If it is not a state.
        FailedPreconditionError: If it has another version, is incomplete, or was modified.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise TypeError(f"`state` must be a value of `get_state`, but got {state!r:.80}")
    if state["version"] != VERSION and "plan" not in state and len(state) > 1:
        # For example a loader's state: other states have their own version numbers.
        raise TypeError(
            "`state` must be a state of a dataset's iterator, but got "
            f"{state!r:.80}, a state of another kind; restore it into an object of the kind that "
            "saved it: a loader, a distributed iterator, a JAX iterator or a Keras dataset"
        )
    check_state_version(state["version"], VERSION)
    missing = [name for name in ("plan", "seed", "epoch", "position") if name not in state]
    if missing:
        raise FailedPreconditionError(
            f"the state lacks {', '.join(map(repr, missing))}; {_RESTORE_HINT}"
        )
    fixed = state.get("fixed_seeds", [])
    for name, value, kind in [("plan", state["plan"], list), ("fixed_seeds", fixed, int)]:
        if not _is_list(value, kind):
            raise FailedPreconditionError(
                f"`{name}` of the state must be a list of {kind.__name__}, got {value!r:.80}; "
                f"{_RESTORE_HINT}"
            )
    for name, value in [("seed", state["seed"]), *(("fixed seed", each) for each in fixed)]:
        if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
            raise FailedPreconditionError(
                f"the {name} of the state must be a 64-bit integer, got {value!r:.80}; "
                f"{_RESTORE_HINT}"
            )
    if type(state["epoch"]) is not int or state["epoch"] < 0:
        raise FailedPreconditionError(
            f"`epoch` of the state must be an integer of at least 0, got {state['epoch']!r:.80}; "
            f"{_RESTORE_HINT}"
        )
    position = state["position"]
    if not isinstance(position, dict) or not position.keys() & {*POSITION_KINDS}:
        raise FailedPreconditionError(
            "`position` of the state must be a dict with one of the keys "
            f"{', '.join(map(repr, POSITION_KINDS))}, got {position!r:.80}; {_RESTORE_HINT}"
        )
    mode = position.get("partition_mode")
    if "splits" in position and mode not in get_args(PartitionMode):
        raise FailedPreconditionError(
            f"`partition_mode` of the state must be one of {', '.join(get_args(PartitionMode))}, "
            f"got {mode!r:.80}; {_RESTORE_HINT}"
        )
    if not _is_list(position.get("service_steps", []), int):
        raise FailedPreconditionError(
            "`service_steps` of the state must be a list of integers, got "
            f"{position['service_steps']!r:.80}; {_RESTORE_HINT}"
        )
    if "positions" in position:
        DeliveredElements.from_json(position["positions"])


def check_state(state: dict[str, Any], plan: Node, service_steps: Sequence[int]) -> None:
    """Check that a state fits a plan; warn about functions that have changed since.

    Args:
        state: State in a valid format.
        plan: Plan that will resume from the state.
        service_steps: Result of `service_steps` if other steps follow `distribute`.

    Raises:
        FailedPreconditionError: If the state is of a dataset with other steps, or if
            `distribute` was elsewhere in it.
    """
    difference = describe_first_difference(state["plan"], plan)
    if difference is not None:
        raise FailedPreconditionError(
            f"the state was taken from a dataset with other steps: {difference}; restore it into "
            "the dataset that it was taken from"
        )
    saved_steps = state["position"].get("service_steps", [])
    if saved_steps != [*service_steps]:
        kinds = [entry[0] for entry in identity(plan)]
        raise FailedPreconditionError(
            f"the state is of a dataset with {_describe_service_steps(saved_steps, kinds)}, and "
            f"this dataset has {_describe_service_steps(service_steps, kinds)}. Steps after "
            "`distribute` run in this process, and the state is their position: move `distribute` "
            "back. Only states of datasets without a step after `distribute` can be restored with "
            "or without a service"
        )
    for change in describe_changed_functions(state["plan"], plan):
        warnings.warn(
            f"the state was saved by another version of the pipeline: {change}", stacklevel=3
        )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _describe_service_steps(service_steps: Sequence[int], kinds: list[str]) -> str:
    if not service_steps:
        return "no step after `distribute`"
    names = dict(enumerate(kinds, 1))
    steps = " and ".join(f"step {each} ({names.get(each, 'missing')})" for each in service_steps)
    return f"`distribute` after {steps} and other steps after it"


_RESTORE_HINT = "restore a state as `get_state` returned it, or start the epoch again"


class IteratorPosition:
    """Position of an iterator. It costs nothing to take, since the state is computed on demand.

    Args:
        states: Function that returns the states from a base position on.
        offset: Number of elements from the base position.
    """

    __slots__ = ("__weakref__", "offset", "states")

    def __init__(self, states: States, offset: int) -> None:
        self.states: States = states
        self.offset: int = offset

    @property
    def state(self) -> State:
        """State of the plan's steps; None at a start that has no state yet."""
        return self.states(self.offset)


class HeldPositions:
    """Positions of an iterator that are still referenced, oldest first."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[IteratorPosition]] = []

    def add(self, position: IteratorPosition) -> None:
        """Add a position that was just taken."""
        self._held = [each for each in self._held if each() is not None]
        self._held.append(weakref.ref(position))

    def oldest(self) -> IteratorPosition | None:
        """Return the oldest position that is still referenced, or None."""
        return next((position for each in self._held if (position := each()) is not None), None)
