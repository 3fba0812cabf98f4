"""Learning-rate schedules: those of Keras, on plain numbers.

Any function of a step can be used instead; step 0 is the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


def __dir__() -> list[str]:
    return list(__all__)


@dataclass(frozen=True)
class ExponentialDecay:
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    >>> import headrace as hr
    >>> rate = hr.optimizers.schedules.ExponentialDecay(0.5, decay_steps=10, decay_rate=0.5)
    >>> rate(0), rate(10), rate(20)
    (0.5, 0.25, 0.125)

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Number of steps for one factor of `decay_rate`; more than 0.
        decay_rate: Factor applied in each `decay_steps`.
        staircase: Whether the rate changes only at whole multiples of `decay_steps`.
        name: Only informative.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False
    name: str = "ExponentialDecay"

    def __post_init__(self) -> None:
        _check_decay_steps(self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return the rate of a step."""
        decays = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (
            math.floor(decays) if self.staircase else decays
        )


@dataclass(frozen=True)
class PiecewiseConstantDecay:
    """`values[0]` up to and including step `boundaries[0]`, then `values[1]`, and so on.

    >>> rate = hr.optimizers.schedules.PiecewiseConstantDecay([100, 200], [0.1, 0.01, 0.001])
    >>> rate(100), rate(101), rate(201)
    (0.1, 0.01, 0.001)

    Args:
        boundaries: Steps, in increasing order.
        values: Rates, one more than there are boundaries.
        name: Only informative.
    """

    boundaries: Sequence[float]
    values: Sequence[float]
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.values) - 1:
            raise ValueError(
                "the length of `boundaries` must be 1 less than that of `values`, but got "
                f"boundaries={self.boundaries} of length {len(self.boundaries)} and "
                f"values={self.values} of length {len(self.values)}"
            )
        if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ValueError(f"`boundaries` must be increasing, but got {self.boundaries}")

    def __call__(self, step: float) -> float:
        """Return the rate of a step."""
        return float(self.values[sum(step > boundary for boundary in self.boundaries)])


@dataclass(frozen=True)
class PolynomialDecay:
    """From `initial_learning_rate` to `end_learning_rate` in `decay_steps`, by a power.

    >>> rate = hr.optimizers.schedules.PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.5)
    >>> rate(0), rate(5), rate(10), rate(20)
    (1.0, 0.75, 0.5, 0.5)

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Number of steps; more than 0.
        end_learning_rate: Rate after that.
        power: Exponent; 1 decays linearly.
        cycle: Whether to restart at the end, each time over one more multiple of `decay_steps`.
        name: Only informative.
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def __post_init__(self) -> None:
        _check_decay_steps(self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return the rate of a step."""
        steps = self.decay_steps
        if self.cycle:
            steps *= max(1, math.ceil(step / steps))
        remaining = 1 - min(step, steps) / steps
        span = self.initial_learning_rate - self.end_learning_rate
        return float(span * remaining**self.power + self.end_learning_rate)


@dataclass(frozen=True)
class InverseTimeDecay:
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`.

    >>> rate = hr.optimizers.schedules.InverseTimeDecay(1.0, decay_steps=10, decay_rate=1.0)
    >>> rate(0), rate(10), rate(30)
    (1.0, 0.5, 0.25)

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Unit of the decay in steps; more than 0.
        decay_rate: Strength of the decay.
        staircase: Whether the rate changes only at whole multiples of `decay_steps`.
        name: Only informative.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False
    name: str = "InverseTimeDecay"

    def __post_init__(self) -> None:
        _check_decay_steps(self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return the rate of a step."""
        decays = step / self.decay_steps
        return self.initial_learning_rate / (
            1 + self.decay_rate * (math.floor(decays) if self.staircase else decays)
        )


@dataclass(frozen=True)
class CosineDecay:
    """Linear warm-up to `warmup_target`, if it is given, then half a cosine down.

    >>> rate = hr.optimizers.schedules.CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=2)
    >>> rate(0), rate(1), rate(2), rate(7), rate(12)
    (0.0, 0.5, 1.0, 0.5, 0.0)

    Args:
        initial_learning_rate: Rate at step 0.
        decay_steps: Number of steps of the cosine; more than 0.
        alpha: Final rate, as a fraction of the rate at which the cosine begins.
        name: Only informative.
        warmup_target: Rate at which the cosine begins; None begins at `initial_learning_rate`,
            without a warm-up.
        warmup_steps: Number of warm-up steps.
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    name: str = "CosineDecay"
    warmup_target: float | None = None
    warmup_steps: float = 0

    def __post_init__(self) -> None:
        _check_decay_steps(self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return the rate of a step."""
        highest = self.initial_learning_rate
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                rise = self.warmup_target - highest
                return rise * step / self.warmup_steps + highest
            highest = self.warmup_target
            step -= self.warmup_steps
        done = min(step, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return highest * ((1 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts:
    """Half a cosine down, with restarts that may change the length and the height.

    >>> import headrace as hr
    >>> rate = hr.optimizers.schedules.CosineDecayRestarts(0.5, 10, m_mul=0.5)
    >>> rate(0), round(rate(5), 9), rate(10), rate(30)
    (0.5, 0.25, 0.25, 0.125)

    Args:
        initial_learning_rate: Rate at step 0.
        first_decay_steps: Number of steps in the first period; more than 0.
        t_mul: Factor from the length of one period to that of the next.
        m_mul: Factor from the initial rate of one period to that of the next.
        alpha: Smallest rate, as a fraction of `initial_learning_rate`.
        name: Only informative.
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str = "SGDRDecay"

    def __post_init__(self) -> None:
        _check_decay_steps(self.first_decay_steps, "first_decay_steps")

    def __call__(self, step: float) -> float:
        """Return the rate of a step."""
        done = step / self.first_decay_steps
        if self.t_mul == 1:
            period = math.floor(done)
            done -= period
        else:
            # Periods have lengths 1, t_mul, t_mul ** 2 ...; rounding must not move their ends.
            logarithm = math.log(1 - done * (1 - self.t_mul)) / math.log(self.t_mul)
            period = math.floor(logarithm + 1e-9)
            period_start = (1 - self.t_mul**period) / (1 - self.t_mul)
            done = (done - period_start) / self.t_mul**period
        cosine = 0.5 * self.m_mul**period * (1 + math.cos(math.pi * done))
        return float(self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha))


def _check_decay_steps(steps: float, name: str = "decay_steps") -> None:
    if not steps > 0:
        raise ValueError(f"`{name}` must be more than 0, but got {steps}")
