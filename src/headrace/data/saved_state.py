"""Saved states: what `set_state` refuses, before anything is read.

    {"version": 2, "plan": identity, "seed": s, "pass": n, "fixed": [...], "at": place}

A place is one of these. Only a `stream` may depend on where the plan was read:

* `{"stream": state}`: of the steps of one process. With `"served": [n, ...]`, of the steps that
  stand after `distribute`; what workers make are the first n steps of the plan as written.
* `{"units": state, "half": word}`: in order, for anybody who reads the plan.
* `{"positions": {"frontier", "delivered", "parts"}}`: in no order, for anybody who reads the plan.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, get_args

from headrace.arguments import check_state_version
from headrace.element.chunk import States
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered import Delivered
from headrace.execution.iterator import State
from headrace.plan.elements import FromSource
from headrace.plan.identity import changed_functions, first_difference, identity
from headrace.plan.node import Node
from headrace.plan.traverse import walk
from headrace.rewrites.cut import Half

__all__ = ["PLACES", "VERSION", "Mark", "Marks", "check_form", "check_state", "served_steps"]


VERSION = 2
PLACES = ("units", "positions", "stream")
"""What a state may say of where it stands."""


def served_steps(plan: Node) -> list[int]:
    """Return after how many steps as written each dataset ends that is read over a service."""
    count, found = 0, []
    for node in walk(plan):
        written = node.source.written if isinstance(node, FromSource) else None
        if written is not None:
            count += len(identity(written))
            found.append(count)
        elif not node.is_transparent:
            count += 1
    return found


def check_form(state: Any) -> None:
    """Refuse what `get_state` never returns.

    Raises:
        TypeError: It is no state at all.
        FailedPreconditionError: It is of another version, not whole, or was changed.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise TypeError(f"`state` must be a value of `get_state`, but got {state!r:.80}")
    if state["version"] != VERSION and "plan" not in state and len(state) > 1:
        # A loader's, say: each counts its own versions, so the number says nothing here.
        raise TypeError(
            "`state` must be a value of the `get_state` of an iterator over a dataset, but got "
            f"{state!r:.80}, which is that of something else; restore it into such as it was "
            "taken from: a loader, a distributed iterator, an iterator of JAX or a dataset of Keras"
        )
    check_state_version(state["version"], VERSION)
    missing = [name for name in ("plan", "seed", "pass", "at") if name not in state]
    if missing:
        raise FailedPreconditionError(
            f"the state lacks {', '.join(map(repr, missing))}: it is no whole `get_state`; "
            "restore one that was saved in full, or begin the pass again"
        )
    fixed = state.get("fixed", [])
    for name, value, kind in [("plan", state["plan"], list), ("fixed", fixed, int)]:
        if not _is_list(value, kind):
            raise FailedPreconditionError(
                f"`{name}` of the state is {value!r:.80}, which is no list of the kind; "
                f"{_UNCHANGED}"
            )
    for name, value in [("seed", state["seed"]), *(("fixed seed", each) for each in fixed)]:
        if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
            raise FailedPreconditionError(
                f"the {name} of the state is {value!r:.80}, which is no seed; {_UNCHANGED}"
            )
    if type(state["pass"]) is not int or state["pass"] < 0:
        raise FailedPreconditionError(
            f"the pass of the state is {state['pass']!r:.80}, which is no pass; {_UNCHANGED}"
        )
    at = state["at"]
    if not isinstance(at, dict) or not at.keys() & {*PLACES}:
        raise FailedPreconditionError(
            f"the state does not say where the reading stood: `at` is {at!r:.80}; {_UNCHANGED}"
        )
    if "units" in at and at.get("half") not in get_args(Half):
        raise FailedPreconditionError(
            f"the state does not say which units its place is in: `half` is "
            f"{at.get('half')!r:.80}, and must be one of {', '.join(get_args(Half))}; {_UNCHANGED}"
        )
    if not _is_list(at.get("served", []), int):
        raise FailedPreconditionError(
            f"the state does not say where `distribute` stood: `served` is {at['served']!r:.80}; "
            f"{_UNCHANGED}"
        )
    if "positions" in at:
        Delivered.from_json(at["positions"])


def check_state(state: dict[str, Any], plan: Node, served: Sequence[int]) -> None:
    """Refuse a state of another plan; warn of functions that have changed since.

    Args:
        state: One of the right form.
        plan: What it is to be restored into.
        served: After how many steps there `distribute` stands, where others come after it.

    Raises:
        FailedPreconditionError: It was taken from a dataset with other steps, or in places that
            this one has not.
    """
    difference = first_difference(state["plan"], plan)
    if difference is not None:
        raise FailedPreconditionError(
            f"the state was taken from a dataset with other steps: {difference}; restore it into "
            "the dataset that it was taken from"
        )
    was = state["at"].get("served", [])
    if was != [*served]:
        kinds = [entry[0] for entry in identity(plan)]
        raise FailedPreconditionError(
            f"the state was taken where {_standing(was, kinds)}, and in this dataset "
            f"{_standing(served, kinds)}: such a state is a place in the steps that run here. "
            "Restore it with `distribute` where it was; states that go on in one process or over "
            "any cluster are those of datasets with no step after `distribute`"
        )
    for change in changed_functions(state["plan"], plan):
        warnings.warn(
            f"the state was saved by another version of the pipeline: {change}", stacklevel=3
        )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _standing(served: Sequence[int], kinds: list[str]) -> str:
    if not served:
        return "no step stands after `distribute`"
    names = dict(enumerate(kinds, 1))
    places = " and ".join(f"step {each} ({names.get(each, 'which is none')})" for each in served)
    return f"`distribute` stands after {places} and other steps after it"


_UNCHANGED = "restore a state as `get_state` returned it, or begin the pass again"


class Mark:
    """A place of an iterator. Taking it is free: the state is made when somebody asks.

    Args:
        states: Return the states at, and after, some place.
        offset: How many elements after that place it is.
    """

    __slots__ = ("__weakref__", "offset", "states")

    def __init__(self, states: States, offset: int) -> None:
        self.states = states
        self.offset = offset

    @property
    def state(self) -> State:
        """What the steps of the plan say of it; None: it is the beginning, which has no name."""
        return self.states(self.offset)


class Marks:
    """The marks of an iterator that somebody still holds, in the order of their places."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Mark]] = []

    def add(self, mark: Mark) -> None:
        """Take note of a mark that is taken now."""
        self._held = [each for each in self._held if each() is not None]
        self._held.append(weakref.ref(mark))

    def oldest(self) -> Mark | None:
        """Return the first that is held."""
        return next((mark for each in self._held if (mark := each()) is not None), None)
