"""The model of the flights, and what workers do with it: plain NumPy, gradients by hand.

A factorization machine (Rendle, 2010): each value of each column has a weight and a vector. A
flight's score is the sum of the weights of its values, and of the products of each two of their
vectors. Without the vectors it is a logistic regression.

Apart from the demo itself, because workers import it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import headrace as hr
from headrace.parameter_server.variable import ServerVariable

__all__ = ["Model", "gradients_of", "make_model", "score_shard", "scores_of", "train_step"]

_DIM = 8
_RATE = 0.3
_SCALE = 0.05
"""First values are between this and its negative."""


class Model(NamedTuple):
    """What is on the parameter servers.

    Attributes:
        columns: A row for each value of the columns: its weight, then its vector.
        tails: The same for tail numbers: a table without a vocabulary. Aeroplanes that were never
            seen read zeros.
        bias: Added to every score.
        optimizer: Changes all of them.
    """

    columns: ServerVariable
    tails: hr.EmbeddingTable
    bias: ServerVariable
    optimizer: Any


def make_model(name: str, values: int, seed: int) -> Model:
    """Make the variables of a model; in the scope of a strategy.

    Args:
        name: Of the model: its variables begin with it.
        values: How many values the columns have.
        seed: Of the first values.
    """
    first = hr.initializers.Uniform(-_SCALE, _SCALE, seed=seed)
    variable: type[ServerVariable] = hr.Variable  # type: ignore[assignment]  # in this scope
    return Model(
        variable(first, shape=(values, 1 + _DIM), dtype="float32", name=f"{name}/columns"),
        hr.EmbeddingTable(1 + _DIM, name=f"{name}/tails", initializer=first, seed=seed),
        variable(np.float32(0), name=f"{name}/bias"),
        hr.optimizers.Adagrad(_RATE, name=f"{name}/Adagrad"),
    )


def train_step(
    model: Model, columns: NDArray[np.int64], tails: NDArray[np.int64], late: NDArray[np.float32]
) -> tuple[float, int]:
    """Take one step with a batch; return its loss before, and which worker took it."""
    rows = np.concatenate(
        [model.columns.gather(columns), model.tails.lookup(tails)[:, None]], axis=1
    )
    loss, of_rows, of_bias = gradients_of(rows, model.bias.read(), late)
    model.optimizer.apply_gradients(
        [
            (hr.IndexedSlices(of_rows[:, :-1], columns), model.columns),
            (hr.IndexedSlices(of_rows[:, -1], tails), model.tails),
            (of_bias, model.bias),
        ]
    )
    return loss, hr.coordinator.get_current_worker_index()


def score_shard(model: Model, shard: hr.Dataset) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the scores of a shard's flights, and whether they were late."""
    bias = model.bias.read()
    scores, late = [], []
    for batch in shard:
        rows = np.concatenate(
            [model.columns.gather(batch["columns"]), model.tails.gather(batch["tails"])[:, None]],
            axis=1,
        )
        scores.append(scores_of(rows, bias))
        late.append(batch["late"])
    return np.concatenate(scores), np.concatenate(late)


def scores_of(rows: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the score of each flight from its rows, of shape (flights, columns, 1 + dim)."""
    vectors = rows[..., 1:]
    total = vectors.sum(axis=1)
    # The products of each two are half of what is left of the square of the sum.
    pairs = (total * total).sum(axis=1) - (vectors * vectors).sum(axis=(1, 2))
    scores: NDArray[np.float32] = rows[..., 0].sum(axis=1) + pairs / 2 + bias
    return scores


def gradients_of(
    rows: NDArray[np.float32], bias: NDArray[np.float32], late: NDArray[np.float32]
) -> tuple[float, NDArray[np.float32], NDArray[np.float32]]:
    """Return the mean cross-entropy, and its gradients for the rows and the bias."""
    scores = scores_of(rows, bias)
    loss = float(np.mean(np.logaddexp(0, scores) - late * scores))
    of_scores = (1 / (1 + np.exp(-scores)) - late) / np.float32(len(late))
    vectors = rows[..., 1:]
    of_rows = np.empty_like(rows)
    of_rows[..., 0] = of_scores[:, None]
    of_rows[..., 1:] = of_scores[:, None, None] * (vectors.sum(axis=1, keepdims=True) - vectors)
    return loss, of_rows, of_scores.sum()
