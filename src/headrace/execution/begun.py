"""What the state of a dealt plan says about units that are begun.

Each leaf of a dealt plan has `{"dealt": n}` in its state: units 0 to n - 1, in dealt order, were
handed out by the leaf (`dealt.units_done`). In the middle of a unit, a leaf has `"begun"` as well,
one more.

A step that goes through its input in order, and saves its place in it, is entered in `_IN_ORDER`.
"""

from __future__ import annotations

from headrace.execution.dealt import units_done
from headrace.execution.iterator import State

__all__ = ["begun_units", "failed_unit", "is_within_unit"]

_DEALT = "dealt"


def begun_units(state: State) -> int | None:
    """Return the number of units of which elements were yielded before `state`.

    Only a state whose steps all go through their inputs in order says so: the number of units that
    are whole, and one more in the middle of one. None: another step, which holds elements or has
    several units open at once.
    """
    within = False
    while isinstance(state, dict):
        if _DEALT in state:
            return max(int(state.get("begun", 0)), int(state[_DEALT]) + within)
        below = _IN_ORDER.get(frozenset(state))
        if below is None:
            return None
        within = within or bool(state.get("ordinal") or state.get("offset"))
        state = state[below]
    return None


_IN_ORDER: dict[frozenset[str], str] = {
    frozenset({"index", "ordinal"}): "index",
    frozenset({"index", "ordinal", "hint"}): "index",
    frozenset({"offset", "input"}): "input",
    frozenset({"pass", "input"}): "input",
    frozenset({"current", "input"}): "input",
    frozenset({"count", "input"}): "input",
}
"""What the states of such steps consist of, and where that of the input is."""


def failed_unit(state: State) -> int:
    """Return the unit, in dealt order, of the element that failed just before `state`.

    -1: the state does not say. Units are read one after the other.
    """
    done = units_done(state)
    if done is None:
        return -1
    return done if is_within_unit(state) else done - 1


def is_within_unit(state: State) -> bool:
    """Whether a state is in the middle of a unit, where units are read one after the other."""
    if isinstance(state, list):
        return any(is_within_unit(each) for each in state)
    if not isinstance(state, dict):
        return False
    is_within = any(state.get(name) for name in ("ordinal", "offset", "failed", "begun"))
    if is_within or any(slot is not None for slot in state.get("slots", ())):
        return True
    return any(is_within_unit(part) for name, part in state.items() if name != "hint")
