"""Iterators over the part of a plan that somebody deals out, unit by unit.

Units come in the order in which they are dealt, which is any: one that was returned by a worker
that was lost may lie in an earlier pass. So the steps that say in which order positions come
(`repeat`, `concatenate`) follow what is dealt, and the leaves seek.

    next_units() -> DealtPositions: head, take -> DealtRepeat, DealtConcatenate -> DealtLeaf

The state of a leaf says how many units were dealt and are whole before an element; `units_done`
finds that in the state of any plan. In the middle of a unit it also says how many are begun. What
was dealt cannot be gone back to: it is dealt again.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from headrace.element.brief import Column, InRow
from headrace.element.chunk import Chunk, States
from headrace.element.places import of_units
from headrace.errors import FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.dealer import Dealer, DealtPositions, FirstPass, Run
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.ledger import Ended
from headrace.execution.places import of_positions
from headrace.execution.stage import in_part
from headrace.plan.node import Node, distinct
from headrace.plan.ordering import Repeat

__all__ = [
    "Dealt",
    "DealtConcatenate",
    "DealtLeaf",
    "DealtPlan",
    "DealtRepeat",
    "ManyUnits",
    "as_first_pass",
    "begun_units",
    "failed_unit",
    "is_within_unit",
    "leaves_in",
    "units_done",
]


def as_first_pass(context: Context, dealer: Dealer) -> Context:
    """Return the context in which a dealt plan has the elements of its first pass in each."""
    return dataclasses.replace(
        context,
        passes=(0,) * len(context.passes),
        dealer=FirstPass(dealer, context.passes),
    )


class Dealt(ElementIterator):
    """What cannot be gone back to."""

    def set_state(self, state: State) -> None:
        raise FailedPreconditionError(
            "what was dealt out cannot be restored from a state: it is dealt again"
        )


class DealtLeaf(Dealt):
    """An index part of which others read parts, too."""

    def __init__(self, node: Node, context: Context) -> None:
        assert context.dealer is not None
        self._dealer: Dealer = context.dealer
        self._leaf = context.leaves[id(node)]
        self._passes = context.passes
        self._wants_places = context.wants_places
        self._names_units = context.names_units
        within = dataclasses.replace(
            context, dealer=None, leaves={}, wants_places=False, names_units=False
        )
        self._steps = make_iterator(node, within)
        self._run: Run | None = None
        self._position = 0  # of the next element in `_run`
        self._stands_at = -1  # where the steps are; -1: nowhere yet

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._run is None or self._position == self._run.stop:
            run = self._dealer.take(self._leaf, self._passes)
            if run is None:
                return None
            self._run, self._position = run, run.start
        run, position = self._run, self._position
        chunk = self._read(run, position, min(limit, run.stop - position))
        if chunk is None:
            raise FailedPreconditionError(
                f"positions {position} to {run.stop} were dealt, but the plan has fewer; "
                "do all who read it have the same plan and data?"
            )
        self._position = self._stands_at = position + chunk.size
        self._dealer.begin(run.begun(self._position))
        if self._wants_places or self._names_units:
            chunk = chunk.with_places(self._column(run, position, chunk.size))
        return chunk.with_states(_states(run, position))

    def _column(self, run: Run, position: int, count: int) -> Column:
        """Return what travels with elements from a position on."""
        if run.unit == 1 and not self._wants_places:
            return InRow(run.dealt + position - run.start, count)
        places = of_positions(position, count) if self._wants_places else None
        if self._names_units:
            return of_units(run.units_of(position, count), places)
        assert places is not None
        return places

    def _read(self, run: Run, position: int, limit: int) -> Chunk | None:
        """Return the elements from a position on; one that fails is passed over as it is raised."""
        while True:
            if self._stands_at != position:
                self._steps.seek(position)
            try:
                return self._steps.next_chunk(limit)
            except Exception:
                self._stands_at = -1  # somewhere
                if limit > 1:  # which of them it was shows one by one
                    limit = 1
                    continue
                self._position = position + 1
                self._dealer.begin(run.begun(self._position))
                raise

    def get_state(self) -> State:
        if self._run is None:
            return {"dealt": self._dealer.dealt, "at": 0}
        return _state(self._run, self._position)

    def close(self) -> None:
        self._steps.close()


class _Follower(Dealt):
    """Reads in turn what contains the units that are dealt next."""

    _name: str
    """What the number is called in a state: the same as without a deal, and so are places."""

    def __init__(self, context: Context, dealer: Dealer) -> None:
        self._context = context
        self._dealer = dealer
        self._input: ElementIterator | None = None
        self._number = 0  # of what `_input` reads: a pass, or an input

    @abstractmethod
    def _choose(self, leaf: int, passes: tuple[int, ...]) -> tuple[int, Node, Context] | None:
        """Return what to read: its number, its plan and context; None: these lie elsewhere."""

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            if self._input is None:
                head = self._dealer.head()
                chosen = None if head is None else self._choose(*head)
                if chosen is None:
                    return None
                self._number, plan, context = chosen
                self._input = make_iterator(plan, context)
            chunk = self._input.next_chunk(limit)
            number = self._number
            if chunk is not None:
                return in_part(self._name, number, chunk)
            self._input.close()
            self._input = None
            self._drop_rest(number)

    def _drop_rest(self, number: int) -> None:
        """Pass over units of what has ended: a step above the leaf did not want them."""
        while (head := self._dealer.head()) is not None:
            chosen = self._choose(*head)
            if chosen is None or chosen[0] != number:
                return
            self._dealer.take(*head)

    def get_state(self) -> State:
        if self._input is None:
            return {"dealt": self._dealer.dealt, "at": 0}
        return {self._name: self._number, "input": self._input.get_state()}

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


class DealtRepeat(_Follower):
    """Reads its input in the pass in which the next units lie."""

    _name = "pass"

    def __init__(self, node: Repeat, context: Context, dealer: Dealer) -> None:
        super().__init__(context, dealer)
        self._plan = node.input
        self._leaves = leaves_in(node.input, context)

    def _choose(self, leaf: int, passes: tuple[int, ...]) -> tuple[int, Node, Context] | None:
        depth = len(self._context.passes)
        if leaf not in self._leaves or passes[:depth] != self._context.passes:
            return None
        return passes[depth], self._plan, self._context.in_pass(passes[depth])


class DealtConcatenate(_Follower):
    """Reads the input in which the next units lie."""

    _name = "current"

    def __init__(self, inputs: list[Node], context: Context, dealer: Dealer) -> None:
        super().__init__(context, dealer)
        self._inputs = inputs
        self._numbers = {
            leaf: number
            for number, input_ in enumerate(inputs)
            for leaf in leaves_in(input_, context)
        }

    def _choose(self, leaf: int, passes: tuple[int, ...]) -> tuple[int, Node, Context] | None:
        number = self._numbers.get(leaf)
        if number is None or passes[: len(self._context.passes)] != self._context.passes:
            return None
        return number, self._inputs[number], self._context


class DealtPlan(Dealt):
    """A whole plan that is dealt out."""

    @property
    @abstractmethod
    def begun(self) -> int:
        """The number of units, in dealt order, that leaves handed out something of.

        Nothing of the others was yielded, nor perhaps of those that a step read ahead or holds.
        """

    given: int = 0
    """Units, in dealt order, of which everything was yielded before the last pause, or the end."""

    @abstractmethod
    def take_ended(self) -> tuple[Ended, ...]:
        """Return units that have ended since this was called last, and how many elements they had.

        Elements are those at the root. Some may be held above it, or were left out there. Units
        that have none are among them. Nothing is said without `origins`. Any thread may ask.
        """


class ManyUnits(DealtPlan):
    """A plan whose leaves are dealt units.

    Before a pause its steps come to their ends, so that none of them holds anything; what is dealt
    afterwards goes through steps that begin.

    Args:
        open_steps: Makes the plan's iterator.
        dealer: Who deals to its leaves.
    """

    def __init__(self, open_steps: Callable[[], ElementIterator], dealer: DealtPositions) -> None:
        self._open_steps = open_steps
        self._steps = open_steps()
        self._dealer = dealer

    @property
    def begun(self) -> int:
        return self._dealer.begun

    def take_ended(self) -> tuple[Ended, ...]:
        return () if self._dealer.ledger is None else self._dealer.ledger.take_ended()

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            chunk = self._steps.next_chunk(limit)
            if chunk is not None:
                return chunk
            self.given = self._dealer.dealt
            if not self._dealer.has_paused:
                return None
            self._steps.close()
            self._dealer.go_on()
            self._steps = self._open_steps()

    def get_state(self) -> State:
        return self._steps.get_state()

    def close(self) -> None:
        self._steps.close()


def units_done(state: State) -> int | None:
    """Return how many units are whole, in dealt order, where a dealt plan is in this state.

    None: the state says nothing of it. Hints are not looked at: a source's position in one may have
    any form.
    """
    if type(state) is dict and "dealt" in state:
        done: int = state["dealt"]
        return done
    found: list[int] = []
    pending: list[Any] = [state]
    for value in pending:  # it grows
        if type(value) is dict:
            if "dealt" in value:
                found.append(value["dealt"])
            else:
                parts = value.items()
                pending += [
                    part for name, part in parts if type(part) in _NESTED and name != "hint"
                ]
        elif type(value) is list:
            pending += [part for part in value if type(part) in _NESTED]
    return min(found, default=None)


_NESTED = frozenset({dict, list})


def _states(run: Run, start: int) -> States:
    return lambda index: _state(run, start + index)


def _state(run: Run, position: int) -> State:
    done, begun = run.done(position), run.begun(position)
    place = {"dealt": done, "at": position}
    return place if done == begun else {**place, "begun": begun}


def leaves_in(plan: Node, context: Context) -> frozenset[int]:
    """Return the numbers of the leaves that a part of the plan contains."""
    return frozenset(
        context.leaves[id(node)] for node in distinct([plan]) if id(node) in context.leaves
    )


# --- What the state of a dealt plan says about units that are begun -------------------------------
#
# Each leaf of a dealt plan has `{"dealt": n}` in its state: units 0 to n - 1, in dealt order, were
# handed out by the leaf (`dealt.units_done`). In the middle of a unit, a leaf has `"begun"` as
# well, one more.
#
# A step that goes through its input in order, and saves its place in it, is entered in `_IN_ORDER`.

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
