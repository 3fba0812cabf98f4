"""Who says, step by step, which of several inputs the next element is taken from."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import States
from headrace.errors import InvalidElementError
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State
from headrace.plan.combining import checked_weights
from headrace.plan.random_words import key_of, words_at

__all__ = ["Chooser", "Drawn", "DrawnWithWeights", "Given"]

_BLOCK = 1024
"""Steps that are drawn at once."""


class Chooser(ABC):
    """Names the input of each step."""

    @property
    def is_free(self) -> bool:
        """Whether choices that nobody uses cost nothing."""
        return True

    @abstractmethod
    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        """Return those of the next 1 to `count` steps; None: no more elements come.

        Args:
            count: How many are wanted.
            ended: For each input whether it has ended; one at least has not.
        """

    @abstractmethod
    def use(self, count: int) -> None:
        """Pass on over so many steps."""

    def fall_on_ended(self) -> None:  # noqa: B027 - the step is drawn again
        """Go on where the input of the next step has ended, and is known to have."""

    @abstractmethod
    def states(self) -> States:
        """Return the states before the next steps, as many as there are choices, and after them."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Go to such a place."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Close what it reads."""


class Drawn(Chooser):
    """Draws inputs with constant weights.

    Args:
        entropy: What it draws from.
        weights: One for each input.
    """

    def __init__(self, entropy: Sequence[int], weights: Sequence[float]) -> None:
        self._draws = _Draws(entropy)
        self._weights = np.array(weights, np.float64)
        self._step = 0
        self._ended: Sequence[bool] = ()
        self._first = 0  # of the steps in the block
        self._block = np.empty(0, np.int64)

    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        offset = self._step - self._first
        if ended != self._ended or not 0 <= offset < len(self._block):
            weights = np.where(ended, 0.0, self._weights)
            if not weights.any():
                return None
            self._block = self._draws.choices(self._step, max(count, _BLOCK), weights, sum(ended))
            self._first, self._ended, offset = self._step, ended, 0
        return self._block[offset : offset + count]

    def use(self, count: int) -> None:
        self._step += count

    def states(self) -> States:
        return self._step.__add__

    def set_state(self, state: State) -> None:
        self._step = state


class _Draws:
    """Draws inputs with weights: the same for the same step and the same inputs that are left."""

    def __init__(self, entropy: Sequence[int]) -> None:
        self._entropy = entropy

    def choices(
        self, step: int, count: int, weights: NDArray[np.float64], ended: int
    ) -> NDArray[np.int64]:
        """Return the numbers of the inputs of some steps.

        Args:
            step: The first.
            count: How many.
            weights: One for each input, not all 0.
            ended: How many inputs have ended: what is drawn again is another draw.
        """
        words = words_at(key_of([*self._entropy, ended]), np.arange(step, step + count))
        uniform = (words >> _ELEVEN).astype(np.float64) * _UNIT
        ends = np.cumsum(weights)
        chosen = np.searchsorted(ends / ends[-1], uniform, side="right")
        # What was rounded up to 1 falls to the last that has a weight.
        last: int = np.flatnonzero(weights)[-1]
        return np.minimum(chosen, last)


_ELEVEN = np.uint64(11)
_UNIT = 2.0**-53


class _Reading(Chooser):
    """Reads something of each step from an input."""

    def __init__(self, input_: ElementIterator, inputs: int, step: str) -> None:
        self._intake = Intake(input_)
        self._inputs = inputs
        self._step = step

    @property
    def is_free(self) -> bool:
        return self._intake.input.reads_ahead_freely

    def use(self, count: int) -> None:
        self._intake.use(count)

    def states(self) -> States:
        states = self._intake.states
        if states is not None:
            return states
        state = self._intake.get_state()
        return lambda index: state

    def set_state(self, state: State) -> None:
        self._intake.set_state(state)

    def close(self) -> None:
        self._intake.close()


class Given(_Reading):
    """Reads the numbers of the inputs from one more input.

    Args:
        input_: Yields integers.
        inputs: How many inputs there are.
        step: The name of the step, for errors.
    """

    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        chunk = self._intake.look(count)
        if chunk is None:
            return None
        start = self._intake.offset
        found: list[int] = []
        for choice in chunk.rows()[start : start + count]:
            number = _number(choice)
            if number is None or not 0 <= number < self._inputs:
                if found:
                    break
                self.use(1)
                raise InvalidElementError(
                    f"the choices of {self._step} must be integers from 0 to {self._inputs - 1}, "
                    f"but one is {choice!r:.80}"
                )
            found.append(number)
        return np.array(found, np.int64)

    def fall_on_ended(self) -> None:
        self.use(1)


def _number(choice: object) -> int | None:
    try:
        return operator.index(choice)  # type: ignore[arg-type]
    except TypeError:
        return None


class DrawnWithWeights(_Reading):
    """Draws inputs with weights that one more input yields, one row a step.

    Args:
        entropy: What it draws from.
        input_: Yields weights.
        inputs: How many inputs there are.
        step: The name of the step, for errors.
    """

    def __init__(
        self, entropy: Sequence[int], input_: ElementIterator, inputs: int, step: str
    ) -> None:
        super().__init__(input_, inputs, step)
        self._draws = _Draws(entropy)
        self._count = 0  # steps that were made

    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        chunk = self._intake.look(1)
        if chunk is None:
            return None
        try:
            given = checked_weights(chunk.rows()[self._intake.offset], self._inputs)
        except (TypeError, ValueError) as error:
            self.use(1)
            raise InvalidElementError(f"{self._step}: {error}") from error
        weights = np.where(ended, 0.0, given)
        if not weights.any():
            return None
        return self._draws.choices(self._count, 1, weights, sum(ended))

    def use(self, count: int) -> None:
        super().use(count)
        self._count += count

    def states(self) -> States:
        states, first = super().states(), self._count
        return lambda index: {"step": first + index, "input": states(index)}

    def set_state(self, state: State) -> None:
        super().set_state(state["input"])
        self._count = state["step"]
