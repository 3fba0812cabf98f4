"""Scaling of the loss for gradients in half precision, on the coordinator's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

__all__ = ["LossScale", "inner_optimizer"]


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that changes variables, inside of one that scales the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


class LossScale:
    """The factor of the loss: halved after an overflow, doubled after enough finite steps.

    The rule is that of `keras.optimizers.LossScaleOptimizer`.

    Args:
        optimizer: Of a model; None: there is none.

    Attributes:
        value: The scale; None: the loss is not scaled.
    """

    def __init__(self, optimizer: Any) -> None:
        self.value: float | None = None
        self._growth_steps = 0
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self.value = float(optimizer.initial_scale)
            self._growth_steps = int(optimizer.dynamic_growth_steps)
        elif optimizer is not None and optimizer.loss_scale_factor is not None:
            self.value = float(optimizer.loss_scale_factor)
        self._finite_steps = 0

    def get_state(self) -> tuple[float | None, int]:
        """Return the scale, and how many steps were finite since it changed."""
        return self.value, self._finite_steps

    def set_state(self, state: Sequence[Any]) -> None:
        """Restore a state that `get_state` returned."""
        self.value, self._finite_steps = state

    def update(self, non_finite: Sequence[bool]) -> None:
        """Update the scale after steps.

        Args:
            non_finite: For each step, whether a gradient was not finite.
        """
        if self.value is None or not self._growth_steps:
            return
        for is_bad in non_finite:
            if is_bad:
                self.value, self._finite_steps = max(1.0, self.value / 2), 0
                continue
            self._finite_steps += 1
            if self._finite_steps == self._growth_steps:
                self.value, self._finite_steps = self.value * 2, 0
