"""The demo's model: a small network in plain JAX, and the digits that ship with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from sklearn import datasets

__all__ = ["Classifier", "Digits", "load_digits"]

_HIDDEN = 128
_RATE = 3e-3
_PADDED = 32
"""Batches are padded to this many rows, so that JAX compiles one program for all of them."""


@dataclass(frozen=True)
class Digits:
    """8x8 images of uint8 in 0..16 and their labels of int64; every fifth is held out."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


def load_digits() -> Digits:
    """Return scikit-learn's 1,797 handwritten digits."""
    bunch = datasets.load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    held_out = np.arange(len(images)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


class Classifier:
    """A network with one hidden layer, trained with Adam."""

    def __init__(self, seed: int) -> None:
        first, second = jax.random.split(jax.random.key(seed))
        self._parameters = {
            "w1": jax.random.normal(first, (64, _HIDDEN)) * np.sqrt(2 / 64),
            "b1": jnp.zeros(_HIDDEN),
            "w2": jax.random.normal(second, (_HIDDEN, 10)) * np.sqrt(2 / _HIDDEN),
            "b2": jnp.zeros(10),
        }
        zeros = jax.tree.map(jnp.zeros_like, self._parameters)
        self._moments = (zeros, zeros)
        self._step = 0

    def train(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> tuple[float, float]:
        """Take one step on up to 32 images; return their loss and accuracy before it."""
        count = len(images)
        padded = np.zeros((_PADDED, 64), np.float32)
        padded[:count] = images.reshape(count, 64)
        targets = np.zeros(_PADDED, np.int32)
        targets[:count] = labels
        weights = (np.arange(_PADDED) < count).astype(np.float32) / count
        self._step += 1
        self._parameters, self._moments, loss, accuracy = _update(
            self._parameters, self._moments, self._step, padded, targets, weights
        )
        return float(loss), float(accuracy)

    def accuracy(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
        """Return the share of images whose label is predicted."""
        pixels = images.reshape(len(images), 64).astype(np.float32) / 16
        predicted = np.argmax(np.asarray(_logits(self._parameters, pixels)), axis=1)
        return float(np.mean(predicted == labels))


def _logits(parameters: dict[str, Any], images: Any) -> Any:
    hidden = jax.nn.relu(images @ parameters["w1"] + parameters["b1"])
    return hidden @ parameters["w2"] + parameters["b2"]


@jax.jit  # type: ignore[untyped-decorator]
def _update(
    parameters: Any, moments: Any, step: Any, images: Any, labels: Any, weights: Any
) -> tuple[Any, Any, Any, Any]:
    def objective(p: Any) -> tuple[Any, Any]:
        logits = _logits(p, images)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        right = jnp.sum(weights * (jnp.argmax(logits, axis=1) == labels))
        return -jnp.sum(weights * picked), right

    (loss, accuracy), gradients = jax.value_and_grad(objective, has_aux=True)(parameters)
    # Adam (Kingma and Ba, 2015), algorithm 1.
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], gradients)

    def stepped(p: Any, m: Any, v: Any) -> Any:
        return p - _RATE * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)

    return jax.tree.map(stepped, parameters, first, second), (first, second), loss, accuracy
