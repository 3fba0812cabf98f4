"""Makes an optimizer of Keras record gradients in place of applying them.

A model's `train_step`, Keras' own or the user's, ends with a call of its optimizer. On a training
worker that call must return the gradients, which the parameter servers apply. On a replica of a
mirrored strategy it must return them, too, since the gradients of all replicas are applied as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["record_gradients", "recorded_gradients"]


def record_gradients(optimizer: Any) -> None:
    """Make this optimizer record gradients from now on.

    It keeps its class as a base, so that a `train_step` still finds its attributes.

    Args:
        optimizer: An optimizer of Keras without slots. It gets attributes: `recorded`, the
            pairs of gradient and variable that `apply` was called with; `scale`, by which
            `scale_loss` multiplies, and recorded gradients are divided (None: not at all); and
            `before_backward`, which `scale_loss` calls if it is set.
    """
    optimizer.scale = None
    optimizer.before_backward = None
    _replace_class(optimizer, _ScalingMixin)


@contextlib.contextmanager
def recorded_gradients(optimizer: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Make this optimizer record gradients within the context.

    It may have slots, which do not change. If it scales the loss, recorded gradients are scaled.

    Args:
        optimizer: An optimizer of Keras.

    Yields:
        The pairs of gradient and variable that `apply` was called with.
    """
    kind = type(optimizer)
    _replace_class(optimizer, _RecordingMixin)
    try:
        yield optimizer.recorded
    finally:
        optimizer.__class__ = kind


def _replace_class(optimizer: Any, mixin: type) -> None:
    kind = type(optimizer)
    # A list of the class: Keras would track one of the optimizer.
    optimizer.__class__ = type(f"Recording{kind.__name__}", (mixin, kind), {"recorded": []})


class _RecordingMixin:
    recorded: list[tuple[Any, Any]]

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[Any, list[Any]]:
        """Return the variables as they are, and the gradients as the optimizer's variables."""
        return trainable_variables, [self._unscaled(each) for each in grads]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None:
            raise ValueError(
                "optimizer.apply(gradients) in train_step: pass the variables too, as in "
                "optimizer.apply(gradients, model.trainable_variables)"
            )
        self.recorded.extend(
            (self._unscaled(each), variable)
            for each, variable in zip(grads, trainable_variables, strict=True)
        )

    def apply_gradients(self, grads_and_vars: Any) -> None:
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def _unscaled(self, gradient: Any) -> Any:
        return gradient


class _ScalingMixin(_RecordingMixin):
    scale: Any
    before_backward: Callable[[], None] | None

    def scale_loss(self, loss: Any) -> Any:
        if self.before_backward is not None:
            self.before_backward()
        return loss if self.scale is None else loss * self.scale

    def _unscaled(self, gradient: Any) -> Any:
        return gradient if self.scale is None or gradient is None else gradient / self.scale
