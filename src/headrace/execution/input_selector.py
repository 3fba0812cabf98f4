"""Selectors that choose, for each element, the input that supplies it."""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import States
from headrace.errors import InvalidElementError
from headrace.execution.input_buffer import InputBuffer
from headrace.execution.iterator import ElementIterator, State
from headrace.plan.combining import Schedule, validate_weights
from headrace.plan.random_words import derive_key, random_words

__all__ = [
    "ChoiceInputSelector",
    "InputSelector",
    "RandomInputSelector",
    "VaryingWeightsInputSelector",
]

_log = logging.getLogger(__name__)

_BLOCK = 1024
"""Number of choices drawn at once."""

_MAX_SKIPPED_ROWS = 100_000
"""Number of consecutive rows of weights that are skipped before the dataset ends: a function of the
step may never give a weight to the remaining inputs."""


class InputSelector(ABC):
    """Chooses the input of each element."""

    @property
    def can_look_ahead(self) -> bool:
        """Whether unused choices cost nothing."""
        return True

    @abstractmethod
    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        """Return the next 1 to `count` choices, as numbers of inputs, or None at the end.

        Args:
            count: Maximum number of choices.
            ended: Whether each input has ended; at least one has not.
        """

    @abstractmethod
    def consume(self, count: int) -> None:
        """Advance by `count` choices."""

    def skip_ended_input(self) -> None:  # noqa: B027 - random choices are drawn again
        """Continue after the next choice has turned out to be an ended input."""

    @abstractmethod
    def states(self) -> States:
        """Return the states before each of the next choices, and after them."""

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Restore a state."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Close the input of the selector."""


class RandomInputSelector(InputSelector):
    """Chooses inputs at random, with weights that are constant or follow a schedule.

    If all inputs with a weight have ended, the next choice is the first one in the schedule that
    has another input.

    Args:
        entropy: Entropy of the random numbers.
        schedule: Weights of the inputs from each choice on.
    """

    def __init__(self, entropy: Sequence[int], schedule: Schedule) -> None:
        self._sampler = _WeightedSampler(entropy)
        self._starts = [first for first, _ in schedule]
        self._weights = [np.array(weights, np.float64) for _, weights in schedule]
        self._count = 0
        self._ended: Sequence[bool] = ()
        self._block_start = 0  # number of the first choice in the block
        self._block = np.empty(0, np.int64)

    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        offset = self._count - self._block_start
        if ended != self._ended or not 0 <= offset < len(self._block):
            stage = bisect_right(self._starts, self._count) - 1
            while not (weights := np.where(ended, 0.0, self._weights[stage])).any():
                stage += 1
                if stage == len(self._starts):
                    return None
                self._count = self._starts[stage]
            size = max(count, _BLOCK)
            if stage + 1 < len(self._starts):
                size = min(size, self._starts[stage + 1] - self._count)
            self._block = self._sampler.sample(self._count, size, weights, sum(ended))
            self._block_start, self._ended, offset = self._count, ended, 0
        return self._block[offset : offset + count]

    def consume(self, count: int) -> None:
        self._count += count

    def states(self) -> States:
        return self._count.__add__

    def set_state(self, state: State) -> None:
        self._count = state


class _WeightedSampler:
    """Draws inputs with weights; a choice depends on its number and the remaining inputs only."""

    def __init__(self, entropy: Sequence[int]) -> None:
        self._entropy = entropy
        #: Random numbers for single choices: the first choice, the ended inputs, and the numbers.
        self._block: tuple[int, int, list[float]] = (0, -1, [])

    def sample_one(self, number: int, weights: Sequence[float], ended_inputs: int) -> int:
        """Return one choice, the same that `sample` returns."""
        first, ended, uniform = self._block
        if ended != ended_inputs or not 0 <= number - first < len(uniform):
            first, uniform = number, self._uniform(number, _BLOCK, ended_inputs).tolist()
            self._block = first, ended_inputs, uniform
        ends = list(accumulate(weights))
        chosen = bisect_right([end / ends[-1] for end in ends], uniform[number - first])
        # A value rounded up to 1 selects the last input with a weight.
        return min(chosen, max(i for i, weight in enumerate(weights) if weight))

    def sample(
        self, first: int, count: int, weights: NDArray[np.float64], ended_inputs: int
    ) -> NDArray[np.int64]:
        """Return several choices.

        Args:
            first: Number of the first choice.
            count: Number of choices.
            weights: One weight for each input, not all 0.
            ended_inputs: Number of ended inputs; it changes the random numbers of repeated draws.
        """
        uniform = self._uniform(first, count, ended_inputs)
        ends = np.cumsum(weights)
        inputs = np.searchsorted(ends / ends[-1], uniform, side="right")
        # A value rounded up to 1 selects the last input with a weight.
        last: int = np.flatnonzero(weights)[-1]
        return np.minimum(inputs, last)

    def _uniform(self, first: int, count: int, ended_inputs: int) -> NDArray[np.float64]:
        """Return the random number of each choice, from 0 to below 1."""
        random_bits = random_words(
            derive_key([*self._entropy, ended_inputs]), np.arange(first, first + count)
        )
        return (random_bits >> _DISCARDED_BITS).astype(np.float64) * _FLOAT_SCALE


_DISCARDED_BITS = np.uint64(11)
_FLOAT_SCALE = 2.0**-53


class _DatasetDrivenSelector(InputSelector):
    """Base class of selectors that read one value per choice from a dataset."""

    def __init__(self, input_: ElementIterator, inputs: int, step: str) -> None:
        self._input_buffer = InputBuffer(input_)
        self._inputs = inputs
        self._step = step

    @property
    def can_look_ahead(self) -> bool:
        return self._input_buffer.input.can_read_ahead

    def consume(self, count: int) -> None:
        self._input_buffer.consume(count)

    def states(self) -> States:
        states = self._input_buffer.states
        if states is not None:
            return states
        state = self._input_buffer.get_state()
        return lambda index: state

    def set_state(self, state: State) -> None:
        self._input_buffer.set_state(state)

    def close(self) -> None:
        self._input_buffer.close()


class ChoiceInputSelector(_DatasetDrivenSelector):
    """Reads the numbers of the inputs from a dataset.

    Args:
        input_: Yields integers.
        inputs: Number of inputs.
        step: Name of the step, for errors.
    """

    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        chunk = self._input_buffer.peek(count)
        if chunk is None:
            return None
        start = self._input_buffer.offset
        numbers: list[int] = []
        for choice in chunk.rows()[start : start + count]:
            number = _check_choice(choice)
            if number is None or not 0 <= number < self._inputs:
                if numbers:
                    break
                self.consume(1)
                raise InvalidElementError(
                    f"choices of {self._step} must be integers from 0 to {self._inputs - 1}, got "
                    f"{choice!r:.80}"
                )
            numbers.append(number)
        return np.array(numbers, np.int64)

    def skip_ended_input(self) -> None:
        self.consume(1)


def _check_choice(choice: object) -> int | None:
    try:
        return operator.index(choice)  # type: ignore[arg-type]
    except TypeError:
        return None


class VaryingWeightsInputSelector(_DatasetDrivenSelector):
    """Chooses inputs at random with weights from a dataset, one row per choice.

    A row without a weight for an input that has elements left is skipped.

    Args:
        entropy: Entropy of the random numbers.
        input_: Yields weights.
        inputs: Number of inputs.
        step: Name of the step, for errors.
    """

    def __init__(
        self, entropy: Sequence[int], input_: ElementIterator, inputs: int, step: str
    ) -> None:
        super().__init__(input_, inputs, step)
        self._sampler = _WeightedSampler(entropy)
        self._count = 0  # number of choices made

    def choices(self, count: int, ended: Sequence[bool]) -> NDArray[np.int64] | None:
        for _ in range(_MAX_SKIPPED_ROWS):
            chunk = self._input_buffer.peek(1)
            if chunk is None:
                return None
            try:
                row = validate_weights(chunk.rows()[self._input_buffer.offset], self._inputs)
            except (TypeError, ValueError) as error:
                self.consume(1)
                raise InvalidElementError(f"{self._step}: {error}") from error
            weights = [
                0.0 if has_ended else weight for weight, has_ended in zip(row, ended, strict=True)
            ]
            if any(weights):
                chosen = self._sampler.sample_one(self._count, weights, sum(ended))
                return np.array([chosen], np.int64)
            self.consume(1)
        _log.warning(
            "%s ends at step %d: none of the last %d steps had a weight for a dataset that has "
            "elements left (datasets %s have ended)",
            self._step,
            self._count,
            _MAX_SKIPPED_ROWS,
            [number for number, has_ended in enumerate(ended) if has_ended],
        )
        return None

    def consume(self, count: int) -> None:
        super().consume(count)
        self._count += count

    def states(self) -> States:
        states, first = super().states(), self._count
        return lambda index: {"step": first + index, "input": states(index)}

    def set_state(self, state: State) -> None:
        super().set_state(state["input"])
        self._count = state["step"]
