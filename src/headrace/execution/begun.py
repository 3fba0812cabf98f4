"""What the state of a dealt plan says about units that are begun.

Each leaf of a dealt plan has `{"dealt": n}` in its state: units 0 to n - 1, in dealt order, were
handed out by the leaf (`dealt.units_done`). In the middle of a unit, a leaf has `"begun"` as well,
one more.

A step that goes through its input in order, and saves its place in it, is entered in `_IN_ORDER`.
"""

from __future__ import annotations

from headrace.execution.iterator import State

__all__ = ["begun_units"]

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
