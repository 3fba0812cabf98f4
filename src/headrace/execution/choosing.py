"""Iterators that take each element from one of several inputs: at random, or as another one says.

    chooser --choices--> what is at hand of the members --> chunk

The choice of step i at random is a function of the seed, of i and of which inputs have ended: one
that has ended has no weight any more, and a choice that fell on it is drawn again among the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.element.structure import unflatten
from headrace.execution.chooser import Chooser, Drawn, DrawnWithWeights, Given
from headrace.execution.context import Context
from headrace.execution.intake import Intake, Live
from headrace.execution.iterator import ElementIterator, Singles, State, make_iterator
from headrace.execution.places import Held, within
from headrace.plan.combining import Choose, Sample
from headrace.plan.user_function import step_name

__all__ = ["MixingIterator"]

Steps: TypeAlias = NDArray[np.int64]


class _Member:
    """One of the inputs: what is in hand of it, and an error that waits for its turn."""

    def __init__(self, input_: ElementIterator) -> None:
        self.intake = Intake(input_)
        self.failure: Exception | None = None
        self._before: States | None = None  # of what failed
        self._after: States | None = None  # of what was taken last
        #: Whether no more come.
        self.is_at_end = False
        #: Whether it was found so in its turn: until then it is chosen as before.
        self.has_ended = False

    @property
    def is_free(self) -> bool:
        """Whether it costs nothing to find out what comes next."""
        return self.is_known or self.intake.input.reads_ahead_freely

    @property
    def is_known(self) -> bool:
        """Whether it is known what comes next."""
        return self.intake.chunk is not None or self.failure is not None or self.is_at_end

    def have(self, steps: Steps, size: int) -> int:
        """Have in hand what comes in these steps; return how many steps can be made then.

        Args:
            steps: Those that take from it, in order.
            size: How many can be made as far as is known.
        """
        wanted = int(np.searchsorted(steps, size))
        if wanted and not self.is_known:
            self._look(wanted)
        in_hand = self.intake.in_hand
        return size if in_hand >= wanted else int(steps[in_hand])

    def _look(self, count: int) -> None:
        intake = self.intake
        before = self.states()
        try:
            if intake.input.reads_ahead_freely:
                self.is_at_end = intake.look_ahead(count) is None
            else:
                self.is_at_end = intake.look(count) is None
        except Exception as error:
            self.failure, self._before = error, before
        if self.is_at_end:
            self._after = None

    def take(self, count: int) -> Chunk:
        """Return elements that are in hand."""
        chunk = self.intake.take(count)
        assert chunk is not None
        states, size = chunk.states, chunk.size
        self._after = lambda index: states(size)
        return chunk

    @property
    def has_begun(self) -> bool:
        """Whether single elements come next for which nothing is asked before they are taken."""
        return self.failure is None and self.intake.states is not None

    def begin(self) -> Live | None:
        """Return the single elements that come next; None: there are none."""
        try:
            live = self.intake.singles()
        except Exception:
            self._after = None
            raise
        if live is None:
            self.is_at_end, self._after = True, None
        return live

    def drop_singles(self) -> None:
        """Take note that single elements have ended: with their last one or an error."""
        self.intake.drop_singles()
        self._after = None

    def take_failure(self) -> Exception:
        """Return the error whose turn it is."""
        assert self.failure is not None
        failure = self.failure
        self.failure = self._before = self._after = None
        return failure

    def states(self) -> States:
        """Return the states before what comes next, an error or elements as far as they are known.

        The input is not asked each time: where it stands may take long to say.
        """
        states = self._before or self.intake.states or self._after
        if states is None:
            state = self.intake.get_state()
            states = self._after = lambda index: state
        return states

    def set_state(self, state: State, has_ended: bool) -> None:
        """Go to a place."""
        self.failure = self._before = self._after = None
        self.is_at_end = self.has_ended = has_ended
        self.intake.set_state(state)


class MixingIterator(ElementIterator):
    """Takes each element from the input that a chooser names.

    Args:
        inputs: The inputs.
        chooser: Names them by their numbers, step by step.
        stops: Whether the first one that has ended, and is chosen, ends it all.
    """

    def __init__(self, inputs: Sequence[ElementIterator], chooser: Chooser, *, stops: bool) -> None:
        self._members = [_Member(input_) for input_ in inputs]
        self._chooser = chooser
        self._stops = stops
        self._is_over = False

    @property
    def reads_ahead_freely(self) -> bool:
        inputs = [member.intake.input for member in self._members]
        return self._chooser.is_free and all(input_.reads_ahead_freely for input_ in inputs)

    @property
    def gives_rows(self) -> bool:  # type: ignore[override]
        return any(member.intake.input.gives_rows for member in self._members)

    def next_chunk(self, limit: int) -> Chunk | None:
        chooser = self._chooser
        while not self._is_over:
            ended = [member.has_ended for member in self._members]
            choices = None
            if not all(ended):
                choices = chooser.choices(limit if chooser.is_free else 1, ended)
            if choices is None:
                break
            size = self._find(choices)
            if size:
                return self._take(choices[:size])
            member = self._members[choices[0]]
            if member.failure is not None:
                chooser.use(1)
                raise member.take_failure()
            if self._stops:
                break
            member.has_ended = True
            chooser.fall_on_ended()
        self._is_over = True
        return None

    def _find(self, choices: Steps) -> int:
        """Have in hand what these steps take; return how many of them can be made."""
        size = len(choices)
        steps = {n: np.flatnonzero(choices == n) for n in np.unique(choices).tolist()}
        for number, at in steps.items():
            if self._members[number].is_free:
                size = self._members[number].have(at, size)
        # Of those that cost calls one at a time: then all that it makes is yielded.
        costly = sorted(
            (int(at[0]), number)
            for number, at in steps.items()
            if at[0] < size and not self._members[number].is_free
        )
        if len(costly) > 1:
            size = costly[1][0]
        if costly:
            _, number = costly[0]
            size = self._members[number].have(steps[number], size)
        return size

    def _take(self, choices: Steps) -> Chunk:
        """Return the elements of these steps, which are in hand."""
        states = self._states(choices)
        parts: list[tuple[Steps, Chunk]] = []
        for number in np.unique(choices).tolist():
            at = np.flatnonzero(choices == number)
            chunk = self._members[number].take(len(at))
            if chunk.places is not None:
                chunk = chunk.with_places(within(np.array([number], np.uint64), chunk.places))
            parts.append((at, chunk))
        self._chooser.use(len(choices))
        return _woven(parts, len(choices)).with_states(states)

    # --- single elements ------------------------------------------------------------------------

    def singles(self) -> Singles | None:
        if self._is_over or not self._chooser.is_free:
            return super().singles()
        ended = [member.has_ended for member in self._members]
        choices = None if all(ended) else self._chooser.choices(_SINGLES, ended)
        if choices is None:
            return super().singles()
        member = self._members[choices[0]]
        if member.failure is not None or member.is_at_end:
            return super().singles()
        try:
            live = member.begin()
        except Exception:
            self._chooser.use(1)
            raise
        if live is None:
            return super().singles()
        begun = {n: one.begin() for n, one in enumerate(self._members) if one.has_begun}
        lives = {number: live for number, live in begun.items() if live is not None}
        return self._chosen(choices, lives), self._states(choices)

    def _chosen(self, choices: Steps, lives: dict[int, Live]) -> Iterator[Any]:
        """Yield elements of the inputs in turn, until one is chosen that has none at hand."""
        numbers: list[int] = choices.tolist()
        number, count, has_ended = numbers[0], 0, False
        try:
            for number in numbers:
                if number not in lives:
                    break
                for row in lives[number].rows:
                    count += 1
                    yield row
                    break
                else:
                    has_ended = True
                    break
        except Exception:
            self._leave(choices[:count], lives)
            self._chooser.use(1)
            self._members[number].drop_singles()
            raise
        self._leave(choices[:count], lives)
        if has_ended:
            self._members[number].drop_singles()

    def _leave(self, choices: Steps, lives: dict[int, Live]) -> None:
        """Note that single elements came in these steps."""
        counts = np.bincount(choices, minlength=len(self._members)).tolist()
        for number, live in lives.items():
            live.taken += counts[number]
        self._chooser.use(len(choices))

    # --- state ----------------------------------------------------------------------------------

    def _states(self, choices: Steps) -> States:
        """Return the states before the elements of these steps, and after them."""
        places = [member.states() for member in self._members]
        chooser = self._chooser.states()
        ended = [number for number, member in enumerate(self._members) if member.has_ended]

        def states(index: int) -> State:
            counts = np.bincount(choices[:index], minlength=len(places)).tolist()
            return {
                "choices": chooser(index),
                "ended": ended,
                "inputs": [at(count) for at, count in zip(places, counts, strict=True)],
            }

        return states

    def get_state(self) -> State:
        return self._states(_NONE)(0)

    def set_state(self, state: State) -> None:
        self._is_over = False
        self._chooser.set_state(state["choices"])
        for number, (member, place) in enumerate(zip(self._members, state["inputs"], strict=True)):
            member.set_state(place, number in state["ended"])

    def close(self) -> None:
        self._chooser.close()
        for member in self._members:
            member.intake.close()


_NONE = np.empty(0, np.int64)
_SINGLES = 64
"""Steps that are chosen at once for single elements."""


def _woven(parts: Sequence[tuple[Steps, Chunk]], size: int) -> Chunk:
    """Return the elements of several chunks, each at the places that are named, as one chunk."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    held = [Held(chunk) for _, chunk in parts]
    if held[0].kind is not None and all(one.kind == held[0].kind for one in held):
        leaves = []
        for number, leaf in enumerate(held[0].leaves):
            # Zeroed where there is padding between fields, which is not written here.
            make = np.zeros if leaf.dtype.kind == "V" else np.empty
            out = make((size, *leaf.shape[1:]), leaf.dtype)
            for (at, _), one in zip(parts, held, strict=True):
                out[at] = one.leaves[number]
            leaves.append(out)
        assert held[0].structure is not None
        made = Chunk.of_columns(unflatten(held[0].structure, leaves), size)
    else:
        rows: list[Any] = [None] * size
        for at, chunk in parts:
            for place, row in zip(at.tolist(), chunk.rows(), strict=True):
                rows[place] = row
        made = Chunk.of_rows(rows)
    placed = [(at, chunk.places) for at, chunk in parts if chunk.places is not None]
    if not placed:
        return made
    places = np.empty(size, np.uint64)
    for at, numbers in placed:
        places[at] = numbers
    return made.with_places(places)


@make_iterator.register(Sample)
def _make_sample(node: Sample, context: Context) -> ElementIterator:
    entropy = _entropy(node, context)
    chooser: Chooser
    if node.drawn_weights:
        weights = make_iterator(node.drawn_weights[0], context.with_places(False))
        chooser = DrawnWithWeights(entropy, weights, len(node.datasets), step_name(node))
    else:
        chooser = Drawn(entropy, node.weights or (1.0,) * len(node.datasets))
    inputs = [make_iterator(input_, context) for input_ in node.datasets]
    return MixingIterator(inputs, chooser, stops=node.stop_on_empty_dataset)


def _entropy(node: Sample, context: Context) -> list[int]:
    """Return what a step draws from."""
    if node.seed is None:
        if node.is_same_in_each_pass:
            return context.fixed_entropy(node.number, node.drawn_seed)
        return context.entropy(node.number)
    passes = () if node.is_same_in_each_pass else context.passes
    return [6, node.seed & _MASK, *passes]


_MASK = (1 << 64) - 1


@make_iterator.register(Choose)
def _make_choose(node: Choose, context: Context) -> ElementIterator:
    choices = make_iterator(node.choices, context.with_places(False))
    chooser = Given(choices, len(node.datasets), step_name(node))
    inputs = [make_iterator(input_, context) for input_ in node.datasets]
    return MixingIterator(inputs, chooser, stops=node.stop_on_empty_dataset)
